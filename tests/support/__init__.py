"""Shared builders and helpers of the tests."""
