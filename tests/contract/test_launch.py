"""The launcher with engines that cannot start: what it refuses, and what it says of those that fail by themselves."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.models import Models
from tests.contract.process import EngineProcess, Kind, Site
from tests.support import damage


def _ended(kind: Kind, site: Site, name: str, model: Path, models: Models) -> tuple[int, dict, EngineProcess]:
    engine = EngineProcess(kind, site, f"{kind.name}-{name}", model, models.root)
    try:
        code = engine.wait(300)
    finally:
        engine.stop()
    return code, json.loads(engine.termination_log.read_text()), engine


@pytest.mark.parametrize("how", [damage.missing_shard, damage.truncated_shard], ids=["missing", "truncated"])
def test_a_model_without_all_its_shards_is_not_even_started(
    kind: Kind, site: Site, models: Models, how: Callable[[Path], str]
):
    name, shard = models.damaged(3, how)
    code, message, engine = _ended(kind, site, how.__name__, models.root / name, models)
    assert code == message["exitCode"] == 75  # somebody may still be copying it
    (problem,) = message["problems"]
    assert shard in problem["cause"]
    assert problem["remedy"]
    assert '"event": "plan"' not in engine.log()


def test_the_first_cause_of_an_engine_that_fails_by_itself(kind: Kind, site: Site, models: Models):
    # What preflight does not see: it reads neither tensors nor what a model should have.
    how, expected = {
        "vllm": (damage.wrong_shape, "Attempted to load weight"),
        "simulator": (damage.missing_index, "half-written"),
    }[kind.name]
    name, _ = models.damaged(3, how)
    code, message, engine = _ended(kind, site, how.__name__, models.root / name, models)
    assert code == message["exitCode"] == 1
    assert expected in message["error"]
    assert message["logTail"]
    assert '"event": "engine-ended"' in engine.log()


@pytest.mark.parametrize("args", [["--middleware", "evil.Middleware"], ["--seed", "x"]], ids=["refused", "unparsable"])
def test_bad_arguments_are_no_case_for_a_restart(kind: Kind, site: Site, models: Models, args: list[str]):
    if args[0] == "--seed" and kind.name == "simulator":
        args = ["--max-model-len", "x"]  # of the options that have an effect there
    name = f"args-{args[0].strip('-')}"
    engine = EngineProcess(kind, site, f"{kind.name}-{name}", models.folder(0), models.root, engine_args=tuple(args))
    try:
        code = engine.wait(300)
    finally:
        engine.stop()
    message = json.loads(engine.termination_log.read_text())
    assert code == message["exitCode"] == 78
    told = message.get("error", "") + " ".join(problem["cause"] for problem in message.get("problems", ()))
    assert args[0] in told


def test_the_plan_is_in_the_log(engine: EngineProcess):
    first = json.loads(engine.log().splitlines()[0])
    assert first["event"] == "plan"
    assert first["release"] == engine.kind.release
    assert str(engine.config.serving_port) in first["argv"]
