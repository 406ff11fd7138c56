"""What the launcher says to a vLLM-Ascend without rl_config ends, in the code of 0.23.0.post1, as rl_config would.

Builds of its main branch to 2026-08-18 read the same settings.
"""

import shutil
from pathlib import Path

import pytest

from devtools import ascend_sdist
from devtools.before_rlconfig import ALLOCATOR, Before, MissingError, rules
from devtools.rl_rules import Case
from rollfleet_engine.launch.plan import Plan, Refused
from tests.unit.launch.test_rl_rules import BEFORE, OVERRIDDEN, WITHOUT, additional_of, planned

SOURCES = (
    "ascend_config.py",
    "batch_invariant.py",
    "distributed/weight_transfer/__init__.py",
    "envs.py",
    "platform.py",
)
PLANNED = [case for case in BEFORE if not case.error and case.rule not in OVERRIDDEN]


@pytest.fixture(scope="module")
def before() -> Before:
    return Before(ascend_sdist.ensure())


def test_every_rule_holds(before: Before):
    assert [(rule, does) for rule, does, should in rules(before) if does != should] == []


@pytest.mark.parametrize(
    ("file", "here", "there", "rule"),
    [
        ("envs.py", '"VLLM_ASCEND_ENABLE_NZ", 1', '"VLLM_ASCEND_ENABLE_NZ", 2', "by default"),
        (
            "platform.py",
            "model_config and not model_config.enable_sleep_mode",
            "model_config.enable_sleep_mode",
            "sleep",
        ),
        ("batch_invariant.py", '"strict"', '"true"', "batch invariance"),
        ("distributed/weight_transfer/__init__.py", '"npu_ipc"', '"ipc"', "transfer engines"),
    ],
)
def test_sources_that_do_otherwise_are_told(tmp_path: Path, file: str, here: str, there: str, rule: str):
    copy = tmp_path / "vllm_ascend"
    for name in SOURCES:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ascend_sdist.ensure() / "vllm_ascend" / name, copy / name)
    text = (copy / file).read_text(encoding="utf-8")
    assert here in text
    (copy / file).write_text(text.replace(here, there), encoding="utf-8")
    differing = [told for told, does, should in rules(Before(tmp_path)) if does != should]
    assert differing
    assert all(rule in told for told in differing)
    (copy / file).write_text("", encoding="utf-8")
    with pytest.raises(MissingError, match="there is no"):
        Before(tmp_path)


def test_there_are_cases_of_each_kind():
    assert sum(case.nz == 0 for case in PLANNED) >= 1
    assert sum(ALLOCATOR in case.after for case in PLANNED) >= 3


@pytest.mark.parametrize("place", WITHOUT)
@pytest.mark.parametrize("case", PLANNED, ids=lambda case: case.rule)
def test_the_end_is_the_same(before: Before, case: Case, place: str):
    found = planned(case, place)
    assert isinstance(found, Plan), found
    environ = {name: value for name, value in case.environ.items() if name not in found.unset} | dict(found.env)
    additional = additional_of(found)
    assert "rl_config" not in additional
    if case.nz is not None:
        assert before.nz(additional, environ) == case.nz
    if ALLOCATOR in case.after:
        assert before.allocator(environ, sleep=True) == (case.after[ALLOCATOR] or None)
    if "sleep_mode_extra_cleanup" in case.flags:
        assert before.cleanup(additional) is case.flags["sleep_mode_extra_cleanup"]


@pytest.mark.parametrize("case", [case for case in BEFORE if case.rule in OVERRIDDEN], ids=lambda case: case.rule)
def test_what_rl_config_would_override_is_refused(case: Case):
    assert all(isinstance(planned(case, place), Refused) for place in WITHOUT)
