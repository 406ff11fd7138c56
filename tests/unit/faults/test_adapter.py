"""Faults inside of the engine, and what the guard makes of them: the same as of a real engine's."""

import asyncio
import io
from collections.abc import AsyncIterator

import pytest

from rollfleet_engine.faults.adapter import FaultyAdapter, FaultyStager
from rollfleet_engine.faults.injector import LOGGER, Injector
from rollfleet_engine.faults.plan import Plan, Rule
from rollfleet_engine.guard.log import GuardLog
from rollfleet_engine.guard.operations import ADAPTER_GRACE_S
from rollfleet_engine.guard.service import GuardService
from rollfleet_engine.guard.serving import Serving
from rollfleet_protocol.state import EngineState, FailureReason, Gate, WeightsState
from tests.support.guards import DEADLINE_S, Guarded, failure_of
from tests.support.hands import MemoryHands

pytestmark = pytest.mark.looptime


class Faulty(Guarded):
    """A guard over an engine that fails inside."""

    def __init__(self, *rules: dict[str, object]) -> None:
        super().__init__()
        self.hands = MemoryHands()
        plan = Plan(rules=tuple(Rule.model_validate(rule) for rule in rules))
        injector = Injector(plan, GuardLog({}, io.StringIO(), LOGGER))
        adapter = FaultyAdapter(self.engine, injector, self.hands)
        stager = FaultyStager(self.stager, injector, self.hands)
        self.service = GuardService(adapter, stager, self.turnstile, self.log, self.waiting)
        self.serving = Serving(self.app, self.turnstile, self.service, self.waiting)

    async def quiesced(self) -> EngineState:
        """Ready for a transfer to version 1."""
        await self.serve_initial()
        await self.prepare(2, 1)
        await self.close(2, 1)
        return await self.arm(2)


@pytest.fixture
async def faulty() -> AsyncIterator[object]:
    made: list[Faulty] = []

    def make(*rules: dict[str, object]) -> Faulty:
        made.append(Faulty(*rules))
        return made[-1]

    yield make
    for each in made:
        await each.service.stop()


async def test_a_refused_transfer_leaves_the_weights_uncertain(faulty) -> None:
    engine = faulty({"call": "engine.apply", "fault": "refuse", "at": [1], "message": "HCCL timeout"})
    await engine.quiesced()
    state = await engine.transfer(2, 1)
    assert failure_of(state) is FailureReason.TRANSFER_FAILED
    assert state.operation.failure.message == "engine.apply: HCCL timeout"
    assert state.weights.state is WeightsState.UNCERTAIN
    assert state.gate is Gate.CLOSED
    assert engine.engine.calls["apply"] == 0
    assert (await engine.update(3, 1)).gate is Gate.OPEN


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("engine.stage", FailureReason.CHECKPOINT_INVALID),
        ("engine.pause", FailureReason.PAUSE_FAILED),
        ("engine.resetCaches", FailureReason.CACHE_RESET_FAILED),
        ("engine.resume", FailureReason.PAUSE_FAILED),
        ("engine.probe", FailureReason.PROBE_FAILED),
    ],
)
async def test_each_call_fails_for_its_own_reason(faulty, call: str, reason: FailureReason) -> None:
    # The probe of the start comes first.
    engine = faulty(
        {"call": call, "fault": "refuse", "at": [2 if call in ("engine.resetCaches", "engine.probe") else 1]}
    )
    await engine.serve_initial()
    state = await engine.prepare(2, 1)
    if call != "engine.stage":
        state = await engine.close(2, 1)
    if call not in ("engine.stage", "engine.pause"):
        await engine.arm(2)
        await engine.transfer(2, 1)
        state = await engine.verify(2, 1)
    assert failure_of(state) is reason


async def test_a_delay_past_the_deadline_is_one(faulty) -> None:
    engine = faulty(
        {"call": "engine.pause", "fault": "delay", "at": [1], "seconds": 5},
        {"call": "engine.apply", "fault": "delay", "at": [1], "seconds": DEADLINE_S + 1},
    )
    loop = asyncio.get_running_loop()
    began = loop.time()
    await engine.quiesced()
    assert loop.time() - began == pytest.approx(5, abs=1)
    state = await engine.transfer(2, 1)
    assert failure_of(state) is FailureReason.DEADLINE_EXCEEDED
    assert state.weights.state is WeightsState.UNCERTAIN
    assert loop.time() - began < 5 + DEADLINE_S + 1


async def test_a_call_that_hangs_is_given_up(faulty) -> None:
    engine = faulty({"call": "engine.apply", "fault": "hang", "at": [1]})
    await engine.quiesced()
    began = asyncio.get_running_loop().time()
    state = await engine.transfer(2, 1)
    assert failure_of(state) is FailureReason.DEADLINE_EXCEEDED
    assert asyncio.get_running_loop().time() - began == pytest.approx(DEADLINE_S + ADAPTER_GRACE_S, abs=1)
    assert state.weights.state is WeightsState.UNCERTAIN


@pytest.mark.parametrize("fault", ["die", "restart"])
async def test_the_engine_ends_in_the_middle_of_a_transfer(faulty, fault: str) -> None:
    engine = faulty({"call": "engine.apply", "fault": fault, "at": [1]})
    await engine.quiesced()
    await engine.transfer(2, 1)
    assert engine.hands.done == [fault]
