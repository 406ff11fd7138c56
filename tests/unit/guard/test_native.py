"""A trainer's calls through the control port: what is read of them, and for whose push they count. Engine in memory."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollfleet_engine.guard.control import ControlApp
from rollfleet_engine.guard.identity import Caller
from rollfleet_engine.guard.native import LARGEST_BODY, LARGEST_INIT, LARGEST_WORD, MOST_LISTS, MOST_VALUES
from rollfleet_protocol.commands import Sender
from rollfleet_protocol.pushes import HOLDER_HEADER, MOST_SETTINGS, UpdateCall
from rollfleet_protocol.state import FailureReason, OperationStatus, WeightsState
from tests.support.guards import OPERATOR, Guarded, MemoryVerifier
from tests.unit.guard.test_pushing import GRPO, order

pytestmark = pytest.mark.looptime

OTHER = Caller("system:serviceaccount:rl:dpo", "dpo-uid")
TENSORS: dict[str, Any] = {"names": ["step-2"], "dtype_names": ["float32"], "shapes": [[1]]}
UPDATE = json.dumps({"update_info": TENSORS}).encode()


@pytest.fixture
async def guarded() -> AsyncIterator[Guarded]:
    one = Guarded(backend="gloo")
    await one.serve_initial()
    await one.close(2, 2)
    await one.arm(2)
    yield one
    await one.service.stop()


class Visit:
    """One call of a trainer's, whose body comes when the test says so."""

    def __init__(
        self, guarded: Guarded, path: str, body: bytes = b"", caller: Caller = GRPO, holder: str | None = None
    ) -> None:
        app = ControlApp(guarded.service, MemoryVerifier(), OPERATOR, guarded.log)
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"authorization", f"Bearer {caller.subject}/{caller.uid}".encode())],
            "query_string": b"",
            "root_path": "",
            "server": ("guard", 8001),
            "scheme": "https",
            "http_version": "1.1",
        }
        if holder is not None:
            scope["headers"] = [*scope["headers"], (HOLDER_HEADER.lower().encode(), holder.encode())]  # type: ignore[misc]
        self.come = asyncio.Event()
        self.reads = 0
        self._body = body
        self._sent: list[dict[str, Any]] = []
        self._task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        self.reads += 1
        await self.come.wait()
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: dict[str, Any]) -> None:
        self._sent.append(message)

    async def answer(self) -> tuple[int, str]:
        """Status and message."""
        await asyncio.wait_for(self._task, 30)
        document = json.loads(b"".join(message.get("body", b"") for message in self._sent))
        return self._sent[0]["status"], document.get("error", document)["message"]

    async def whole(self) -> tuple[int, str]:
        """The same, of a body that is there at once."""
        self.come.set()
        return await self.answer()


async def after_the_head(visit: Visit) -> Visit:
    await asyncio.sleep(0.1)
    assert visit.reads == 1
    return visit


async def next_push(guarded: Guarded, epoch: int, caller: Caller) -> None:
    await guarded.close(epoch, 2)
    await guarded.arm(epoch)
    await order(guarded, epoch, sender=Sender(subject=caller.subject, uid=caller.uid))


async def test_the_four_phases(guarded: Guarded) -> None:
    await order(guarded)
    for path, body in (
        ("/pause", b""),
        ("/init_weight_transfer_engine", b'{"init_info": {"rank_offset": 1}}'),
        ("/start_weight_update", b""),
        ("/update_weights", UPDATE),
        ("/finish_weight_update", b'{"weight_version": "2"}'),
        ("/resume", b""),
    ):
        assert (await Visit(guarded, path, body).whole())[0] == 200, path
    assert (await guarded.ended()).weights.state is WeightsState.LOADED


@pytest.mark.parametrize("holder", [None, "", "grpo/2", "grpo/1 ", "x" * 10_000])
async def test_another_process_of_the_sender_s_account_is_told_apart(guarded: Guarded, holder: str | None) -> None:
    await order(guarded, holder="grpo/1")
    visit = Visit(guarded, "/start_weight_update", holder=holder)
    status, message = await visit.whole()
    assert status == 403
    assert "the sender of this update is 'grpo/1'" in message
    assert visit.reads == 0
    assert guarded.state.weights.state is WeightsState.VERIFIED
    assert (await Visit(guarded, "/start_weight_update", holder="grpo/1").whole())[0] == 200


async def test_a_trainer_that_breaks_off_ends_the_push_in_its_own_words(guarded: Guarded) -> None:
    await order(guarded)
    await Visit(guarded, "/start_weight_update").whole()
    body = json.dumps({"reason": "the gather failed on rank 3\x1b[2J"}).encode()
    assert await Visit(guarded, "/abort_weight_update", body).whole() == (200, "Weight update aborted")
    state = await guarded.ended()
    assert state.operation is not None
    assert state.operation.failure is not None
    assert state.operation.failure.reason is FailureReason.TRANSFER_FAILED
    assert state.operation.failure.message == 'the trainer broke off: "the gather failed on rank 3\\x1b[2J"'
    assert (await Visit(guarded, "/update_weights", UPDATE).whole())[0] == 409


