"""Events are said once."""

import asyncio
from datetime import UTC, datetime

import pytest

from rollfleet_operator.clients.errors import Unreachable
from rollfleet_operator.clients.events import MAX_WAITING, MAX_WAITING_OF_ONE, REMEMBERED, Recorder
from rollfleet_operator.core.actions import Event
from rollfleet_operator.ports import Manifest, Resource
from tests.support.cluster import MemoryCluster

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
UIDS = {("RolloutEngine", "qwen"): "f-1"}


def make_event(message: str = "version 3 is Active") -> Event:
    return Event("RolloutEngine", "qwen", "Normal", "Active", message)


def recorder(cluster: MemoryCluster) -> Recorder:
    return Recorder(cluster, "operator-0", lambda: NOW)


async def record(one: Recorder, events: list[Event], uids: dict[tuple[str, str], str] | None = None) -> None:
    """Record, and wait until it is written."""
    writing = asyncio.create_task(one.run())
    one.record("rl", UIDS if uids is None else uids, events)
    await one.drain()
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


async def test_the_same_event_is_written_once() -> None:
    cluster = MemoryCluster()
    one = recorder(cluster)
    for _ in range(3):
        await record(one, [make_event(), make_event()])
    assert len(cluster.objects) == 1
    (written,) = cluster.objects.values()
    assert written["regarding"]["uid"] == "f-1"
    assert (written["reason"], written["note"], written["type"]) == ("Active", "version 3 is Active", "Normal")


async def test_a_restarted_operator_does_not_say_it_again() -> None:
    cluster = MemoryCluster()
    await record(recorder(cluster), [make_event()])
    await record(recorder(cluster), [make_event()])
    assert len(cluster.objects) == 1


async def test_another_message_or_another_object_is_another_event() -> None:
    cluster = MemoryCluster()
    one = recorder(cluster)
    await record(one, [make_event(), make_event("version 4 is Active")])
    await record(one, [make_event()], {("RolloutEngine", "qwen"): "f-2"})
    assert len(cluster.objects) == 3


async def test_a_long_message_is_clipped_to_what_the_api_takes() -> None:
    cluster = MemoryCluster()
    await record(recorder(cluster), [make_event("x" * 5000)])
    (written,) = cluster.objects.values()
    assert len(written["note"]) == 1024


class DeafCluster(MemoryCluster):
    async def create(
        self, resource: Resource, namespace: str | None, manifest: Manifest, subresource: tuple[str, str] | None = None
    ) -> Manifest:
        self.writes.append(("create", resource.plural, ""))
        raise Unreachable("create Event: no answer within the deadline")


async def test_a_failure_is_logged_and_tried_again_with_the_next_pass(caplog: pytest.LogCaptureFixture) -> None:
    cluster = DeafCluster()
    one = recorder(cluster)
    await record(one, [make_event()])
    assert "no answer within the deadline" in caplog.text
    await record(one, [make_event()])
    assert len(cluster.writes) == 2


async def test_the_memory_is_bounded() -> None:
    cluster = MemoryCluster()
    one = recorder(cluster)
    for start in range(0, REMEMBERED + 512, MAX_WAITING_OF_ONE):
        await record(one, [make_event(str(n)) for n in range(start, start + MAX_WAITING_OF_ONE)])
    assert len(one._said) == REMEMBERED
    assert len(cluster.objects) == REMEMBERED + 512


async def test_a_flood_is_dropped_and_said(caplog: pytest.LogCaptureFixture) -> None:
    one = recorder(MemoryCluster())
    objects = MAX_WAITING // MAX_WAITING_OF_ONE
    for number in range(objects):
        uids = {("RolloutEngine", "qwen"): f"f-{number}"}
        one.record("rl", uids, [make_event(str(n)) for n in range(MAX_WAITING_OF_ONE)])
    assert "is dropped" not in caplog.text
    one.record("rl", {("RolloutEngine", "qwen"): "one more"}, [make_event(str(n)) for n in range(5)])
    assert caplog.text.count("is dropped") == 5


async def test_an_object_with_much_to_say_leaves_room_for_others(caplog: pytest.LogCaptureFixture) -> None:
    cluster = MemoryCluster()
    one = recorder(cluster)
    one.record("rl", {("RolloutEngine", "qwen"): "loud"}, [make_event(str(n)) for n in range(MAX_WAITING * 2)])
    assert caplog.text.count("is dropped") == MAX_WAITING * 2 - MAX_WAITING_OF_ONE
    await record(one, [make_event()])
    assert len(cluster.objects) == MAX_WAITING_OF_ONE + 1
    await record(one, [make_event("said before")], {("RolloutEngine", "qwen"): "loud"})
    assert len(cluster.objects) == MAX_WAITING_OF_ONE + 2, "and may go on when it has been heard"
