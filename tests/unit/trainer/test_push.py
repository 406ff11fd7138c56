"""vLLM's four calls over several engines: order, doors that open late, ends that come from elsewhere."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rollfleet_engine.guard.native import LARGEST_REASON
from rollfleet_protocol.pushes import AbortCall
from rollfleet_protocol.refusals import RefusalReason
from rollfleet_trainer import push as push_module
from rollfleet_trainer import taken
from rollfleet_trainer.client import GuardClient
from rollfleet_trainer.errors import GuardRefusedError, NotPossible, SenderLost, TransferError, UnreachableError
from rollfleet_trainer.fan_out import group_size, settle
from rollfleet_trainer.looks import Seat
from rollfleet_trainer.push import Door, Push, group_name
from rollfleet_trainer.said import Said
from rollfleet_trainer.sending import require_sender
from tests.support.certificates import write_certificate

SEATS = (
    Seat("qwen-0", "uid-0", "i0", "https://10.0.0.1:8001", 1, 2),
    Seat("qwen-1", "uid-1", "i1", "https://10.0.0.2:8001", 3, 4),
)


class Engine:
    """The far end of a door: what was called, and what is raised next."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.raises: list[Exception] = []

    def _called(self, name: str, what: Any) -> None:
        if self.raises:
            raise self.raises.pop(0)
        self.calls.append((name, what))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._called("init", init_info)

    def start_weight_update(self, tensors: dict[str, Any] | None = None, *, whole: bool = True) -> None:
        self._called("start", None if tensors is None else (tensors, whole))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._called("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None, digest: str | None = None) -> None:
        self._called("finish", (weight_version, digest))

    def abort_weight_update(self, reason: str) -> None:
        self._called("abort", reason)


def nothing() -> None:
    """May send."""


def begin(engines: list[Engine], may_send: Callable[[], None] = nothing) -> Push:
    return Push(7, SEATS, [Door(engine) for engine in engines], "group", may_send)


@pytest.fixture
def engines() -> list[Engine]:
    return [Engine(), Engine()]


def test_each_engine_gets_its_own_ranks_and_only_where_the_backend_has_ranks(engines: list[Engine]):
    push = begin(engines)
    push.init_weight_transfer_engine({"master_address": "a", "rank_offset": 1, "world_size": 3})
    assert [engine.calls for engine in engines] == [
        [("init", {"master_address": "a", "rank_offset": 1, "world_size": 7})],
        [("init", {"master_address": "a", "rank_offset": 3, "world_size": 7})],
    ]
    push.init_weight_transfer_engine({"packed": True})
    assert engines[1].calls[1] == ("init", {"packed": True})
    assert push.world_size == 7


def test_the_label_is_this_version_and_the_digest_what_was_given(engines: list[Engine]):
    push = begin(engines)
    push.start_weight_update()
    push.update_weights({"names": []})
    assert not push.finished
    push.finish_weight_update()
    assert push.finished
    assert engines[0].calls[-1] == ("finish", ("7", None))
    push = begin(engines)
    push.finish_weight_update("label", "sha256:00")
    assert engines[1].calls[-1] == ("finish", ("label", "sha256:00"))


def test_parts_are_one_update_to_the_engines(engines: list[Engine]):
    push = begin(engines)
    for part in range(3):
        push.more_follows = part < 2
        push.start_weight_update()
        push.update_weights({"part": part})
        assert not push.finishing
        push.finish_weight_update("7", f"digest {part}")
        assert push.finishing is (part == 2)
    for engine in engines:
        assert [name for name, _ in engine.calls] == ["start", "update", "update", "update", "finish"]
        assert engine.calls[-1] == ("finish", ("7", "digest 2"))
    doors = [target.client for target in push.doors]
    again = Push(8, SEATS, doors, "group", nothing)
    again.start_weight_update()
    assert engines[0].calls[-1] == ("start", None), "the next version starts anew over the same doors"


def forbidden() -> GuardRefusedError:
    return GuardRefusedError("qwen-0: start_weight_update: nobody was named", RefusalReason.FORBIDDEN)


def test_a_door_that_is_not_open_yet_is_waited_for_once(engines: list[Engine], monkeypatch: pytest.MonkeyPatch):
    engines[0].raises = [forbidden(), forbidden(), forbidden()]
    push = begin(engines)
    push.start_weight_update()
    assert engines[0].calls == [("start", None)]
    engines[0].raises = [forbidden()]
    with pytest.raises(TransferError, match="nobody was named"):
        push.update_weights({})
    monkeypatch.setattr(push_module, "DOORS_S", 0.1)
    engines[0].raises = [forbidden() for _ in range(1000)]
    with pytest.raises(TransferError, match="nobody was named"):
        begin(engines).start_weight_update()


def test_other_refusals_are_told_at_once_and_of_all_engines(engines: list[Engine]):
    engines[0].raises = [GuardRefusedError("qwen-0: init: wrong order", RefusalReason.ORDER_VIOLATION)]
    engines[1].raises = [TransferError("qwen-1: init: ConnectError")]
    with pytest.raises(TransferError, match=r"wrong order.*ConnectError"):
        begin(engines).init_weight_transfer_engine({})
    assert engines[0].calls == []


@pytest.mark.parametrize("error", [TransferError("qwen-0: gone"), UnreachableError("no token: the API server is away")])
def test_who_cannot_be_told_of_the_end_keeps_nobody_from_it(engines: list[Engine], error: Exception):
    """Other ranks of a sharded trainer are in the middle of collectives then."""
    engines[0].raises = [error]
    begin(engines).abort_weight_update("the loss is not a number")
    assert engines[1].calls == [("abort", "the loss is not a number")]


def test_of_many_engines_some_are_told_and_the_rest_counted():
    calls: list[Future[None]] = [Future() for _ in range(1000)]
    for number, call in enumerate(calls):
        call.set_exception(TransferError(f"qwen-{number}: update_weights: " + "x" * 4096))
    with pytest.raises(TransferError, match=r"qwen-0: .*qwen-9: .*; and 990 more engines$") as told:
        settle(calls)
    assert len(str(told.value)) < 50_000


@pytest.mark.parametrize("reason", ["", "long " * 1000, "half of a pair: \ud800", "\x1b]0;owned\x07" * 400])
def test_whatever_ends_a_push_is_told_as_a_guard_takes_it(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_certificate(tmp_path, "qwen")
    guard = GuardClient(
        "https://10.0.0.1:8001", str, ca=(tmp_path / "tls.crt").read_text(), server_name="qwen", timeout_s=1
    )
    told: list[bytes] = []
    monkeypatch.setattr(guard, "_post", lambda _route, body, _timeout_s: told.append(body))
    guard.abort_weight_update(reason)
    guard.close()
    assert AbortCall.model_validate_json(told[0]).reason
    assert len(told[0]) <= LARGEST_REASON


def test_who_is_no_longer_the_sender_calls_nobody(engines: list[Engine]):
    lost: list[Exception] = []

    def may_send() -> None:
        if lost:
            raise lost[0]

    push = begin(engines, may_send)
    push.start_weight_update()
    lost.append(SenderLost("Lease qwen-sender was not renewed"))
    with pytest.raises(SenderLost):
        push.update_weights({})
    with pytest.raises(SenderLost):
        push.took(1)
    assert [name for name, _ in engines[0].calls] == ["start"]


def test_a_door_is_not_waited_for_by_who_is_stopped(engines: list[Engine]):
    stopped = threading.Event()

    def may_send() -> None:
        if stopped.is_set():
            raise SenderLost("stopped")

    engines[0].raises = [forbidden() for _ in range(10_000)]
    push = begin(engines, may_send)
    threading.Timer(0.2, stopped.set).start()
    with pytest.raises(SenderLost, match="stopped"):
        push.start_weight_update()


def test_a_group_is_named_by_all_processes_in_it():
    name = group_name("grpo/me", SEATS)
    restarted = (SEATS[0], Seat("qwen-1", "uid-1", "i2", "https://10.0.0.2:8001", 3, 4))
    assert (
        len({name, group_name("grpo/other", SEATS), group_name("grpo/me", restarted), group_name("grpo/me", SEATS[:1])})
        == 4
    )
    assert name == group_name("grpo/me", SEATS)
    assert len(group_name("x" * 400, SEATS)) <= 256


def test_all_engines_are_one_target_for_a_sender_of_ours(engines: list[Engine]):
    push = begin(engines)
    target = push.as_target
    assert (target.rank_offset, target.world_size, group_size([target])) == (1, 6, push.world_size)
    target.client.init_weight_transfer_engine({"rank_offset": target.rank_offset, "world_size": 7})
    target.client.start_weight_update()
    target.client.finish_weight_update("7", "sha256:00")
    assert [engine.calls[0] for engine in engines] == [
        ("init", {"rank_offset": 1, "world_size": 7}),
        ("init", {"rank_offset": 3, "world_size": 7}),
    ]
    assert [engine.calls[-1] for engine in engines] == [("finish", ("7", "sha256:00"))] * 2
    assert push.finished


def test_what_update_cannot_send_by_is_told_before_anything_pauses():
    require_sender("hccl", ranks=8)
    require_sender("ipc")
    with pytest.raises(NotPossible, match=r"'ipc': each rank .*ipc\.IpcPeer"):
        require_sender("ipc", ranks=2)
    with pytest.raises(NotPossible, match="backend is 'nccl', and update sends by gloo, hccl, ipc, shm only"):
        require_sender("nccl")
    with pytest.raises(NotPossible, match=r"has no spec\.weightTransfer\.backend, so it takes no pushes"):
        require_sender("")


ALL = {"names": ["w", "b"], "dtype_names": ["float32"] * 2, "shapes": [[2], [1]]}
FIRST = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}
FORMS = {"w": ("float32", (2,)), "b": ("float32", (1,))}


def started(push: Push, engines: list[Engine], **words: Any) -> Any:
    """What the engines hear at the start; all the same."""
    push.start_weight_update(**words)
    told = [engine.calls[-1] for engine in engines]
    assert told[0] == told[1]
    assert told[0][0] == "start"
    return told[0][1]


def test_engines_hear_at_the_start_what_the_sender_says(engines: list[Engine]):
    assert started(begin(engines), engines) is None, "vLLM's own trainers say nothing"
    assert started(begin(engines), engines, tensors=ALL) == (ALL, True)
    assert started(begin(engines), engines, tensors=FIRST, whole=False) == (FIRST, False)
    push = begin(engines)
    push.more_follows = True
    assert started(push, engines, tensors=FIRST) == (FIRST, False), "of several parts the first one"


def test_all_engines_get_one_object_that_is_encoded_once(engines: list[Engine]):
    """Of 140,000 names a thousand encodings would take two minutes of a pause."""
    push = begin(engines)
    push.announce(FORMS)
    push.start_weight_update()
    push.update_weights(dict(ALL))
    for phase in (0, 1):
        one, other = (engine.calls[phase][1] for engine in engines)
        first, second = (each[0] if phase == 0 else each for each in (one, other))
        assert isinstance(first, Said)
        assert first is second


def test_what_the_caller_changes_between_two_calls_is_said(engines: list[Engine]):
    push, info = begin(engines), {"names": ["w"]}
    push.update_weights(info)
    info["names"] = ["b"]
    push.update_weights(info)
    assert [json.loads(what.json) for _, what in engines[0].calls] == [{"names": ["w"]}, {"names": ["b"]}]


def test_what_is_known_of_all_parts_counts_more(engines: list[Engine]):
    push = begin(engines)
    push.announce(FORMS)
    push.more_follows = True
    assert started(push, engines, tensors=FIRST) == (ALL, True)


def test_what_one_call_cannot_say_is_not_announced(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    push = begin(engines)
    push.announce(FORMS)
    monkeypatch.setattr(taken, "MOST_TOLD", 10)
    push.announce(FORMS)
    assert started(push, engines, tensors=FIRST, whole=False) == (FIRST, False)
    assert "2 tensors are more than one call can announce" in caplog.text
