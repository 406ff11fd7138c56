"""C23: engines name what they have; what one lacks is missing from its facts, fails when it is asked for all the same,
and is named by the operator before it pauses anything.
"""

from collections.abc import Iterator

import pytest

from rollfleet_engine.guard.adapting import CAPABILITIES
from rollfleet_engine.simulator.__main__ import LACKS_VARIABLE
from rollfleet_operator.api.weightversion import Pause
from rollfleet_protocol.commands import PauseMode
from rollfleet_protocol.state import FailureReason, Gate, WeightsState
from tests.contract.client import STEP_TIMEOUT_S, Operator, operation_of
from tests.contract.conftest import SIMULATOR, run_engine
from tests.contract.models import SimulatedModels
from tests.contract.process import EngineProcess, Kind, Site
from tests.support.simulated_updates import DEADLINES, bump, failed, make_world

LACKING = ("pause/keep", "sleep/2", "verify/Coverage")


def test_an_engine_lacks_nothing_of_the_contract(operator: Operator):
    """But pushes, for which its spec names no backend."""
    assert set(operator.state().facts.capabilities) == set(CAPABILITIES) - {"source/Trainer"}


@pytest.fixture(scope="module")
def lacking(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A simulator that was started without some."""
    models = SimulatedModels(tmp_path_factory.mktemp("models-lacking"))
    kind = Kind(SIMULATOR, {"ROLLFLEET_ENGINE": SIMULATOR, LACKS_VARIABLE: ",".join(LACKING)})
    yield from run_engine(kind, site, "lacking", models.folder(0), models)


@pytest.fixture(scope="module")
def its_operator(lacking: EngineProcess, site: Site) -> Iterator[Operator]:
    one = Operator(lacking, site)
    one.serve_initial()
    yield one
    one.close_client()


def test_c23_what_an_engine_lacks_is_logged_and_not_named(lacking: EngineProcess, its_operator: Operator):
    told = {line["capability"] for line in lacking.guard_log() if line["event"] == "engine.lacks"}
    assert told == set(LACKING)
    assert set(its_operator.state().facts.capabilities) == set(CAPABILITIES) - {*LACKING, "source/Trainer"}


def test_c23_it_fails_when_it_is_asked_for_all_the_same(its_operator: Operator):
    epoch = its_operator.next_epoch()
    state = its_operator.finish(
        "close", epoch, version=1, mode="keep", deadlineSeconds=STEP_TIMEOUT_S, operatorSilenceSeconds=60
    )
    failure = operation_of(state).failure
    assert failure is not None
    assert (failure.reason, failure.message) == (
        FailureReason.PAUSE_FAILED,
        "the simulator was started without pause/keep",
    )
    assert its_operator.do("cancel", epoch).gate is Gate.OPEN
    assert its_operator.state().weights.state is WeightsState.VERIFIED


@pytest.mark.parametrize(("mode", "named"), [(PauseMode.ABORT, "verify/Coverage"), (PauseMode.KEEP, "pause/keep")])
def test_c23_the_operator_names_what_is_missing_before_any_pause(
    its_operator: Operator, monkeypatch: pytest.MonkeyPatch, mode: PauseMode, named: str
):
    """The facts are a real engine's, the decisions the operator's own, its cluster is simulated."""
    capabilities = its_operator.state().facts.capabilities
    facts = make_world().process_of(0).wire(0).facts.model_copy(update={"capabilities": capabilities})
    monkeypatch.setattr("tests.support.simulated_engine.FACTS", facts)
    world = make_world()
    bump(world, 1, pause=Pause(mode=mode), deadlines=DEADLINES.model_copy(update={"prepare_seconds": 5}))
    while not world.ended(1):
        world.step()
        assert world.open_versions() == [0, 0, 0]
    assert named in failed(world, 1, "Unsupported").partition(" lacks ")[2]
