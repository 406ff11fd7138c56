"""Checkpoints as an engine sees them: layout, headers, staging, coverage and what the workers are told. No torch."""
