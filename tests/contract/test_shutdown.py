"""How engines end: drained and stopped, or dead. These come last, for nothing works after them."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx

from rollfleet_protocol.state import Gate
from tests.contract.client import LONG_ANSWER, Client, Operator, wait_in_flight
from tests.contract.models import Models
from tests.contract.process import DRAIN_TIMEOUT_S, EngineProcess, until

Heard = TypeVar("Heard")


def _prestop(engine: EngineProcess) -> subprocess.CompletedProcess[str]:
    """As the kubelet runs the hook, in the container and its environment."""
    return subprocess.run(
        [sys.executable, "-m", "rollfleet_engine.prestop"],
        env=engine.environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_prestop_drains_and_sigterm_ends(serving: Operator, client: Client, engine: EngineProcess, models: Models):
    answers = []
    running = threading.Thread(
        target=lambda: answers.append(client.complete(models.short_prompt, LONG_ANSWER)), daemon=True
    )
    running.start()
    wait_in_flight(serving, 1)
    done = _prestop(engine)
    assert done.returncode == 0, done.stderr
    running.join(30)
    (answer,) = answers
    # It ended by itself, or was aborted when drainTimeoutSeconds were over; never cut in the middle of an answer.
    assert answer.status == 200
    assert answer.finish_reason in ("length", "abort")
    assert answer.text[:100] == models.answer(1, models.short_prompt)[: min(100, len(answer.text))]
    state = serving.state()
    assert (state.gate, state.in_flight, state.ready) == (Gate.CLOSED, 0, False)
    refused = client.complete("abc", 1)
    assert (refused.status, refused.body["error"]["closedReason"]) == (503, "Draining")
    assert client.get("/readyz").status_code == 503
    assert client.get("/livez").status_code == 200
    assert serving.refused("open", serving.next_epoch(), version=1, digest=models.digest(1))[0] == 409
    assert _prestop(engine).returncode == 0
    assert DRAIN_TIMEOUT_S < 30

    left = engine.descendants()
    engine.signal(signal.SIGTERM)
    code = engine.wait(40)
    assert code in (0, 128 + signal.SIGTERM)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), 10, "no process is left")
    assert '"askedToStop": true' in engine.log()
    assert not engine.termination_log.exists()


def answered(ask: Callable[[], Heard]) -> Heard | None:
    """What was answered; None once the server has ended, which it may do at any time after its core."""
    try:
        return ask()
    except httpx.TransportError:
        return None


def test_a_dead_core_is_not_live_and_the_launcher_says_why(
    fresh: EngineProcess, fresh_operator: Operator, fresh_client: Client
):
    if fresh_operator.state().gate is Gate.CLOSED:
        fresh_operator.serve_initial()
    (core,) = fresh.core_pids()
    left = fresh.descendants()
    seen: set[int | None] = set()

    def notices() -> bool:
        live = answered(lambda: fresh_client.get("/livez"))
        seen.add(live and live.status_code)
        return None in seen or 503 in seen

    def closed() -> bool:
        state = answered(fresh_operator.state)
        return state is None or (state.alive, state.gate) == (False, Gate.CLOSED)

    os.kill(core, signal.SIGKILL)
    until(notices, 10, "/livez is false")
    # vLLM looks whether its core lives every 5 s, by chance right now, and then ends its server at once.
    assert 503 in seen or fresh.kind.name == "vllm"
    until(closed, 10, "the guard noticed")
    answer = answered(lambda: fresh_client.complete("abc", 1))
    assert answer is None or (answer.status, answer.body["error"]["closedReason"]) == (503, "EngineDead")
    ready = answered(lambda: fresh_client.get("/readyz"))
    assert ready is None or ready.status_code == 503
    assert fresh.wait(60) not in (0, None)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), 10, "no process is left")
    message = json.loads(fresh.termination_log.read_text())
    assert message["exitCode"] != 0
    assert message["error"]
