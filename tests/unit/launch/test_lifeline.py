"""What holds the launchers of one engine together: ends, silence, and words that are not theirs."""

import select
import socket
from collections.abc import Iterator

import pytest

from rollfleet_engine.launch.lifeline import Lifeline
from rollfleet_engine.launch.lines import HEARTBEAT_S, LONGEST_LINE, SILENCE_S, Kind, Line, Message

WAIT_S = 20.0


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection, both ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    theirs.settimeout(WAIT_S)
    yield mine, theirs
    mine.close()
    theirs.close()


def news(lifeline: Lifeline) -> None:
    ready, _, _ = select.select([lifeline], [], [], WAIT_S)
    assert ready, "nothing was told"
    lifeline.heard()


def said(sink: socket.socket) -> list[Message]:
    """What comes until the other side closes."""
    content = b""
    while part := sink.recv(65536):
        content += part
    return [Message.model_validate_json(line) for line in content.splitlines()]


def test_the_end_of_one_is_told_with_its_words(ends) -> None:
    mine, theirs = ends
    lifeline = Lifeline({2: Line(mine)})
    lifeline.start()
    Line(theirs).send(Message(kind=Kind.END, text="OutOfMemoryError: NPU out of memory"))
    news(lifeline)
    assert lifeline.lost == "node 2 ended: OutOfMemoryError: NPU out of memory"
    assert lifeline.last_words() == lifeline.lost
    lifeline.end("it lacks node 2")
    theirs.settimeout(WAIT_S)
    last = said(theirs)[-1]
    assert (last.kind, last.text) == (Kind.END, "it lacks node 2")


def test_a_connection_that_breaks_is_an_end(ends) -> None:
    mine, theirs = ends
    lifeline = Lifeline({0: Line(mine)})
    lifeline.start()
    theirs.close()
    news(lifeline)
    assert lifeline.lost == "node 0 closed the connection"
    lifeline.end("")


def test_one_that_leaves_is_no_end(ends) -> None:
    mine, theirs = ends
    lifeline = Lifeline({1: Line(mine)})
    lifeline.start()
    other = Lifeline({0: Line(theirs)})
    other.start()
    other.leave()
    news(lifeline)
    assert (lifeline.leaving, lifeline.lost) == ("node 1 was told to stop", "")
    lifeline.end("drained")
    news(other)
    assert other.lost == "node 0 ended: drained"
    other.end("")


def test_silence_is_an_end_and_heartbeats_keep_it_off(ends) -> None:
    mine, theirs = ends
    clock = Clock()
    line = Line(mine, heard=0.0)
    lifeline = Lifeline({1: line}, clock)
    clock.now = SILENCE_S - HEARTBEAT_S
    lifeline._beat()
    assert lifeline.lost == ""
    Line(theirs).send(Message(kind=Kind.ALIVE))
    select.select([mine], [], [], WAIT_S)
    lifeline._take(1)
    clock.now = SILENCE_S + 1
    lifeline._beat()
    assert lifeline.lost == "", "it was heard of meanwhile"
    clock.now = 2 * SILENCE_S
    lifeline._beat()
    assert lifeline.lost == f"node 1 has said nothing for {SILENCE_S:g} s"
    theirs.setblocking(True)
    theirs.settimeout(WAIT_S)
    assert b'"kind":"alive"' in theirs.recv(4096)


@pytest.mark.parametrize(
    ("bytes_", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "says what no launcher of this release says"),
        (b'{"kind":"shutdown"}\n', "says what no launcher of this release says"),
        (b"[" * (LONGEST_LINE + 1), f"sends lines of more than {LONGEST_LINE} bytes"),
    ],
    ids=["http", "unknown", "endless"],
)
def test_whoever_talks_otherwise_is_not_listened_to(ends, bytes_: bytes, words: str) -> None:
    mine, theirs = ends
    theirs.sendall(bytes_)
    line = Line(mine)
    received = 0
    while not line.ended and received < 100:
        ready, _, _ = select.select([line], [], [], WAIT_S)
        assert ready
        assert line.receive(0.0) == []
        received += 1
    assert line.ended == words


def test_lines_may_come_in_pieces_and_words_are_made_fit_to_be_shown(ends) -> None:
    mine, theirs = ends
    line = Line(mine)
    whole = Message(kind=Kind.END, text="red \x1b[31m").model_dump_json(by_alias=True).encode() + b"\n"
    found: list[Message] = []
    for part in (whole[:7], whole[7:] + whole):
        theirs.sendall(part)
        select.select([line], [], [], WAIT_S)
        found += line.receive(0.0)
    assert [message.text for message in found] == ["red \\x1b[31m"] * 2
