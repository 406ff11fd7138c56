"""A trainer's push through the guard: who may call, in which order, and how it ends. Engine in memory."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollfleet_engine.guard.adapting import with_backend
from rollfleet_engine.guard.identity import Caller
from rollfleet_engine.guard.native import NativeRoutes
from rollfleet_engine.guard.ports import EngineError
from rollfleet_engine.guard.pushing import OutOfOrderError, PushSession
from rollfleet_engine.guard.service import RejectedError
from rollfleet_protocol.commands import Push, Sender, Transfer
from rollfleet_protocol.pushes import TensorList, UpdateInfo
from rollfleet_protocol.state import DigestSource, EngineState, FailureReason, Gate, OperationStatus, WeightsState
from tests.support.guards import DEADLINE_S, Guarded
from tests.support.memory_engine import MemoryEngine, digest_of, engine_error

GRPO = Caller("system:serviceaccount:rl:grpo", "grpo-uid")
PUSH = Push(sender=Sender(subject=GRPO.subject, uid=GRPO.uid), backend="gloo", rank_offset=1, world_size=2, workers=1)
UPDATE = UpdateInfo(names=["step-2"], dtype_names=["float32"], shapes=[[1]])


pytestmark = pytest.mark.looptime


@pytest.fixture
async def guarded() -> AsyncIterator[Guarded]:
    one = Guarded()
    await one.serve_initial()
    await one.close(2, 2)
    await one.arm(2)
    yield one
    await one.service.stop()


async def order(guarded: Guarded, epoch: int = 2, deadline_s: float = DEADLINE_S, **changes: Any) -> PushSession:
    """The operator's Transfer, and the session that it opens."""
    push = PUSH.model_copy(update=changes)
    await guarded.service.command(
        Transfer(
            incarnation=guarded.service.incarnation, epoch=epoch, version=2, push=push, deadline_seconds=deadline_s
        )
    )
    await asyncio.sleep(0.01)
    session = guarded.service.push
    assert session is not None
    return session


async def test_the_four_phases_lead_to_loaded_and_open(guarded: Guarded) -> None:
    session = await order(guarded)
    assert guarded.state.weights.state is WeightsState.VERIFIED, "nothing is touched before the trainer begins"
    await session.init({"rank_offset": 1, "world_size": 2})
    await session.start()
    assert guarded.state.weights.state is WeightsState.VERIFIED, "nor before the tensors are known to fit"
    assert not guarded.engine.calls["push_start"]
    await session.update(UPDATE)
    assert guarded.state.weights.state is WeightsState.UPDATING
    await session.finish("2", digest_of("step-2"))
    state = await guarded.ended()
    assert (state.weights.state, state.weights.digest) == (WeightsState.LOADED, digest_of("step-2"))
    assert state.transferred is not None
    assert state.transferred.digest_source is DigestSource.TRAINER
    assert guarded.engine.order[-4:] == ["push_init", "push_start", "push_update", "push_finish"]
    await guarded.verify(2, 2)
    state = await guarded.open(2, 2)
    assert state.gate is Gate.OPEN
    assert not guarded.service.is_sender(GRPO), "after the update it may call nothing"


async def test_only_the_named_sender_may_call_and_only_while_armed(guarded: Guarded) -> None:
    native = NativeRoutes(guarded.service)
    assert not native.takes(GRPO, "/start_weight_update")
    await order(guarded)
    assert native.takes(GRPO, "/start_weight_update")
    assert not native.takes(GRPO, "/sleep")
    assert not native.takes(Caller(GRPO.subject, "made anew"), "/start_weight_update")
    await guarded.cancel(2)
    assert not native.takes(GRPO, "/start_weight_update")


@pytest.mark.parametrize("body", [b"", b"{}", b" null "])
async def test_an_empty_body_starts_an_update_as_vllm_s_own_client_sends_it(guarded: Guarded, body: bytes) -> None:
    await order(guarded)

    async def read(largest: int) -> bytes:
        return body

    session = guarded.service.push
    assert session is not None
    await NativeRoutes(guarded.service).answer(GRPO, "/start_weight_update", read)
    await session.update(UPDATE)
    assert guarded.state.weights.state is WeightsState.UPDATING


OTHERS = TensorList(names=["model.nom"], dtype_names=["float32"], shapes=[[1]])
OTHERS_UPDATE = UpdateInfo.model_validate(OTHERS.model_dump(exclude_unset=True))


