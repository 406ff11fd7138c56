"""The launcher with engines that cannot start: what it refuses, and what it says of those that fail by themselves."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rollfleet_engine.launch.dialects import DIALECTS
from tests.contract.models import Models
from tests.contract.process import EngineProcess, Kind, Site
from tests.support import damage

# Dumps the real parser's options, in vLLM's own interpreter.
_OPTIONS = """
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
import json
from collections.abc import Callable
print(json.dumps(sorted(make_arg_parser(FlexibleArgumentParser())._option_string_actions)))
"""


def test_the_recorded_options_are_those_of_the_real_parser(kind: Kind):
    dialect = DIALECTS[0]
    known = dialect.option_names()
    for rule in dialect.reserved_options:
        assert any(rule.covers(name) for name in known), f"{rule.name} is no option of vLLM {dialect.releases}"
    if kind.name == "simulator":
        return  # it takes vLLM's options as recorded; what follows asks vLLM
    done = subprocess.run(
        [kind.environ["ROLLFLEET_ENGINE_PYTHON"], "-c", _OPTIONS],
        env={"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert set(json.loads(done.stdout.splitlines()[-1])) == known


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
    assert first["release"] == "0.27.1"
    assert str(engine.config.serving_port) in first["argv"]
