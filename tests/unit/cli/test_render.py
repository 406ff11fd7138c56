"""Tables: names are never cut, words of failures are there in full, colours only on a terminal."""

import io
from datetime import timedelta

import pytest
from rich.console import Console, RenderableType

from rollfleet_cli.render import age, render_fleet, render_fleets, render_history
from rollfleet_cli.view import build_view
from rollfleet_operator.api.rolloutengine import Committed, EngineDetail, EnginesSummary, LastFinished, Outcome
from rollfleet_operator.api.weightversion import HistoryEntry, Phase, Progress
from tests.support.cli import NOW, make_condition, make_fleet, make_pod, make_version

LONG = "safetensors: model-00002-of-00002.safetensors ends after 1048576 of 4194304 bytes " * 3


def printed(what: RenderableType, *, terminal: bool = False, width: int = 240) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=terminal, color_system="standard" if terminal else None).print(
        what
    )
    return buffer.getvalue()


def sick_view() -> RenderableType:
    pods = [make_pod("qwen", 0), make_pod("qwen", 1)]
    detail = EngineDetail(
        name="qwen-1-0-abcde", ordinal=1, state="CatchingUp", since=NOW - timedelta(seconds=90), message=LONG
    )
    fleet = make_fleet(
        serving_replicas=1,
        committed=Committed(version=3, time=NOW),
        engines=EnginesSummary(details=(detail,)),
        last_finished=LastFinished(version=4, generation=4, outcome=Outcome.FAILED, message=LONG.strip()),
        conditions=(make_condition("Available", holds=False, reason="CatchingUp", message="1 of 2 engines serve"),),
    )
    version = make_version(4, step="2100", phase=Phase.FAILED, progress=Progress(done=1, total=2))
    return render_fleet(build_view(fleet, [version], pods), NOW)


@pytest.mark.parametrize("width", [240, 80, 60])
def test_every_word_of_a_failure_is_there_at_any_width(width: int) -> None:
    words = printed(sick_view(), width=width).split()
    assert words.count("safetensors:") >= 6, "three for the engine, three in the last failure"
    assert {"qwen-0-0-abcde", "qwen-1-0-abcde", "CatchingUp", "90s"} <= set(words)


def test_colours_on_a_terminal_only() -> None:
    assert "\x1b[" in printed(sick_view(), terminal=True)
    assert "\x1b[" not in printed(sick_view())


def test_one_line_for_each_fleet() -> None:
    well = build_view(
        make_fleet(
            serving_replicas=2,
            committed=Committed(version=7, time=NOW),
            conditions=(make_condition("Available", reason="Serving"),),
        ),
        [make_version(7, phase=Phase.ACTIVE)],
        [],
    )
    lines = printed(render_fleets([well])).splitlines()
    assert lines[0].split() == [
        "NAMESPACE",
        "FLEET",
        "SERVING",
        "VERSION",
        "STATE",
        "ASKED",
        "FOR",
        "UPDATE",
        "ENGINES",
    ]
    assert lines[1].split() == ["rl", "qwen", "2/2", "7", "Serving", "7", "Active", "-"]
    assert len(lines) == 2


def test_history_has_a_row_for_each_end_and_the_reasons_below() -> None:
    failed = HistoryEntry(
        version=3,
        step="300",
        checkpoint="step-3",
        outcome=Outcome.FAILED,
        time=NOW - timedelta(hours=3),
        message="3 is truncated",
    )
    active = HistoryEntry(
        version=4,
        checkpoint="step-4",
        outcome=Outcome.ACTIVE,
        digest="sha256:" + "ab" * 32,
        paused_seconds="0.412",
        time=NOW - timedelta(seconds=5),
    )
    fleet = make_fleet(committed=Committed(version=4, time=NOW))
    view = build_view(fleet, [make_version(4, phase=Phase.ACTIVE, history=(failed, active))], [])
    lines = [line.rstrip() for line in printed(render_history(view, NOW)).splitlines()]
    assert lines[0].split() == ["VERSION", "STEP", "CHECKPOINT", "OUTCOME", "DIGEST", "PAUSED", "ENDED"]
    assert lines[1].split() == ["3", "300", "step-3", "Failed", "-", "-", "3h", "ago"]
    assert lines[2].split() == ["4", "-", "step-4", "Active", "sha256:abababababab", "0.412", "s", "5s", "ago"]
    assert lines[3] == "version 3: 3 is truncated"
    assert lines[4] == "rl/qwen: committed version 4"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (200000, "2d"), (-5, "0s")]
)
def test_age(seconds: int, text: str) -> None:
    assert age(NOW - timedelta(seconds=seconds), NOW) == text


def test_the_same_words_are_told_once() -> None:
    text = "exit code 78: model path /rollfleet/model/bse does not exist"
    detail = EngineDetail(name="qwen-0-0-abcde", ordinal=0, state="Broken", since=NOW, message=text)
    conditions = (
        make_condition("Available", holds=False, reason="Broken", message=f"qwen-0-0-abcde: {text}"),
        make_condition("Degraded", reason="EnginesNotWell", message=f"qwen-0-0-abcde is Broken: {text}"),
    )
    for told in (conditions, conditions[:1]):
        fleet = make_fleet(engines=EnginesSummary(details=(detail,)), conditions=told)
        view = build_view(fleet, [], [make_pod("qwen", 0)])
        assert printed(render_fleet(view, NOW)).count(text) == 1


def test_what_several_engines_say_is_told_once_with_their_names() -> None:
    details = tuple(
        EngineDetail(name=f"qwen-{n}-0-abcde", ordinal=n, state="Starting", since=NOW, message=text)
        for n, text in enumerate(("ContainerCreating", "ContainerCreating", "restarted 1 times"))
    )
    fleet = make_fleet(engines=EnginesSummary(details=details))
    shown = printed(render_fleet(build_view(fleet, [], []), NOW), width=200)
    assert "qwen-0-0-abcde, qwen-1-0-abcde: Starting: ContainerCreating" in shown
    assert "qwen-2-0-abcde: Starting: restarted 1 times" in shown
    assert shown.count("ContainerCreating") == 1
