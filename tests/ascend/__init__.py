"""What needs the sources of a vLLM-Ascend: `make check-rlconfig-023`."""
