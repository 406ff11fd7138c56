"""TRL as it is installed beside the environment with real vLLM: `make check-trl`."""

from pathlib import Path

import pytest

from devtools import trl_overlay, vllm_venv
from tests.contract.conftest import VLLM, models, site
from tests.contract.process import Kind

__all__ = ["models", "site"]


@pytest.fixture(scope="session")
def trl() -> Path:
    """For PYTHONPATH."""
    return trl_overlay.ensure()


@pytest.fixture(scope="session")
def kind(trl: Path) -> Kind:
    """Real vLLM: its samples are of the model that is trained."""
    python = str(vllm_venv.venv_path(vllm_venv.RELEASES[0]) / "bin" / "python")
    environ = {"ROLLFLEET_ENGINE": VLLM, "ROLLFLEET_ENGINE_PYTHON": python, "VLLM_CPU_KVCACHE_SPACE": "1"}
    return Kind(VLLM, environ, release=vllm_venv.RELEASES[0])
