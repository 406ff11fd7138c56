"""What the operator's own client of guards makes of each fault: what it may do again, and what is over."""

from collections.abc import AsyncIterator, Iterator

import pytest

from rollfleet_operator.clients import guards
from rollfleet_operator.clients.errors import StaleAttempt, Unreachable
from rollfleet_operator.clients.guards import Endpoint, GuardClient
from rollfleet_protocol.commands import Arm, Cancel, Close
from rollfleet_protocol.state import EngineState, Gate, WeightsState
from tests.contract.client import Operator
from tests.contract.faulty import SIMULATED, FaultyEngine
from tests.contract.models import SimulatedModels
from tests.contract.process import Site, until
from tests.support.cluster import SilentMeter


class OwnTokens:
    """Stands for Tokens: the test's issuer mints."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    async def bearer(self, audience: str) -> str:
        """One for this fleet."""
        return self._operator.make_token(audience=audience)

    def discard(self, audience: str, text: str) -> None:
        """None is held."""


@pytest.fixture(scope="module", params=["simulator", "proxy"])
def engine(request: pytest.FixtureRequest, site: Site, tmp_path_factory) -> Iterator[FaultyEngine]:
    """The simulator's own faults, and those in front of it."""
    models = SimulatedModels(tmp_path_factory.mktemp("models"))
    one = FaultyEngine(SIMULATED, site, f"for-operators-{request.param}", models, proxied=request.param == "proxy")
    yield one
    one.process.stop()


@pytest.fixture(scope="module")
def minter(engine: FaultyEngine, site: Site) -> Iterator[Operator]:
    """Who has tokens."""
    one = Operator(engine.process, site)
    one.serve_initial()
    yield one
    one.close_client()


@pytest.fixture
async def client(minter: Operator, site: Site) -> AsyncIterator[GuardClient]:
    """The operator's."""
    tokens = OwnTokens(minter)
    made = GuardClient(site.authority.pem.decode(), tokens, SilentMeter(), lambda: True)  # type: ignore[arg-type]
    yield made
    await made.close()


@pytest.fixture
def end(engine: FaultyEngine) -> Endpoint:
    """Where the guard, or what stands before it, listens."""
    config = engine.process.config
    return Endpoint(config.fleet, "qwen-0-0-abcde", config.pod_uid, "127.0.0.1", config.control_port)


def close_of(state: EngineState) -> Close:
    """Quiesce under an epoch of its own."""
    return Close(
        incarnation=state.incarnation,
        epoch=state.epoch + 1,
        version=1,
        deadline_seconds=20,
        operator_silence_seconds=60,
    )


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"fault": "refuse", "message": "NPU 3: HBM error"}, "NPU 3: HBM error"),
        ({"fault": "badGateway", "times": 1}, "502"),
    ],
)
async def test_what_was_not_executed_is_given_again(
    engine: FaultyEngine, client: GuardClient, end: Endpoint, fault: dict[str, object], words: str
):
    state = await client.state(end, None)
    engine.plan({"call": "close", "at": [1], **fault})
    with pytest.raises(Unreachable, match=words):
        await client.command(end, close_of(state))
    assert (await client.state(end, None)).gate is Gate.OPEN
    closed = await client.command(end, close_of(state))
    assert closed.gate is Gate.CLOSED
    assert (await client.command(end, Cancel(incarnation=state.incarnation, epoch=closed.epoch))).gate is Gate.OPEN


async def test_what_was_executed_without_an_answer_is_taken_as_done(
    engine: FaultyEngine, client: GuardClient, end: Endpoint
):
    state = await client.state(end, None)
    engine.plan({"call": "close", "fault": "cut", "at": [1]}, {"call": "cancel", "fault": "cut", "at": [1]})
    with pytest.raises(Unreachable):
        await client.command(end, close_of(state))
    told = await client.state(end, None)
    assert (told.gate, told.epoch) == (Gate.CLOSED, state.epoch + 1)
    await client.command(end, close_of(state))

    def begun() -> list[object]:
        lines = [line for line in engine.process.guard_log() if line["event"] == "operation"]
        return [line["operation"] for line in lines if (line["epoch"], line["status"]) == (told.epoch, "Running")]

    until(begun, 10, "the launcher has passed the lines on")
    assert begun() == ["Close"]
    with pytest.raises(Unreachable):
        await client.command(end, Cancel(incarnation=state.incarnation, epoch=told.epoch))
    assert (await client.state(end, None)).gate is Gate.OPEN


async def test_an_engine_that_hangs_is_unreachable(
    engine: FaultyEngine, client: GuardClient, end: Endpoint, monkeypatch: pytest.MonkeyPatch
):
    state = await client.state(end, None)
    engine.plan({"call": "arm", "fault": "hang", "at": [1], "seconds": 2})
    monkeypatch.setattr(guards, "COMMAND_S", 0.5)
    with pytest.raises(Unreachable, match="no answer within the deadline"):
        await client.command(end, Arm(incarnation=state.incarnation, epoch=state.epoch))
    monkeypatch.undo()
    told = await client.state(end, None)
    assert (told.incarnation, told.gate, told.armed) == (state.incarnation, Gate.OPEN, False)


async def test_an_engine_that_was_restarted_obeys_no_command_of_before(
    engine: FaultyEngine, client: GuardClient, end: Endpoint
):
    state = await client.state(end, None)
    engine.plan({"call": "close", "fault": "restart", "at": [1]})
    with pytest.raises(Unreachable):
        await client.command(end, close_of(state))
    engine.process.wait_live()
    with pytest.raises(StaleAttempt, match="incarnation"):
        await client.command(end, close_of(state))
    told = await client.state(end, None)
    assert told.incarnation != state.incarnation
    assert (told.gate, told.weights.state) == (Gate.CLOSED, WeightsState.INITIAL)


async def test_the_canary_is_refused_and_is_none_of_the_commands(
    engine: FaultyEngine, client: GuardClient, end: Endpoint
):
    engine.plan({"call": "open", "fault": "badGateway", "at": [1], "times": 1})
    before = await client.look(end)
    await client.canary(end)
    after = await client.look(end)
    assert (after.sequence, after.pod_uid) == (before.sequence, engine.process.config.pod_uid)