@pytest.mark.parametrize("told", ["at the start", "by the first update", "by a later update"])
async def test_tensors_that_do_not_fit_are_refused_before_layers_give_up_theirs(guarded: Guarded, told: str) -> None:
    guarded.stager.misfits = {"model.nom"}
    session = await order(guarded)

    async def push() -> None:
        await session.start(OTHERS if told == "at the start" else None, whole=True)
        if told == "by a later update":
            await session.update(UPDATE)
            guarded.engine.failures["push_update"] = engine_error(FailureReason.COVERAGE_FAILED, "model.nom: unknown")
        await session.update(OTHERS_UPDATE)

    with pytest.raises(EngineError, match=r"model\.nom"):
        await push()
    state = await guarded.ended()
    assert state.operation is not None
    assert state.operation.failure is not None
    assert state.operation.failure.reason is FailureReason.COVERAGE_FAILED
    late = told == "by a later update"
    assert state.weights.state is (WeightsState.UNCERTAIN if late else WeightsState.VERIFIED)
    assert guarded.engine.calls["push_start"] == late
    if not late:
        assert (await guarded.cancel(2)).gate is Gate.OPEN


async def test_what_is_said_to_be_all_is_judged_as_all(guarded: Guarded) -> None:
    session = await order(guarded)
    await session.start(OTHERS, whole=True)
    assert guarded.stager.judged[-1] == ({"model.nom": ("F32", (1,))}, True)
    judged = len(guarded.stager.judged)
    await session.update(UPDATE)
    await session.update(UPDATE)
    assert guarded.stager.judged[judged:] == [({"step-2": ("F32", (1,))}, False)], "workers look at what comes later"
    assert guarded.engine.calls["push_start"] == 1


async def test_a_model_whose_files_cannot_be_read_ends_the_push_untouched(guarded: Guarded) -> None:
    guarded.stager.judging_s = 1000
    session = await order(guarded, deadline_s=2)
    with pytest.raises(EngineError, match="does its file system answer"):
        await session.start(OTHERS)
    state = await guarded.ended()
    assert state.weights.state is WeightsState.VERIFIED
    assert "does its file system answer" in failure_of(state), "it is not the trainer's fault"


async def test_cancel_waits_for_no_file_system(guarded: Guarded) -> None:
    guarded.stager.judging_s = 1000
    session = await order(guarded, deadline_s=600)
    starting = asyncio.create_task(session.start(OTHERS))
    await asyncio.sleep(0.1)
    began = asyncio.get_running_loop().time()
    assert (await guarded.cancel(2)).gate is Gate.OPEN
    assert asyncio.get_running_loop().time() - began < 1
    with pytest.raises(OutOfOrderError, match="has ended"):
        await starting


async def test_what_comes_after_an_untouched_push_waits_until_the_workers_are_put_back(guarded: Guarded) -> None:
    session = await order(guarded)
    guarded.engine.slow_s = 3
    session.abort("no more")
    await asyncio.sleep(0.1)
    assert guarded.engine.order[-1] == "recover"
    await guarded.cancel(2)
    assert guarded.engine.order[-2:] == ["recover", "resume"]
    assert guarded.state.gate is Gate.OPEN


async def test_workers_that_could_not_be_put_back_are_before_the_next_push(guarded: Guarded) -> None:
    """They may be in a group whose name the next one has, too."""
    session = await order(guarded)
    await session.init({})
    guarded.engine.failures["recover"] = engine_error(FailureReason.TRANSFER_FAILED)
    session.abort("no more")
    state = await guarded.ended()
    assert state.weights.state is WeightsState.VERIFIED
    guarded.engine.failures.clear()
    await guarded.close(3, 2)
    await guarded.arm(3)
    before = guarded.engine.calls["recover"]
    session = await order(guarded, 3)
    await session.init({})
    assert guarded.engine.calls["recover"] == before + 1


@pytest.mark.parametrize("what", ["cancel", "newer epoch"])
async def test_so_are_those_of_a_push_that_was_given_up(guarded: Guarded, what: str) -> None:
    session = await order(guarded)
    await session.init({})
    if what == "cancel":
        await guarded.cancel(2)
    await guarded.close(3, 2)
    await guarded.arm(3)
    before = guarded.engine.calls["recover"]
    session = await order(guarded, 3)
    await session.init({})
    assert guarded.engine.calls["recover"] == before + 1


