"""The operator as a process against a real API server, engines as real pods with simulated engines.

An operator that the chart installed would work on the same fleets, so it is scaled to zero for the time of these tests.
"""

import json
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from devtools import vllm_venv
from examples.demo.environment import (
    ROOT,
    SYSTEM_NAMESPACE,
    Images,
    Models,
    build_images,
    make_models,
    run,
    use_cluster,
)
from examples.demo.manifests import EngineKind
from rollfleet_operator.clients.kubernetes import KubernetesCluster, load_configuration
from tests.support.cluster import SilentMeter
from tests.support.fleet import World
from tests.support.operator_process import OperatorProcess

OPERATOR = "rollfleet-operator"
OWN_PREFIX = "it-"
RESYNC_S = 3


@dataclass(frozen=True)
class Site:
    """What all tests share."""

    kubeconfig: Path
    images: Images
    models: Models

    def engines(self) -> EngineKind:
        """Simulated engines that ask for no device."""
        return EngineKind(image=self.images.engine, models=self.models.simulated, npus=0)


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """Cluster, images, models and CRDs; made where they are missing."""
    local = use_cluster()
    images, models = build_images(local=local), make_models(vllm_venv.ensure())
    run("kubectl", "apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"), quiet=True)
    with ExitStack() as stack:
        replicas = _installed_replicas()
        if replicas:
            _demand_no_other_fleets()
            _scale_installed(0)
            stack.callback(_scale_installed, replicas)
        yield Site(Path(os.environ["KUBECONFIG"]), images, models)


@pytest_asyncio.fixture
async def world(site: Site, tmp_path: Path) -> AsyncIterator[World]:
    """A namespace of its own, with an operator that runs."""
    namespace = OWN_PREFIX + secrets.token_hex(4)
    cluster = KubernetesCluster(await load_configuration(site.kubeconfig), SilentMeter())
    arguments = ("--namespace", namespace, "--resync-seconds", str(RESYNC_S))
    operator = OperatorProcess(namespace, site.kubeconfig, tmp_path, site.images.router, OPERATOR, arguments)
    made = World(namespace, cluster, operator, site.engines())
    await made.set_up()
    try:
        yield made
    finally:
        await made.tear_down()
        await cluster.close()


def _installed_replicas() -> int:
    listed = json.loads(run("kubectl", "get", "deployments", "-n", SYSTEM_NAMESPACE, "-o", "json", quiet=True))
    return sum(item["spec"]["replicas"] for item in listed["items"] if item["metadata"]["name"] == OPERATOR)


def _demand_no_other_fleets() -> None:
    listed = json.loads(run("kubectl", "get", "rolloutengines", "-A", "-o", "json", quiet=True))
    others = [f"{item['metadata']['namespace']}/{item['metadata']['name']}" for item in listed["items"]]
    others = [name for name in others if not name.startswith(OWN_PREFIX)]
    if others:
        pytest.fail(
            f"the installed operator must not be stopped: it has fleets ({', '.join(others)}); delete them first"
        )


def _scale_installed(replicas: int) -> None:
    target = (f"deployment/{OPERATOR}", "-n", SYSTEM_NAMESPACE)
    run("kubectl", "scale", *target, f"--replicas={replicas}", quiet=True)
    run("kubectl", "rollout", "status", *target, "--timeout=90s", quiet=True)