async def test_also_while_a_call_of_its_runs_which_comes_to_its_end_first(guarded: Guarded) -> None:
    await order(guarded)
    await Visit(guarded, "/start_weight_update").whole()
    guarded.engine.slow_s = 5
    running = Visit(guarded, "/update_weights", UPDATE)
    running.come.set()
    await asyncio.sleep(0.1)
    assert (await Visit(guarded, "/abort_weight_update", b'{"reason": "rank 3 died"}').whole())[0] == 200
    assert guarded.state.operation is not None
    assert guarded.state.operation.status is OperationStatus.RUNNING
    state = await guarded.ended()
    assert state.operation is not None
    assert state.operation.failure is not None
    assert state.operation.failure.message == 'the trainer broke off: "rank 3 died"'
    assert state.weights.state is WeightsState.VERIFIED, "no tensor has come"
    assert await running.answer() == (409, "this transfer has ended"), "it is no success any more"


async def test_before_the_first_tensor_nothing_is_lost(guarded: Guarded) -> None:
    await order(guarded)
    assert (await Visit(guarded, "/abort_weight_update", b'{"reason": "no group formed"}').whole())[0] == 200
    assert (await guarded.ended()).weights.state is WeightsState.VERIFIED


@pytest.mark.parametrize("body", [b"", b"{}", b'{"reason": ""}', b'{"why": "?"}', b'{"reason": "%s"}' % (b"a" * 1001)])
async def test_breaking_off_needs_a_reason_of_bounded_length(guarded: Guarded, body: bytes) -> None:
    await order(guarded)
    assert (await Visit(guarded, "/abort_weight_update", body).whole())[0] == 400
    assert guarded.state.operation is not None
    assert guarded.state.operation.status is OperationStatus.RUNNING
    assert (await Visit(guarded, "/abort_weight_update", b'{"reason": "x"}', OTHER).whole())[0] == 403


PICKLED = json.dumps({"update_info": TENSORS | {"ipc_handles_pickled": "gASVAAAA"}}).encode()


async def test_a_pickle_ends_the_push_before_a_worker_hears_of_it(guarded: Guarded) -> None:
    await order(guarded)
    await Visit(guarded, "/start_weight_update").whole()
    status, told = await Visit(guarded, "/update_weights", PICKLED).whole()
    state = await guarded.ended()
    assert state.operation is not None
    assert state.operation.failure is not None
    for words in (told, state.operation.failure.message):
        assert "ipc_handles_pickled is refused" in words
        assert "spec.weightTransfer.insecureSerialization: Allowed" in words
    assert status == 502
    assert state.weights.state is WeightsState.VERIFIED, "nothing was touched"
    assert guarded.engine.calls["push_update"] == 0


async def test_with_consent_a_pickle_goes_to_the_workers_unread() -> None:
    one = Guarded(backend="gloo", unpickles=True)
    await one.serve_initial()
    await one.close(2, 2)
    await one.arm(2)
    await order(one)
    await Visit(one, "/start_weight_update").whole()
    assert (await Visit(one, "/update_weights", PICKLED).whole())[0] == 200
    assert one.engine.calls["push_update"] == 1
    await one.service.stop()


@pytest.mark.parametrize("successor", [OTHER, GRPO], ids=["another-sender", "the-same-in-a-newer-epoch"])
@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/start_weight_update"])
async def test_a_call_counts_for_the_push_of_its_head_and_no_other(
    guarded: Guarded, path: str, successor: Caller
) -> None:
    await order(guarded)
    late = await after_the_head(Visit(guarded, path, b'{"init_info": {}}' if "init" in path else b"{}"))
    await next_push(guarded, 3, successor)
    status, message = await late.whole()
    assert (status, "has ended while its body" in message) == (409, True)
    assert guarded.engine.calls["push_init"] == guarded.engine.calls["push_start"] == 0
    assert guarded.state.weights.state is WeightsState.VERIFIED
    status, _ = await Visit(guarded, "/start_weight_update", caller=successor).whole()
    assert status == 200, "the push that runs now takes its own sender's call, whatever is read for the one before"


@pytest.mark.parametrize("successor", [OTHER, GRPO])
async def test_nor_do_bytes_of_an_update(guarded: Guarded, successor: Caller) -> None:
    await order(guarded)
    await Visit(guarded, "/start_weight_update").whole()
    late = await after_the_head(Visit(guarded, "/update_weights", UPDATE))
    await next_push(guarded, 3, successor)
    await Visit(guarded, "/start_weight_update", caller=successor).whole()
    assert (await late.whole())[0] == 409
    assert guarded.engine.came == []
    assert guarded.engine.calls["push_update"] == 0


