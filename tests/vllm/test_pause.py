"""Pause in mode abort, what arrives behind it, and caches that cannot be dropped."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.tiny import expected
from tests.support.vllm_engine import CallError, VllmEngine

LONG = 800  # tokens; about 4 s, so that a pause meets the request in flight
POLL_TIMEOUT_S = 30.0


def wait_running(engine: VllmEngine, count: int) -> None:
    deadline = time.monotonic() + POLL_TIMEOUT_S
    while engine.call("running") != count:
        assert time.monotonic() < deadline, f"never {count} requests in flight"


def wait_generating(engine: VllmEngine) -> None:
    deadline = time.monotonic() + POLL_TIMEOUT_S
    while not engine.call("produced"):
        assert time.monotonic() < deadline, "never a token"


def test_requests_in_flight_end_with_what_they_have(engine: VllmEngine, models: Path) -> None:
    known = expected(models / "base")["prompts"][0]
    engine.call("begin", name="one", prompt=known["promptTokenIds"], count=LONG)
    wait_running(engine, 1)
    engine.call("pause")
    answer = engine.call("end", name="one")
    assert answer["finish"] == "abort"
    common = min(len(answer["tokens"]), len(known["tokenIds"]))
    assert answer["tokens"][:common] == known["tokenIds"][:common]
    assert len(answer["tokens"]) < LONG
    assert engine.call("is_paused")
    engine.call("resume")
    assert not engine.call("is_paused")


def test_a_request_that_slips_behind_the_pause_is_aborted(engine: VllmEngine, models: Path) -> None:
    prompt = expected(models / "base")["prompts"][0]["promptTokenIds"]
    engine.call("pause")
    engine.call("begin", name="late", prompt=prompt, count=LONG)
    wait_running(engine, 1)
    engine.call("abort_all")
    answer = engine.call("end", name="late")
    assert (answer["finish"], answer["tokens"]) == ("abort", [])
    assert engine.call("running") == 0
    engine.call("resume")


def test_a_cache_that_is_in_use_is_not_called_empty(engine: VllmEngine, models: Path) -> None:
    prompt = expected(models / "base")["prompts"][0]["promptTokenIds"]
    engine.call("begin", name="busy", prompt=prompt, count=LONG)
    wait_generating(engine)
    try:
        with pytest.raises(CallError) as raised:
            engine.call("reset_caches")
    finally:
        engine.call("pause")
        engine.call("end", name="busy")
    assert raised.value.reason == "CacheResetFailed"
    engine.call("reset_caches")
    engine.call("resume")
