"""Real vLLM on the CPU, at the level of Python: adapter, workers, transfer back end."""
