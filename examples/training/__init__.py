"""A training loop on a fleet: GRPO with a toy reward (README.md)."""
