"""As vLLM-Ascend has it."""
