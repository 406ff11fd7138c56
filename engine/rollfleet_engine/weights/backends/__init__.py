"""Backends: how the bytes of a trainer's push come into a worker. Found by entry point."""