async def test_the_model_is_read_before_a_push_can_wait_for_it() -> None:
    for backend in ("gloo", ""):
        one = Guarded(backend=backend)
        await one.serve_initial()
        await asyncio.sleep(0.1)
        assert one.stager.judged == ([({}, False)] if backend else [])
        await one.service.stop()


@pytest.mark.parametrize("what", ["abort", "newer epoch", "cancel"])
async def test_what_ends_a_push_while_it_is_judged_leaves_the_engine_untouched(guarded: Guarded, what: str) -> None:
    guarded.stager.judging_s = 1
    session = await order(guarded)
    await session.start()
    updating = asyncio.create_task(session.update(UPDATE))
    await asyncio.sleep(0.1)
    if what == "abort":
        session.abort("no more")
    elif what == "cancel":
        await guarded.cancel(2)
    else:
        await guarded.close(3, 2)
    with pytest.raises(OutOfOrderError, match="ended"):
        await updating
    state = await guarded.ended()
    assert state.weights.state is WeightsState.VERIFIED
    assert not guarded.engine.calls["push_start"]


async def test_calls_out_of_order_change_nothing_and_say_what_comes_first(guarded: Guarded) -> None:
    session = await order(guarded)
    with pytest.raises(OutOfOrderError, match="start_weight_update comes before"):
        await session.update(UPDATE)
    with pytest.raises(OutOfOrderError, match="come before finish"):
        await session.finish(None, None)
    with pytest.raises(OutOfOrderError) as raised:
        await session.init({"rank_offset": "x" * 60_000})
    assert len(str(raised.value)) < 200, "what a trainer sends comes back in a few words"
    with pytest.raises(OutOfOrderError, match="rank_offset is 1 in this update, not 5"):
        await session.init({"rank_offset": 5})
    with pytest.raises(OutOfOrderError, match="world_size is 2"):
        await session.init({"world_size": 9})
    await session.start()
    with pytest.raises(OutOfOrderError, match="update_weights comes next"):
        await session.start()
    await session.update(UPDATE)
    with pytest.raises(OutOfOrderError, match="weight_version is '2'"):
        await session.finish("default", None)
    assert guarded.engine.calls["push_finish"] == 0
    assert guarded.state.operation is not None
    assert guarded.state.operation.status is OperationStatus.RUNNING


async def test_one_call_at_a_time(guarded: Guarded) -> None:
    session = await order(guarded)
    guarded.engine.slow_s = 1
    first = asyncio.create_task(session.init({}))
    await asyncio.sleep(0.1)
    with pytest.raises(OutOfOrderError, match="init is running"):
        await session.start()
    await first


@pytest.mark.parametrize(("phase", "touched"), [("push_init", False), ("push_start", False), ("push_update", True)])
async def test_what_fails_is_told_to_both_and_touches_from_the_third_phase_on(
    guarded: Guarded, phase: str, touched: bool
) -> None:
    guarded.engine.failures[phase] = engine_error(FailureReason.TRANSFER_FAILED, "rank 3: no memory")
    session = await order(guarded)

    async def push() -> None:
        await session.init({})
        await session.start()
        await session.update(UPDATE)

    with pytest.raises(EngineError, match="rank 3"):
        await push()
    state = await guarded.ended()
    assert state.operation is not None
    assert state.operation.failure is not None
    assert state.operation.failure.message == "rank 3: no memory"
    assert state.weights.state is (WeightsState.UNCERTAIN if touched else WeightsState.VERIFIED)
    assert guarded.engine.calls["recover"] == (0 if touched else 1), "workers leave the group"
    if not touched:
        assert (await guarded.cancel(2)).gate is Gate.OPEN


async def test_what_no_adapter_foresaw_ends_the_push(guarded: Guarded) -> None:
    guarded.engine.failures["push_update"] = KeyError("names")
    session = await order(guarded)
    await session.start()
    with pytest.raises(KeyError):
        await session.update(UPDATE)
    assert failure_of(await guarded.ended()).endswith("KeyError: 'names'")


def failure_of(state: EngineState) -> str:
    assert state.operation is not None
    assert state.operation.failure is not None
    return state.operation.failure.message


