"""What one request may cost, and what the guard counts, on whatever engine."""

import socket
from collections.abc import Iterator

import httpx

from rollfleet_engine.guard.connections import LARGEST_HEAD
from rollfleet_engine.guard.serving import LARGEST_INFERENCE, LARGEST_PROBE
from tests.contract.client import Client, Operator
from tests.contract.process import EngineProcess


def _endless(total: int) -> Iterator[bytes]:
    yield b'{"prompt": "'
    for _ in range((total >> 20) + 2):
        yield b"x" * (1 << 20)


def test_bodies_without_end_are_refused(client: Client, serving: Operator):
    for path, largest in (("/v1/completions", LARGEST_INFERENCE), ("/tokenize", LARGEST_PROBE)):
        answer = client.http.post(path, content=_endless(largest), headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["reason"]) == (413, "TooLarge"), path
    assert serving.state().in_flight == 0
    assert client.complete("abc", 1).status == 200


def test_a_head_without_end_is_refused(engine: EngineProcess, client: Client):
    url = httpx.URL(engine.serving_url)
    for line in (b"x: y\r\n" * 1000, b"y" * 8192):
        with socket.create_connection((url.host, url.port or 80), timeout=10) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: engine\r\nx: ")
            answer = b""
            try:
                for _ in range(10 * LARGEST_HEAD // len(line)):
                    connection.sendall(line)
                answer = connection.recv(4096)
            except ConnectionError:  # refused, and cut while we still talked
                answer = answer or b"HTTP/1.1 431 "
            assert answer.split()[1] in (b"400", b"431"), answer
    assert client.get("/health").status_code == 200


def test_the_guard_s_series_stand_beside_the_engine_s(client: Client, serving: Operator):
    client.complete("abc", 1)
    text = client.get("/metrics").text
    assert "vllm:num_requests_running" in text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("rollfleet_guard_"))
    state = serving.state()
    assert float(lines["rollfleet_guard_gate_open"]) == 1
    assert float(lines["rollfleet_guard_epoch"]) == state.epoch
    assert float(lines["rollfleet_guard_weight_version"]) == state.weights.version
    assert float(lines["rollfleet_guard_requests_admitted_total"]) >= 1
    assert float(lines['rollfleet_guard_control_calls_total{command="open",outcome="Accepted"}']) >= 1
    assert float(lines['rollfleet_guard_operation_seconds_count{operation="Verify",status="Succeeded"}']) >= 1
    compressed = client.http.get(
        "/metrics", headers={"Accept": "application/openmetrics-text", "Accept-Encoding": "gzip"}
    )
    assert "rollfleet_guard_gate_open" in compressed.text
