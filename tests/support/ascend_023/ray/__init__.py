"""Nothing of Ray: vLLM 0.23's ipc_engine imports it by name, and vLLM-Ascend's images have it."""
