"""End-to-end: the operator in the cluster by its chart, engines in real pods, the real router, load from outside."""

import secrets
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from examples.demo.environment import Environment, prepare
from examples.demo.fleet import Fleet
from examples.demo.kubectl import kubectl

# Names of engines' parameters: which engines, how many.
REAL = "vllm"
SIMULATED = "simulated"


@pytest.fixture(scope="session")
def environment() -> Environment:
    """Cluster, images, chart, models: made where they are missing."""
    return prepare()


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """A fleet's name in a namespace of its own, removed afterwards.

    The next test waits for the pods alone, whose NPUs and CPUs it needs: the namespace itself takes seconds longer, and
    nobody uses its name again.
    """
    made = Fleet("qwen", f"e2e-{secrets.token_hex(4)}")
    yield made
    await kubectl("delete", "namespace", made.namespace, "--ignore-not-found", "--wait=false")
    await kubectl("wait", "pods", "--all", "-n", made.namespace, "--for=delete", "--timeout=120s", timeout_s=130)


@pytest.fixture
def own_models(environment: Environment, tmp_path: Path) -> Path:
    """A copy of the simulated engines' models that a test may damage."""
    target = tmp_path / "models"
    shutil.copytree(environment.models.simulated, target)
    tmp_path.chmod(0o755)
    return target
