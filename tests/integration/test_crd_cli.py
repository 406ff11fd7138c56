"""`rollfleet` as a process, on real objects in a real API server; the test writes the status, as the operator would."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from examples.demo.manifests import EngineKind, rollout_engine, weight_version
from rollfleet_operator.api.meta import Condition, ConditionStatus
from rollfleet_operator.api.rolloutengine import Committed, LastFinished, Outcome, RolloutEngineStatus
from rollfleet_operator.api.weightversion import FailedEngine, Phase, Progress, WeightVersionStatus
from tests.support.crds import installed_crds, no_operator, temporary_namespace
from tests.support.kubectl import get, kubectl

pytestmark = pytest.mark.integration
NOW = datetime(2026, 11, 29, tzinfo=UTC)
LINE_S = 20.0
WORDS = "model-00002-of-00002.safetensors ends after 17 of 64 bytes"


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    with no_operator(), installed_crds(), temporary_namespace("cli") as name:
        yield name


@pytest.fixture
def fleet(namespace: str, request: pytest.FixtureRequest) -> str:
    """A fleet without pods, and its WeightVersion at 2; named after the test."""
    name = f"f{abs(hash(request.node.name)) % 10**8}"
    kind = EngineKind("engine:1", Path("/models"), npus=0)
    kubectl("apply", "-f", "-", manifest=rollout_engine(name, namespace, kind, 0))
    kubectl("apply", "-f", "-", manifest=weight_version(name, namespace, 2, "step-2"))
    return name


def available(reason: str) -> Condition:
    return Condition(
        type="Available", status=ConditionStatus.TRUE, reason=reason, message="told", last_transition_time=NOW
    )


def write_status(kind: str, name: str, namespace: str, status: RolloutEngineStatus | WeightVersionStatus) -> None:
    read = get(kind, name, namespace)
    kubectl("replace", "--subresource=status", "-f", "-", manifest={**read, "status": status.dump()})


def write_update(fleet: str, namespace: str, phase: Phase, **status: Any) -> None:
    told = WeightVersionStatus(observed_generation=1, phase=phase, version=2, **status)
    write_status("wv", f"{fleet}-policy", namespace, told)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rollfleet_cli.main", *arguments]


def rollfleet(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


def test_status_tells_fleets_and_the_last_failure(namespace: str, fleet: str) -> None:
    failed = FailedEngine(name=f"{fleet}-0-0-abcde", reason="CheckpointIncomplete", message=WORDS)
    finished = LastFinished(version=2, generation=1, outcome=Outcome.FAILED, message="Preparing failed")
    write_status(
        "roe",
        fleet,
        namespace,
        RolloutEngineStatus(
            observed_generation=1,
            committed=Committed(version=1, time=NOW),
            last_finished=finished,
            conditions=(available("Serving"),),
        ),
    )
    write_update(fleet, namespace, Phase.FAILED, progress=Progress(done=0, total=1, failed=(failed,)))
    shown = rollfleet("status", fleet, "--namespace", namespace)
    assert shown.returncode == 0, shown.stderr
    for words in (f"{namespace}/{fleet}", "version 1", "Serving", "Failed", WORDS):
        assert words in shown.stdout
    assert "\x1b" not in shown.stdout
    read = json.loads(rollfleet("status", fleet, "-n", namespace, "-o", "json").stdout)
    assert (read["committed"], read["update"]["version"], read["update"]["phase"]) == (1, 2, "Failed")
    assert WORDS in read["last_failure"]
    listed = json.loads(rollfleet("status", "-n", namespace, "-o", "json").stdout)
    assert fleet in {each["name"] for each in listed}
    everywhere = json.loads(rollfleet("status", "--all-namespaces", "-o", "json").stdout)
    assert (namespace, fleet) in {(each["namespace"], each["name"]) for each in everywhere}


def test_watch_tells_each_step_once_and_ends_when_active(namespace: str, fleet: str) -> None:
    process = subprocess.Popen(
        command("watch", fleet, "-n", namespace, "--until-active", "2", "--timeout", "60"),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []

    def told(words: str) -> None:
        """The test goes on only when the step was told, so no sleep is needed; --timeout bounds the wait."""
        for line in process.stdout or ():
            lines.append(line)
            if words in line:
                return
        raise AssertionError(f"{words!r} was not told: {lines}")

    try:
        told("version 2 is asked for")
        for phase in (Phase.PREPARING, Phase.TRANSFERRING):
            write_update(fleet, namespace, phase, progress=Progress(done=1, total=2))
            told(f"version 2 {phase.value} 1/2 engines")
        write_update(fleet, namespace, Phase.ACTIVE, paused_seconds="0.412")
        told("version 2 Active, paused 0.412 s")
        assert process.wait(timeout=LINE_S) == 0
    finally:
        process.kill()
        process.communicate()
    assert len([line for line in lines if "Preparing" in line]) == 1


def test_watch_draws_a_table_on_a_terminal(namespace: str, fleet: str) -> None:
    write_update(fleet, namespace, Phase.ACTIVE)
    ours, theirs = pty.openpty()
    arguments = command("watch", fleet, "-n", namespace, "--until-active", "2", "--timeout", "30")
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(arguments, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        drawn = b"".join(iter(lambda: _read_terminal(ours), b"")).decode()
        assert process.wait(timeout=LINE_S) == 0, drawn
    os.close(ours)
    assert "ENGINE" in drawn
    assert "\x1b[32mActive" in drawn, "green on a terminal"


def _read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # EIO: the other side is closed
        return b""


def test_watch_ends_with_4_when_the_version_failed(namespace: str, fleet: str) -> None:
    write_update(fleet, namespace, Phase.FAILED)
    ended = rollfleet("watch", fleet, "-n", namespace, "--until-active", "2", "--timeout", "30")
    assert ended.returncode == 4
    assert "the update failed: version 2" in ended.stderr


def test_watch_ends_with_5_when_time_is_up(namespace: str, fleet: str) -> None:
    ended = rollfleet("watch", fleet, "-n", namespace, "--until-active", "2", "--timeout", "1")
    assert ended.returncode == 5
    assert "not there within 1 s" in ended.stderr


def test_a_fleet_that_is_not_there_ends_with_3(namespace: str) -> None:
    for verb in ("status", "watch"):
        ended = rollfleet(verb, "nobody", "-n", namespace)
        assert ended.returncode == 3
        assert 'rolloutengines.rollfleet.io "nobody" not found' in ended.stderr


def test_no_way_to_a_cluster_ends_with_1(tmp_path: Path) -> None:
    missing = rollfleet("status", KUBECONFIG=str(tmp_path / "none"))
    assert missing.returncode == 1
    assert "no way to a cluster" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_wrong_usage_ends_with_2() -> None:
    assert rollfleet("status", "a", "--all-namespaces").returncode == 2
    assert rollfleet("status", "--output", "yaml").returncode == 2


def test_kubectl_finds_it_as_a_plugin(namespace: str, fleet: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = subprocess.run(
        ["kubectl", "rollfleet", "status", fleet, "-n", namespace],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PATH": path},
    )
    assert shown.returncode == 0, shown.stderr
    assert f"{namespace}/{fleet}" in shown.stdout
