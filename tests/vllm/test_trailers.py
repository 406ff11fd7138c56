"""What may come behind a request, on the server of vLLM's own environment: uvicorn with httptools and websockets."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from devtools import vllm_venv
from rollfleet_engine.guard.connections import LARGEST_HEAD
from tests.support.ports import free_port
from tests.support.tiny import source_path

LOOK_S = 0.02  # for an answer, after each piece
PIECE = 16 << 10  # bytes
MOST_READ = 4 << 20  # bytes that a refusal may be late by, most of them in the sockets' buffers
CHUNKED = b"POST /x HTTP/1.1\r\nhost: engine\r\ntransfer-encoding: chunked\r\n\r\n"

# Reads a body whole, and answers with its length and the names of the headers as they stand after that.
PROGRAM = """
import json, sys
from types import SimpleNamespace
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from rollfleet_engine.guard.connections import bound_server

refused, most = [], [0]

async def app(scope, receive, send):
    length, more = 0, True
    while more:
        message = await receive()
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    most[0] = max(most[0], len(scope["headers"]))
    told = {"length": length, "names": [name.decode() for name, _ in scope["headers"]], "most": most[0],
            "refused": refused}
    body = json.dumps(told).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})

config = uvicorn.Config(app, host="127.0.0.1", port=int(sys.argv[1]), lifespan="off", access_log=False)
config.load()
assert config.http_protocol_class is HttpToolsProtocol
assert config.ws_protocol_class is not None
server = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(config=config)))
bound_server(server, float(sys.argv[2]), refused.append)
assert config.ws_protocol_class is None
uvicorn.Server(config).run()
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server that waits long for a head."""
    with serving(30.0) as port:
        yield port


@contextlib.contextmanager
def serving(head_s: float) -> Iterator[int]:
    python, port = vllm_venv.ensure() / "bin" / "python", free_port()
    environment = os.environ | {"PYTHONPATH": source_path()}
    server = subprocess.Popen(
        [str(python), "-c", PROGRAM, str(port), str(head_s)], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    said = []
    for line in server.stderr:  # ends with the process
        said.append(line)
        if "Uvicorn running" in line:
            break
    else:
        pytest.fail("".join(said))
    try:
        yield port
    finally:
        server.terminate()
        server.communicate(timeout=30)


def ask(port: int, text: bytes) -> dict[str, Any]:
    """The answer to a request that is complete."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(text)
        answer = b""
        while not answer.endswith(b"}"):
            piece = connection.recv(1 << 16)
            assert piece, answer
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == b"200"
    told: dict[str, Any] = json.loads(body)
    return told


@pytest.mark.parametrize(
    ("before", "again"),
    [
        (b"1\r\nx\r\n0\r\n", b"x1: yyyyyyyyyyyyyyyy\r\n"),
        (b"1\r\nx\r\n0\r\nx1: ", b"y"),
        (b"1\r\nx\r\n0\r\n", b"y"),
        (b"1\r\nx\r\n1;", b"y"),
        (b"1\r\nx\r\n", b"0"),
        (b"", b"0"),
    ],
    ids=["trailers", "a value", "a name", "an extension", "a size", "a size, and nothing before"],
)
def test_what_never_ends_behind_a_body_is_refused_and_not_kept(port: int, before: bytes, again: bytes) -> None:
    refused_before = len(ask(port, CHUNKED + b"0\r\n\r\n")["refused"])
    line, sent, answer = again * (PIECE // len(again)), 0, b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(CHUNKED + before)
            while sent < 2 * MOST_READ and not answer:
                connection.sendall(line)
                sent += len(line)
                if select.select([connection], [], [], LOOK_S)[0]:
                    answer = connection.recv(4096)
        assert LARGEST_HEAD - PIECE < sent < MOST_READ
    assert not answer or answer.split()[1] in (b"400", b"431")
    told = ask(port, CHUNKED + b"0\r\n\r\n")
    assert told["refused"][refused_before:] in (["TooLarge"], ["InvalidRequest"])
    assert told["most"] == 2, "no trailer has come to a request"


def test_a_trailer_is_dropped_and_its_request_answered(port: int) -> None:
    told = ask(port, CHUNKED + b"1\r\nx\r\n0\r\nx-checksum: 1\r\nexpect: 100-continue\r\n\r\n")
    assert (told["length"], told["names"]) == (1, ["host", "transfer-encoding"])


def test_a_body_of_many_small_chunks_is_taken(port: int) -> None:
    """Its sizes alone are over the bound."""
    count = LARGEST_HEAD
    assert ask(port, CHUNKED + b"1;of=many\r\nx\r\n" * count + b"0\r\n\r\n")["length"] == count


WEBSOCKET = b"upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


@pytest.mark.parametrize("wish", [WEBSOCKET, b"upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"])
@pytest.mark.parametrize("body", [b"", b"12345"])
def test_who_asks_for_another_protocol_gets_one_answer_and_no_more_time(wish: bytes, body: bytes) -> None:
    """As to a request without a body; what is said on is read as no protocol at all, and the connection is over."""
    length = b"content-length: %d\r\n" % len(body) if body else b""
    with serving(1.0) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(
                b"GET /x HTTP/1.1\r\nhost: engine\r\nconnection: upgrade\r\n" + wish + length + b"\r\n" + body
            )
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
        head, _, text = answer.partition(b"\r\n\r\n")
        assert head.split()[1] == b"200"
        assert b"connection: close" in head
        assert json.loads(text)["length"] == 0
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(b"GET /x HTTP/1.1\r\nhost: engine\r\nconnection: upgrade\r\n" + wish)
            late = connection.recv(1 << 16)
        assert late.split()[1] == b"408"
        assert ask(port, CHUNKED + b"0\r\n\r\n")["refused"] == ["TooSlow"], "nobody is counted twice"