async def test_a_second_large_call_is_refused_unread(guarded: Guarded) -> None:
    await order(guarded)
    await Visit(guarded, "/start_weight_update").whole()
    first = await after_the_head(Visit(guarded, "/update_weights", UPDATE))
    second = Visit(guarded, "/update_weights", UPDATE)
    assert await second.answer() == (409, "the body of update is on its way: one call at a time")
    guarded.engine.slow_s = 5
    first.come.set()
    await asyncio.sleep(0.1)
    third = Visit(guarded, "/update_weights", UPDATE)
    assert await third.answer() == (409, "update is running: one call at a time")
    assert second.reads == third.reads == 0
    assert (await first.answer())[0] == 200


async def test_a_call_out_of_order_is_refused_unread(guarded: Guarded) -> None:
    await order(guarded)
    early = Visit(guarded, "/update_weights", UPDATE)
    assert await early.answer() == (409, "start_weight_update comes before update_weights")
    assert early.reads == 0


async def test_a_body_that_does_not_come_makes_room(guarded: Guarded) -> None:
    await order(guarded)
    slow = await after_the_head(Visit(guarded, "/start_weight_update"))
    assert (await slow.answer())[0] == 408
    assert (await Visit(guarded, "/start_weight_update").whole())[0] == 200


@pytest.mark.parametrize(
    ("path", "largest"),
    [
        ("/pause", LARGEST_WORD),
        ("/resume", LARGEST_WORD),
        ("/init_weight_transfer_engine", LARGEST_INIT),
        ("/finish_weight_update", LARGEST_WORD),
    ],
)
async def test_who_has_little_to_say_may_send_little(guarded: Guarded, path: str, largest: int) -> None:
    await order(guarded)
    if "finish" in path:
        await Visit(guarded, "/start_weight_update").whole()
        await Visit(guarded, "/update_weights", UPDATE).whole()
    status, message = await Visit(guarded, path, b" " * (largest + 1)).whole()
    assert (status, f"over {largest} bytes" in message) == (413, True)


async def test_updates_are_bounded_in_bytes_and_in_values(guarded: Guarded) -> None:
    await order(guarded)
    too_many = b'{"tensors": {"names": [' + b"1," * (MOST_VALUES + 1) + b"1]}}"
    for body, words in ((b" " * (LARGEST_BODY + 1), "over"), (too_many, "commas")):
        assert words in (await Visit(guarded, "/start_weight_update", body).whole())[1]
    tensors = json.dumps({"tensors": TENSORS, "whole": True}).encode()
    assert (await Visit(guarded, "/start_weight_update", tensors).whole())[0] == 200
    for body, status, words in (
        (b" " * (LARGEST_BODY + 1), 413, "over"),
        (b'{"update_info": {"names": [' + b"1," * (MOST_VALUES + 1) + b"1]}}", 400, "commas"),
        (b'{"update_info": {"x": ' + b"[" * (MOST_LISTS + 1), 400, "brackets"),
    ):
        found, message = await Visit(guarded, "/update_weights", body).whole()
        assert (found, words in message) == (status, True)
    assert guarded.engine.calls["push_update"] == 0
    assert (await Visit(guarded, "/update_weights", UPDATE).whole())[0] == 200, "refused calls end nothing"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": [1]}, "names.0"),
        ({"names": ["x" * 513]}, "names.0"),
        ({"shapes": [[0]]}, "shapes.0.0"),
        ({"shapes": [["a"] * 3]}, "shapes.0.0"),
        ({"dtype_names": ["object"]}, "dtype 'object'"),
        ({"shapes": [[1 << 47]]}, "too large"),
        ({"handles": {"a": 1}}, "handles"),
        ({"file": "x" * 1001}, "file"),
        ({f"x{number}": 1 for number in range(MOST_SETTINGS + 1)}, "at most"),
    ],
)
async def test_the_tensors_of_an_update_are_looked_at_before_a_worker_is_asked(
    guarded: Guarded, change: dict[str, Any], words: str
) -> None:
    await order(guarded)
    await Visit(guarded, "/start_weight_update").whole()
    body = json.dumps({"update_info": TENSORS | change}).encode()
    status, message = await Visit(guarded, "/update_weights", body).whole()
    assert (status, words in message) == (400, True), message
    assert guarded.engine.calls["push_update"] == 0


def test_a_real_model_s_list_fits_into_one_call() -> None:
    """Kimi K2: 60 layers of 384 experts, 3 projections, each with its scales."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.{what}"
        for layer in range(1, 61)
        for expert in range(384)
        for projection in ("gate", "down", "up")
        for what in ("weight", "weight_scale_inv")
    ]
    count = len(names)
    info = {"names": names, "dtype_names": ["float8_e4m3fn"] * count, "shapes": [[2048, 7168]] * count}
    body = json.dumps({"update_info": info}).encode()
    assert len(body) < LARGEST_BODY
    assert body.count(b",") < MOST_VALUES
    assert body.count(b"[") + body.count(b"{") < MOST_LISTS
    assert len(UpdateCall.model_validate_json(body).update_info.names) == count
