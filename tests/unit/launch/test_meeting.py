"""Launchers that meet: strangers at the door, and a leader that says what no launcher says."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from rollfleet_engine.launch import meeting
from rollfleet_engine.launch.lines import Kind, Line, Message
from rollfleet_engine.launch.meeting import MeetingError, Met, meet
from rollfleet_protocol.engine_config import EngineConfig, NodesConfig, Place
from tests.support.ports import free_port

UID, LEADER, RELEASE = "f-1", "qwen-0-0-abcdef", "0.27.1"
WAIT_S = 60.0


class Quiet:
    """No signal ever comes."""

    def __init__(self) -> None:
        self._ends = os.pipe()

    def fileno(self) -> int:
        return self._ends[0]

    def wait(self, seconds: float, *others: int) -> bytes:
        return b""

    def close(self) -> None:
        for end in self._ends:
            os.close(end)


class Launcher(threading.Thread):
    """One pod's launcher, as far as it meets the others."""

    def __init__(self, node: int, nodes: NodesConfig) -> None:
        super().__init__(daemon=True)
        self.place = Place(node=node, leader=LEADER, leader_host="localhost")
        self.nodes = nodes
        self.met: Met | None = None
        self.failure = ""

    def run(self) -> None:
        signals = Quiet()
        config = EngineConfig.model_validate(
            {
                "fleet": {"namespace": "rl", "name": "qwen", "uid": UID},
                "operator": {"subject": "system:serviceaccount:rollfleet:operator", "uid": "o-1"},
                "model": {"path": "/model", "servedName": "qwen"},
                "bindAddress": "127.0.0.1",
            }
        )
        try:
            self.met = meet(config, self.nodes, self.place, RELEASE, signals)  # type: ignore[arg-type]
        except MeetingError as error:
            self.failure = error.problem.cause
        finally:
            signals.close()

    def close(self) -> None:
        self.join(WAIT_S)
        for line in self.met.lines.values() if self.met is not None else ():
            line.close()


def connect(port: int) -> socket.socket:
    """As soon as somebody listens."""
    for _ in range(1000):
        try:
            return socket.create_connection(("127.0.0.1", port), WAIT_S)
        except ConnectionRefusedError:
            threading.Event().wait(0.01)
    raise AssertionError("nobody listens")


@pytest.fixture
def leader() -> Iterator[Launcher]:
    nodes = NodesConfig(count=2, meeting_port=free_port(), wait_seconds=30, led_wait_seconds=30)
    one = Launcher(0, nodes)
    one.start()
    yield one
    one.close()


def test_strangers_that_say_nothing_keep_nobody_out(leader: Launcher) -> None:
    port = leader.nodes.meeting_port
    strangers = [connect(port) for _ in range(meeting.MAX_STRANGERS)]
    follower = Launcher(1, leader.nodes)
    follower.start()
    follower.close()
    leader.close()
    assert (leader.failure, follower.failure) == ("", "")
    assert follower.met is not None
    assert follower.met.place.leader_address == "127.0.0.1"
    for each in strangers:
        each.close()


def test_a_stranger_that_never_ends_its_line_is_let_go(leader: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "HELLO_S", 0.5)
    stranger = connect(leader.nodes.meeting_port)
    stranger.settimeout(0.05)
    told = None
    while leader.is_alive() and told is None:
        try:
            stranger.sendall(b"x")
            told = stranger.recv(1)
        except TimeoutError:
            continue
        except ConnectionError:
            told = b""
    assert told == b""
    assert leader.is_alive(), "it was let go, and not because the leader had given up"
    stranger.close()


@pytest.mark.parametrize("address", ["--help", "qwen-0-0", "10.0.0.1 --trust-remote-code"])
def test_what_is_no_address_gets_into_no_command_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "AGAIN_S", 60.0)  # it asks once
    with socket.create_server(("127.0.0.1", 0)) as server:
        nodes = NodesConfig(count=2, meeting_port=server.getsockname()[1], led_wait_seconds=3)
        follower = Launcher(1, nodes)
        follower.start()
        connection, _ = server.accept()
        Line(connection).send(Message.model_construct(kind=Kind.GO, address=address))
        follower.close()
        connection.close()
    assert follower.met is None
    assert "says what no launcher of this release says" in follower.failure
