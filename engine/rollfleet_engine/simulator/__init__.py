"""A server with vLLM's HTTP surface behind the real guard: real checkpoint files, computed answers, no torch."""
