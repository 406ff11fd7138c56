"""Benchmarks: both sides of each comparison in one run."""