async def test_c17_another_number_of_workers_stops_before_the_first_phase(guarded: Guarded) -> None:
    await guarded.service.command(
        Transfer(
            incarnation=guarded.service.incarnation,
            epoch=2,
            version=2,
            push=PUSH.model_copy(update={"workers": 4}),
            deadline_seconds=DEADLINE_S,
        )
    )
    state = await guarded.ended()
    assert failure_of(state) == "this engine has 1 workers, the ranks were numbered for 4"
    assert state.weights.state is WeightsState.VERIFIED
    assert guarded.engine.calls["push_init"] == 0


async def test_c28_unchanged_weights_that_only_the_engines_vouch_for_are_no_match(guarded: Guarded) -> None:
    for epoch, digest, fails in ((2, None, False), (3, None, True), (4, digest_of("step-2"), False)):
        if epoch > 2:
            await guarded.close(epoch, 2)
            await guarded.arm(epoch)
        session = await order(guarded, epoch)
        await session.start()
        await session.update(UPDATE)
        await session.finish(None, digest)
        state = await guarded.ended()
        if fails:
            assert "just what they held before" in failure_of(state)
            assert state.weights.state is WeightsState.UNCERTAIN
        else:
            assert state.weights.state is WeightsState.LOADED
        if epoch == 3:
            guarded.engine.digest = None


async def test_a_digest_that_differs_is_a_mismatch(guarded: Guarded) -> None:
    session = await order(guarded)
    await session.start()
    await session.update(UPDATE)
    with pytest.raises(EngineError, match="sent was"):
        await session.finish(None, "sha256:other")
    assert (await guarded.ended()).weights.state is WeightsState.UNCERTAIN


async def test_a_silent_trainer_is_waited_for_up_to_the_deadline(guarded: Guarded) -> None:
    await order(guarded, deadline_s=2)
    state = await guarded.ended()
    assert "the trainer did not call start_weight_update within 2 s" in failure_of(state)
    assert state.weights.state is WeightsState.VERIFIED
    assert (await guarded.cancel(2)).gate is Gate.OPEN


async def test_a_newer_epoch_waits_for_no_trainer(guarded: Guarded) -> None:
    session = await order(guarded)
    await session.start()
    await session.update(UPDATE)
    with pytest.raises(RejectedError):
        await guarded.arm(3)
    state = await guarded.ended()
    assert (state.epoch, state.weights.state) == (3, WeightsState.UNCERTAIN)
    with pytest.raises(OutOfOrderError, match="has ended"):
        await session.update(UPDATE)
    state = await guarded.prepare(3, 1)
    assert state.staged is not None


async def test_a_newer_epoch_leaves_untouched_weights_as_they_are(guarded: Guarded) -> None:
    await order(guarded)
    state = await guarded.close(3, 2)
    assert (state.epoch, state.weights.state) == (3, WeightsState.VERIFIED)
    assert (await guarded.cancel(3)).gate is Gate.OPEN


async def test_a_call_that_is_in_the_engine_comes_to_its_end_before_anything_else(guarded: Guarded) -> None:
    session = await order(guarded)
    guarded.engine.slow_s = 3
    calling = asyncio.create_task(session.init({}))
    await asyncio.sleep(0.1)
    state = await guarded.cancel(2)
    assert calling.done()
    assert state.gate is Gate.OPEN
    assert guarded.engine.order[-2:] == ["push_init", "resume"]


async def test_a_failed_push_is_recovered_from_before_the_next_begins(guarded: Guarded) -> None:
    guarded.engine.failures["push_update"] = engine_error(FailureReason.TRANSFER_FAILED)
    session = await order(guarded)
    await session.start()
    with pytest.raises(EngineError):
        await session.update(UPDATE)
    await guarded.ended()
    guarded.engine.failures.clear()
    await guarded.close(3, 2)
    await guarded.arm(3)
    session = await order(guarded, 3)
    await session.start()
    await session.update(UPDATE)
    await session.finish(None, digest_of("step-2"))
    assert (await guarded.ended()).weights.state is WeightsState.LOADED
    assert guarded.engine.order.index("recover") < len(guarded.engine.order) - 3


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (FailureReason.COVERAGE_FAILED, "rank 0: tensor x"),
        (FailureReason.TRANSFER_FAILED, 'rank 0: tensor x; the trainer broke off: "remote error"'),
    ],
)
async def test_a_trainer_that_hears_of_a_failure_first_does_not_hide_it(
    guarded: Guarded, reason: FailureReason, told: str
) -> None:
    """An engine that refuses a tensor leaves the group: its trainer breaks off before the engine's report is read."""
    session = await order(guarded)
    await session.start()
    await session.update(UPDATE)
    guarded.engine.failures["push_update"] = engine_error(reason, "rank 0: tensor x")
    guarded.engine.slow_s = 5
    running = asyncio.create_task(session.update(UPDATE))
    await asyncio.sleep(0.1)
    session.abort("remote error")
    with pytest.raises(OutOfOrderError, match="ended"):
        session.abort("remote error")
    with pytest.raises(EngineError, match="rank 0"):
        await running
    state = await guarded.ended()
    assert state.operation is not None
    assert state.operation.failure is not None
    assert (state.operation.failure.reason, state.operation.failure.message) == (reason, told)


