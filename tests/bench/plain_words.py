"""The name of the transfer engine in plain_transfer.py, for who has no vLLM to import."""

BACKEND = "gloo-plain"
