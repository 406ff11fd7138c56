"""Where the CPU's stand-in of vLLM-Ascend and torch_npu lies, for the vLLM that the tests run with."""

from pathlib import Path

from devtools import vllm_venv

ASCEND = Path(__file__).parent / "ascend"
ASCEND_023 = Path(__file__).parent / "ascend_023"


def stand_in() -> tuple[Path, ...]:
    """Folders for the head of the module search path."""
    return (ASCEND, ASCEND_023) if vllm_venv.chosen_release() == "0.23.0" else (ASCEND,)
