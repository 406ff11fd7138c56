"""One suite, two engines: the simulator and real vLLM, each behind the same guard and started by the same launcher."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools import vllm_venv
from tests.contract.client import Client, Operator
from tests.contract.models import Models, SimulatedModels, TinyModels
from tests.contract.process import EngineProcess, Kind, Site
from tests.support.issuer import CertificateAuthority, Issuer

SIMULATOR, VLLM = "simulator", "vllm"
LAST_MODULE = "test_shutdown"  # its tests end the shared engine
# Slow enough that a request is still running when something happens to it, fast enough not to be waited for.
MS_PER_TOKEN = "1.5"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Within an engine's tests those that end it come last; every test may wait for a start of vLLM."""
    ours = [item for item in items if Path(str(item.path)).parent == Path(__file__).parent]
    for item in ours:
        item.add_marker(pytest.mark.contract)
        item.add_marker(pytest.mark.timeout(400))
    places = [place for place, item in enumerate(items) if item in ours]
    ordered = sorted(ours, key=lambda item: (VLLM in item.name.partition("[")[2], LAST_MODULE in str(item.path)))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


@pytest.fixture(scope="session", params=[SIMULATOR, VLLM])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Which engine."""
    if request.param == SIMULATOR:
        environ = {"ROLLFLEET_ENGINE": SIMULATOR, "ROLLFLEET_SIMULATOR_TOKEN_MS": MS_PER_TOKEN}
        return Kind(SIMULATOR, environ)
    venv = vllm_venv.venv_path()
    if not vllm_venv.is_complete(venv):
        pytest.skip(f"no vLLM at {venv}: `make vllm-venv` builds it")
    python = str(venv / "bin" / "python")
    environ = {"ROLLFLEET_ENGINE": VLLM, "ROLLFLEET_ENGINE_PYTHON": python, "VLLM_CPU_KVCACHE_SPACE": "1"}
    release = vllm_venv.chosen_release()
    if release == "0.23.0":  # it binds each data-parallel rank to a NUMA node of its own, and here is one
        environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return Kind(VLLM, environ, release=release)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Issuer of tokens, CA of the fleet."""
    folder = tmp_path_factory.mktemp("site")
    issuer = Issuer(folder)
    yield Site(folder, issuer, CertificateAuthority("test fleet CA"))
    issuer.close()


@pytest.fixture(scope="session")
def models(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Base and checkpoints with their answers."""
    root = tmp_path_factory.mktemp(f"models-{kind.name}")
    return SimulatedModels(root) if kind.name == SIMULATOR else TinyModels(root)


def run_engine(
    kind: Kind, site: Site, name: str, model: Path, models: Models, **changes: Any
) -> Iterator[EngineProcess]:
    """A fixture's body: an engine of its own, configured as the changes say."""
    process = EngineProcess(kind, site, f"{kind.name}-{name}", model, models.root, **changes)
    try:
        process.wait_live()
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="session")
def engine(kind: Kind, site: Site, models: Models) -> Iterator[EngineProcess]:
    """The engine that most tests share; it started from base. Tests must not rely on the version it holds."""
    yield from run_engine(kind, site, "main", models.folder(0), models, features={"tokenEndpoint": "Enabled"})


@pytest.fixture(scope="session")
def fresh(kind: Kind, site: Site, models: Models) -> Iterator[EngineProcess]:
    """An engine that was started from step-2 and never updated; ended by the tests of its death."""
    yield from run_engine(kind, site, "fresh", models.folder(2), models)


@pytest.fixture(scope="session")
def operator(engine: EngineProcess, site: Site) -> Iterator[Operator]:
    """Who controls the shared engine."""
    one = Operator(engine, site)
    yield one
    one.close_client()


@pytest.fixture(scope="session")
def client(engine: EngineProcess) -> Iterator[Client]:
    """A user of the shared engine."""
    one = Client(engine)
    yield one
    one.close_client()


@pytest.fixture(scope="session")
def fresh_operator(fresh: EngineProcess, site: Site) -> Iterator[Operator]:
    """Who controls the fresh engine."""
    one = Operator(fresh, site)
    yield one
    one.close_client()


@pytest.fixture(scope="session")
def fresh_client(fresh: EngineProcess) -> Iterator[Client]:
    """A user of the fresh engine."""
    one = Client(fresh)
    yield one
    one.close_client()


@pytest.fixture
def serving(operator: Operator, models: Models) -> Operator:
    """The operator of an engine that serves version 1."""
    state = operator.state()
    digest = models.digest(1)
    if not (state.gate == "Open" and state.weights.version == 1 and state.weights.digest == digest):
        operator.update(1, "step-1")
    return operator
