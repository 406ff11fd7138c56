"""The operator as a process against a real API server, engines as real pods with simulated engines.

Their fleets carry the name of these tests' operator, so that one which the chart installed leaves them alone.
"""

import os
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from examples.demo.environment import ENGINE_IMAGE, ROOT, ROUTER_IMAGE, run, use_cluster
from examples.demo.manifests import EngineKind
from rollfleet_operator.clients.kubernetes import KubernetesCluster, load_configuration
from tests.support.cluster import SilentMeter
from tests.support.fleet import OPERATOR_NAME, World
from tests.support.operator_process import OperatorProcess

OPERATOR = "rollfleet-operator"
OWN_PREFIX = "it-"
RESYNC_S = 3
TEST_S = 300


@dataclass(frozen=True)
class Site:
    """What all tests share."""

    kubeconfig: Path
    engine_image: str
    models: Path

    def engines(self) -> EngineKind:
        """Simulated engines that ask for no device."""
        return EngineKind(image=self.engine_image, models=self.models, npus=0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set-up is not the tests' time."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_S, func_only=True))
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Cluster, image, models and CRDs; made where they are missing."""
    is_local = use_cluster()
    image, models = _engine_image(is_local=is_local), tmp_path_factory.mktemp("models") / "simulated"
    tool = ("-m", "rollfleet_engine.tools.tiny_model")
    run(sys.executable, *tool, str(models), "--checkpoints", "3", "--simulated", quiet=True)
    for folder in (models, *models.parents[:2]):  # root of the node reads it, whoever we are
        folder.chmod(0o755)
    run("kubectl", "apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"), quiet=True)
    return Site(Path(os.environ["KUBECONFIG"]), image, models)


def _engine_image(*, is_local: bool) -> str:
    """The image with simulated engines: the one that is named, else built from this tree."""
    named = os.environ.get("ROLLFLEET_ENGINE_IMAGE")
    if named:
        return named
    if not is_local:
        pytest.fail("KUBECONFIG names a cluster that is not the local one: set ROLLFLEET_ENGINE_IMAGE")
    base = f"BASE={os.environ['DEVCLUSTER_BASE_IMAGE']}"
    build = ("--file", "Dockerfile.engine", "--context", str(ROOT), "--tag", ENGINE_IMAGE, "--build-arg", base)
    run(sys.executable, "-m", "devcluster", "image", *build)
    return ENGINE_IMAGE


@pytest_asyncio.fixture
async def world(site: Site, tmp_path: Path) -> AsyncIterator[World]:
    """A namespace of its own, with an operator that runs."""
    namespace = OWN_PREFIX + secrets.token_hex(4)
    cluster = KubernetesCluster(await load_configuration(site.kubeconfig), SilentMeter())
    arguments = ("--namespace", namespace, "--resync-seconds", str(RESYNC_S), "--operator-name", OPERATOR_NAME)
    operator = OperatorProcess(namespace, site.kubeconfig, tmp_path, ROUTER_IMAGE, OPERATOR, arguments)
    made = World(namespace, cluster, operator, site.engines())
    await made.set_up()
    try:
        yield made
    finally:
        await made.tear_down()
        await cluster.close()
