"""The proxy itself, in front of a simulated engine: what it passes on, whom it trusts, and how it ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollfleet_protocol.refusals import Refusal, RefusalReason
from tests.contract.client import LONG_ANSWER, Client, Operator
from tests.contract.faulty import SIMULATED, FaultyEngine
from tests.contract.models import SimulatedModels
from tests.contract.process import Site, until
from tests.support.issuer import CertificateAuthority


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SimulatedModels:
    """Models of this module."""
    return SimulatedModels(tmp_path_factory.mktemp("models-proxied"))


@pytest.fixture(scope="module")
def proxied(site: Site, small: SimulatedModels) -> Iterator[FaultyEngine]:
    """An engine behind a proxy."""
    engine = FaultyEngine(SIMULATED, site, "proxied", small, proxied=True)
    yield engine
    engine.process.stop()


@pytest.fixture(scope="module")
def control(proxied: FaultyEngine, site: Site) -> Iterator[Operator]:
    """Who controls it."""
    one = Operator(proxied.process, site)
    one.update(1, "step-1")
    yield one
    one.close_client()


@pytest.fixture(scope="module")
def user(proxied: FaultyEngine, control: Operator) -> Iterator[Client]:
    """Who uses it."""
    one = Client(proxied.process)
    yield one
    one.close_client()


def test_identity_is_for_the_guard_to_verify(control: Operator):
    for token in ("", "nonsense", control.make_token(audience="rollfleet.io/rl/other/uid")):
        answer = control.request("GET", "/rollfleet/v1/state", token=token)
        assert answer.status_code == 401
        assert Refusal.model_validate_json(answer.content).error.reason is RefusalReason.UNAUTHENTICATED
    answer = control.request("GET", "/rollfleet/v1/state", token=control.make_token(uid="another"))
    assert answer.status_code == 403
    assert control.state().gate.value == "Open"


def test_the_engine_itself_is_out_of_reach(proxied: FaultyEngine):
    """It listens on the loopback, at ports that only the proxy knows."""
    ports = proxied.process.config
    assert f'"--port", "{ports.serving_port}"' not in proxied.process.log()
    assert '"--host", "127.0.0.1"' in proxied.process.log()


def test_streams_pass_as_they_come(control: Operator, user: Client, small: SimulatedModels):
    stream = user.stream(small.short_prompt, LONG_ANSWER)
    with stream.open() as pieces:
        first = next(pieces)
        assert control.state().in_flight == 1  # it had a token to read long before the end
        assert first
    until(lambda: control.state().in_flight == 0, 10, "the engine heard that the client went away")
    assert not stream.done


def test_answers_pass_as_they_are(user: Client, small: SimulatedModels):
    answer = user.complete(small.short_prompt, 12)
    assert (answer.version, answer.text) == (1, small.answer(1, small.short_prompt)[:12])
    assert user.get("/metrics").text.startswith("#")
    assert user.get("/pause").status_code == 404
    assert user.complete(small.short_prompt, 1, {"X-Weight-Version-Required": "9"}).status == 409


def test_a_plan_that_cannot_be_read_changes_nothing(proxied: FaultyEngine, control: Operator, user: Client):
    proxied.plan({"call": "inference", "fault": "badGateway", "at": [2], "times": 1})
    refused = len(proxied.lines("faults.plan_refused"))
    for text in ("{", json.dumps({"rules": [{"call": "engine.apply", "fault": "refuse", "at": [1]}]})):
        proxied.plan_file.write_text(text)
        proxied.process.signal(signal.SIGHUP)
        refused += 1
        until(lambda count=refused: len(proxied.lines("faults.plan_refused")) == count, 10, "it was refused")
    assert "only the simulator can fail there" in proxied.lines("faults.plan_refused")[-1]["error"]
    statuses = [httpx.post(f"{proxied.process.serving_url}/v1/completions", json={}).status_code for _ in range(3)]
    assert statuses == [400, 502, 400]
    proxied.plan()


def test_a_guard_with_a_certificate_of_somebody_else_is_not_spoken_to(
    site: Site, small: SimulatedModels, tmp_path: Path
):
    other = tmp_path / "ca.crt"
    other.write_bytes(CertificateAuthority("somebody else").pem)
    engine = FaultyEngine(SIMULATED, site, "distrusted", small, proxied=True, options=("--engine-ca", str(other)))
    operator = Operator(engine.process, site)
    try:
        answer = operator.request("GET", "/rollfleet/v1/state")
        assert answer.status_code == 502
        assert "CERTIFICATE_VERIFY_FAILED" in answer.text
    finally:
        operator.close_client()
        engine.process.stop()


def test_it_ends_with_its_engine(site: Site, small: SimulatedModels):
    engine = FaultyEngine(SIMULATED, site, "ending", small, proxied=True)
    launcher, *_ = engine.process.descendants()
    os.kill(launcher, signal.SIGKILL)
    assert engine.process.wait(20) == 128 + signal.SIGKILL


def test_sigterm_is_the_engine_s(site: Site, small: SimulatedModels):
    engine = FaultyEngine(SIMULATED, site, "stopped", small, proxied=True)
    engine.plan({"call": "livez", "fault": "hang", "at": [1]})
    with pytest.raises(httpx.TimeoutException):
        httpx.get(f"{engine.process.serving_url}/livez", timeout=0.5)
    left = engine.process.descendants()
    assert len(left) > 1
    engine.process.signal(signal.SIGTERM)
    assert engine.process.wait(40) in (0, 128 + signal.SIGTERM)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), 10, "no process is left")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name the engine's command"),
        (("--", "true"), "give --faults or --fault-seed"),
        (("--faults", "/none.json", "--", "true"), "/none.json: No such file"),
        (("--fault-seed", "1", "--", "/none/python"), "/none/python"),
    ],
)
def test_what_is_missing_is_named(proxied: FaultyEngine, arguments: tuple[str, ...], words: str):
    done = subprocess.run(
        [sys.executable, "-m", "rollfleet_engine.faults.proxy", *arguments],
        env=proxied.process.environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr
