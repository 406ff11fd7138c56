"""The checks, pure."""