async def test_a_trainer_that_breaks_off_before_the_first_tensor_leaves_the_engine_as_it_was(guarded: Guarded) -> None:
    session = await order(guarded)
    await session.start()
    guarded.engine.slow_s = 5
    running = asyncio.create_task(session.update(UPDATE))
    await asyncio.sleep(0.1)
    assert guarded.engine.order[-1] == "push_start"
    session.abort("rank 3 died")
    with pytest.raises(OutOfOrderError, match="ended"):
        await running
    state = await guarded.ended()
    assert failure_of(state) == 'the trainer broke off: "rank 3 died"'
    assert state.weights.state is WeightsState.VERIFIED
    assert guarded.engine.order[-2:] == ["push_start", "recover"]


async def test_a_trainer_that_breaks_off_while_workers_are_put_back_ends_the_push(guarded: Guarded) -> None:
    guarded.engine.failures["push_update"] = engine_error(FailureReason.TRANSFER_FAILED)
    session = await order(guarded)
    await session.start()
    with pytest.raises(EngineError):
        await session.update(UPDATE)
    await guarded.ended()
    guarded.engine.failures.clear()
    await guarded.close(3, 2)
    await guarded.arm(3)
    guarded.engine.slow_s = 5
    session = await order(guarded, 3)
    starting = asyncio.create_task(session.start())
    await asyncio.sleep(0.1)
    session.abort("rank 3 died")
    with pytest.raises(OutOfOrderError, match="ended"):
        await starting
    state = await guarded.ended()
    assert state.operation is not None
    assert state.operation.failure is not None
    assert state.operation.failure.message == 'the trainer broke off: "rank 3 died"'


async def test_a_transfer_names_what_was_staged_or_who_sends() -> None:
    with pytest.raises(ValueError, match="digest"):
        Transfer(incarnation="x", epoch=1, version=1, deadline_seconds=1)


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("hccl", "spec.weightTransfer.backend is hccl"),
        ("", "spec.weightTransfer names no backend: checkpoints only"),
    ],
)
async def test_a_push_by_another_backend_than_the_spec_s_is_refused_untouched(backend: str, words: str) -> None:
    guarded = Guarded(backend=backend)
    try:
        await guarded.serve_initial()
        await guarded.close(2, 2)
        await guarded.arm(2)
        incarnation = guarded.service.incarnation
        await guarded.service.command(
            Transfer(incarnation=incarnation, epoch=2, version=2, push=PUSH, deadline_seconds=DEADLINE_S)
        )
        state = await guarded.ended()
        assert state.operation is not None
        assert state.operation.failure is not None
        assert state.operation.failure.reason is FailureReason.TRANSFER_FAILED
        message = f"the push comes by {PUSH.backend}, and {words}"
        assert message in state.operation.failure.message
        assert state.weights.state is WeightsState.VERIFIED
    finally:
        await guarded.service.stop()


def test_an_engine_offers_only_the_backend_that_its_spec_names() -> None:
    facts = MemoryEngine().facts()
    assert {"source/Trainer", "backend/shm"} <= set(with_backend(facts, "shm").capabilities)
    for backend in ("hccl", "", "nobody's"):
        rest = set(facts.capabilities) - {"source/Trainer"}
        assert set(with_backend(facts, backend).capabilities) == rest, "no backend, no pushes"


def test_nor_any_where_the_engine_takes_no_pushes() -> None:
    engine = MemoryEngine()
    engine.lacking = {"source/Trainer": "AsyncLLM has no update_weights"}
    assert not {"source/Trainer", "backend/shm"} & set(with_backend(engine.facts(), "shm").capabilities)
