"""Engines that answer a trainer's calls as they like: no call takes longer, or reads more, than it may."""

from __future__ import annotations

import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rollfleet_trainer import client as client_module
from rollfleet_trainer import push as push_module
from rollfleet_trainer.client import LARGEST_ANSWER, GuardClient
from rollfleet_trainer.errors import GuardRefusedError, TransferError
from rollfleet_trainer.looks import Seat
from rollfleet_trainer.push import Door, Push
from tests.support.certificates import write_certificate

SERVER = "qwen.rl.control.rollfleet.io"
DEADLINE_S = 1.0
SLACK_S = 20.0  # of a busy machine
PACE = threading.Event()  # never set
HEAD = b"HTTP/1.1 200 OK\r\n"

Answer = Callable[[socket.socket], None]


def drips(before: bytes, piece: bytes) -> Answer:
    """Says `before` at once, and then a piece every twentieth of a second, for ever."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(before)
        while True:
            connection.sendall(piece)
            PACE.wait(0.05)

    return answer


def says(*pieces: bytes) -> Answer:
    """That, and closes."""

    def answer(connection: socket.socket) -> None:
        for piece in pieces:
            connection.sendall(piece)

    return answer


def endless(connection: socket.socket) -> None:
    """As fast as it can."""
    connection.sendall(HEAD + b"Content-Length: 1000000000000\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


def request(connection: socket.socket) -> bytes:
    """All of it."""
    found = b""
    while True:
        found += connection.recv(65536)
        head, ended, body = found.partition(b"\r\n\r\n")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")), b": 0")
        if ended and len(body) >= int(length.partition(b": ")[2]):
            return found


@contextmanager
def engine(folder: Path, answer: Answer) -> Iterator[tuple[str, str, list[bytes]]]:
    """URL, CA, and the requests it got."""
    write_certificate(folder, SERVER)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    asked: list[bytes] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), context.wrap_socket(connection, server_side=True) as secured:
            asked.append(request(secured))
            answer(secured)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"https://127.0.0.1:{listening.getsockname()[1]}", (folder / "tls.crt").read_text(), asked
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def client(url: str, ca: str, timeout_s: float = DEADLINE_S) -> GuardClient:
    return GuardClient(url, lambda: "secret", ca=ca, server_name=SERVER, timeout_s=timeout_s, name="qwen-0")


@pytest.mark.parametrize(
    "answer",
    [
        drips(b"", b"H"),
        drips(HEAD, b"x"),
        drips(HEAD, b"x-more: 1\r\n"),
        drips(b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
        drips(HEAD + b"Content-Length: 1000\r\n\r\n", b"x"),
        drips(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        drips(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),
    ],
)
def test_a_call_ends_at_its_deadline_however_the_answer_comes(tmp_path: Path, answer: Answer) -> None:
    with engine(tmp_path, answer) as (url, ca, _):
        began = time.monotonic()
        with pytest.raises(
            TransferError, match=r"qwen-0: start_weight_update: (Read|Write|Connect)Timeout.*the 1 s that the call may"
        ):
            client(url, ca).start_weight_update()
        assert DEADLINE_S - 0.1 < time.monotonic() - began < DEADLINE_S + SLACK_S


def test_an_abort_waits_for_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ABORT_S", 0.5)
    with engine(tmp_path, drips(b"", b"H")) as (url, ca, _):
        began = time.monotonic()
        with pytest.raises(TransferError, match=r"the 0\.5 s that the call may take"):
            client(url, ca, 600.0).abort_weight_update("no more")
        assert time.monotonic() - began < SLACK_S


@pytest.mark.parametrize(
    "answer",
    [
        endless,
        says(HEAD + b"Content-Encoding: gzip\r\n\r\n" + b"x" * (LARGEST_ANSWER + 1)),
        says(b"HTTP/1.1 502 Bad\r\n\r\n" + b"[" * (LARGEST_ANSWER + 1)),
    ],
)
def test_no_more_is_read_of_an_answer_than_it_may_have(tmp_path: Path, answer: Answer) -> None:
    with (
        engine(tmp_path, answer) as (url, ca, _),
        pytest.raises(TransferError, match=f"the answer has more than {LARGEST_ANSWER} bytes"),
    ):
        client(url, ca, 60.0).start_weight_update()


def test_what_is_packed_is_not_unpacked(tmp_path: Path) -> None:
    """A few bytes that would be gigabytes."""
    packed = zlib.compress(b"x" * (16 << 20), 9, 31)
    answer = says(b"HTTP/1.1 502 Bad\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed), packed)
    with engine(tmp_path, answer) as (url, ca, _), pytest.raises(TransferError) as raised:
        client(url, ca, 60.0).start_weight_update()
    assert len(str(raised.value)) < 1100


def test_the_token_is_taken_nowhere_else(tmp_path: Path) -> None:
    with engine(tmp_path / "other", says(HEAD + b"Content-Length: 0\r\n\r\n")) as (other, _, asked):
        away = f"HTTP/1.1 307 Go\r\nLocation: {other}/start_weight_update\r\nContent-Length: 0\r\n\r\n"
        with (
            engine(tmp_path / "one", says(away.encode())) as (url, ca, _),
            pytest.raises(TransferError, match="HTTP 307"),
        ):
            client(url, ca, 60.0).start_weight_update()
    assert asked == []


def test_words_steer_no_terminal_and_deep_json_is_words(tmp_path: Path) -> None:
    deep = b"[" * 60000
    for content in (b"\x1b]0;owned\x07 \xff", deep):
        head = b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\n\r\n" % len(content)
        with engine(tmp_path, says(head, content)) as (url, ca, _), pytest.raises(TransferError) as raised:
            client(url, ca, 60.0).start_weight_update()
        assert not isinstance(raised.value, GuardRefusedError)
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 1100


def test_who_is_no_longer_the_sender_waits_for_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node may be gone: nobody answers, and nobody says that there is nobody."""
    monkeypatch.setattr(push_module, "PARTING_S", 0.1)
    ended = threading.Event()

    def may_send() -> None:
        if ended.is_set():
            raise TransferError("the operator has ended this attempt")

    def answer(connection: socket.socket) -> None:
        ended.set()
        connection.recv(1)

    with engine(tmp_path, answer) as (url, ca, _):
        guard = client(url, ca, 600.0)
        seat = Seat("qwen-0", "uid-0", "i0", url, 1, 1)
        push = Push(7, [seat], [Door(guard)], "group", may_send, guard.cut)
        began = time.monotonic()
        with pytest.raises(TransferError, match=r"start_weight_update: (ReadError|RemoteProtocolError)"):
            push.start_weight_update()
        assert time.monotonic() - began < push_module.WATCH_S + 0.1 + SLACK_S
        with pytest.raises(TransferError, match="the call was ended"):
            guard.start_weight_update()
        push.close()
        guard.close()
