"""A probe on demand: changes nothing, and gives way."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from rollfleet_engine.guard.control import ControlApp
from rollfleet_engine.guard.service import RejectedError
from rollfleet_protocol.commands import PROBE_PATH, Probe
from rollfleet_protocol.refusals import Refusal, RefusalReason
from rollfleet_protocol.state import FailureReason, Gate, ProbeReport, WeightsState
from tests.support.guards import OPERATOR, OPERATOR_TOKEN, TOKENS, Guarded, MemoryVerifier, eventually
from tests.support.memory_engine import engine_error

pytestmark = pytest.mark.looptime


def probe_of(guarded: Guarded, incarnation: str = "") -> Probe:
    return Probe(incarnation=incarnation or guarded.service.incarnation, tokens=TOKENS, deadline_seconds=5)


async def refused(guarded: Guarded, incarnation: str = "") -> RefusalReason:
    with pytest.raises(RejectedError) as caught:
        await guarded.service.probe(probe_of(guarded, incarnation))
    return caught.value.rejection.reason


async def test_a_serving_engine_answers_and_nothing_changes(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.update(2, 1)
    before = guarded.state
    report = await guarded.service.probe(probe_of(guarded))
    assert report.by_rank == ((-2.0, -3.0),)
    assert (report.weights, report.gate, report.epoch) == (before.weights, Gate.OPEN, 2)
    assert report.incarnation == guarded.service.incarnation
    assert guarded.state == before


async def test_it_is_no_word_of_the_operator(guarded: Guarded) -> None:
    await guarded.serve_initial()
    await guarded.prepare(2, 1)
    state = await guarded.close(2, 1)
    assert await refused(guarded) is RefusalReason.ORDER_VIOLATION
    assert guarded.state == state.model_copy(update={"operation": guarded.state.operation})


async def test_a_close_ends_it_before_it_pauses(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.engine.hangs.add("probe")
    probing = asyncio.create_task(guarded.service.probe(probe_of(guarded)))
    await eventually(lambda: guarded.engine.calls["probe"] == 2)
    state = await guarded.close(2, 1)
    assert state.paused
    with pytest.raises(RejectedError) as caught:
        await probing
    assert caught.value.rejection.reason is RefusalReason.ORDER_VIOLATION


async def test_preparing_does_not_end_it(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.stager.gate = asyncio.Event()
    preparing = asyncio.create_task(guarded.prepare(2, 1))
    await eventually(lambda: guarded.stager.started == 1)
    assert (await guarded.service.probe(probe_of(guarded))).weights.version == 0
    guarded.stager.gate.set()
    assert (await preparing).staged is not None


async def test_one_at_once(guarded: Guarded) -> None:
    await guarded.serve_initial()
    guarded.engine.hangs.add("probe")
    probing = asyncio.create_task(guarded.service.probe(probe_of(guarded)))
    await eventually(lambda: guarded.engine.calls["probe"] == 2)
    assert await refused(guarded) is RefusalReason.BUSY
    probing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probing
    guarded.engine.hangs.clear()
    assert (await guarded.service.probe(probe_of(guarded))).by_rank


async def test_what_cannot_be_probed(guarded: Guarded) -> None:
    assert (await guarded.service.probe(probe_of(guarded))).weights.state is WeightsState.INITIAL
    assert await refused(guarded, incarnation="before") is RefusalReason.WRONG_INCARNATION
    guarded.engine.failures["probe"] = engine_error(FailureReason.PROBE_FAILED)
    assert await refused(guarded) is RefusalReason.PROBE_FAILED
    guarded.engine.failures.clear()
    await guarded.serve_initial()
    await guarded.prepare(2, 1)
    await guarded.close(2, 1)
    await guarded.arm(2)
    guarded.engine.failures["apply"] = engine_error(FailureReason.TRANSFER_FAILED, touched=True)
    await guarded.transfer(2, 1)
    assert await refused(guarded) is RefusalReason.ORDER_VIOLATION
    guarded.engine.is_alive = False
    await eventually(lambda: not guarded.state.alive)
    assert await refused(guarded) is RefusalReason.ORDER_VIOLATION


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
async def test_an_answer_without_numbers_is_told_as_such(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """JSON has no word for it: the whole report could not be read."""

    async def answer(tokens: tuple[int, ...], deadline_s: float) -> tuple[tuple[float, ...], ...]:
        return ((-2.0, value),)

    await guarded.serve_initial()
    monkeypatch.setattr(guarded.engine, "probe", answer)
    with pytest.raises(RejectedError) as caught:
        await guarded.service.probe(probe_of(guarded))
    assert caught.value.rejection.reason is RefusalReason.PROBE_FAILED
    assert str(value) in caught.value.rejection.message


@pytest.fixture
async def client(guarded: Guarded) -> AsyncIterator[httpx.AsyncClient]:
    app = ControlApp(guarded.service, MemoryVerifier(), OPERATOR, guarded.log)
    headers = {"Authorization": f"Bearer {OPERATOR_TOKEN}"}
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="https://guard", headers=headers) as client:
        yield client


async def test_over_the_wire(guarded: Guarded, client: httpx.AsyncClient) -> None:
    body = probe_of(guarded).model_dump(mode="json", by_alias=True)
    answer = await client.post(PROBE_PATH, json=body)
    assert answer.status_code == 200
    assert ProbeReport.model_validate_json(answer.content).tokens == TOKENS
    for changes, status in (
        ({"incarnation": "before"}, 409),
        ({"tokens": [1]}, 400),
        ({"deadlineSeconds": 600}, 400),
        ({"epoch": 3}, 400),
    ):
        answer = await client.post(PROBE_PATH, json=body | changes)
        assert answer.status_code == status, answer.text
        assert Refusal.model_validate_json(answer.content).error.code == status
    assert (await client.post(PROBE_PATH, json=body, headers={"Authorization": ""})).status_code == 401
    assert guarded.lines("control")[0]["command"] == "probe"
