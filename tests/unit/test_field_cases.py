"""Each case from the field that this part of the project answers for has a test of its name somewhere.

Cases are failures that users of rollout fleets reported; what each must become here is told by its tests.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CASES = {
    "C01": "a replaced engine answers from the model's own weights",
    "C02": "garbage is served after the weights were dropped in a sleep",
    "C03": "a prompt's prefix is answered from the caches of old weights",
    "C04": "an engine refuses a step, and its trainer waits in a broadcast for ever",
    "C05": "a router sends to engines that left the serving set",
    "C06": "liveness kills engines that still load",
    "C07": "one broken update blocks every later one",
    "C11": "a checkpoint is half written, or deleted while engines load it",
    "C13": "results depend on the batch although batch invariance is on",
    "C14": "control endpoints answer without identity",
    "C17": "ranks or world sizes are wrong with data parallelism",
    "C18": "one answer mixes versions, or its abort is not told",
    "C20": "an engine that is half awake computes",
    "C21": "a tool call comes back as text: no parser, or a wrong one",
    "C22": "objects never go away",
    "C23": "an engine lacks what the update needs",
    "C28": "success is reported, and weights are the old ones",
    "C30": "a rank in a request is lost, or out of range",
    "C31": "status is written without end, or dropped by the schema",
    "C38": "a replayed trace is cut off at a default length",
}
CASE = re.compile(r"(?<![A-Z0-9])C[0-9]{2}(?![0-9])")


@cache
def names_of(tests: Path) -> set[str]:
    """Cases that a test function names: by its own name, or in the first lines of it or of its module."""
    found: set[str] = set()
    for path in tests.rglob("test_*.py"):
        source = path.read_text()
        if not CASE.search(source.upper()):
            continue  # reading it whole would take longer than all the rest
        module = ast.parse(source)
        functions = [each for each in ast.walk(module) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        own = [each for each in functions if each.name.startswith("test_")]
        texts = [each.name.upper() for each in own] + [ast.get_docstring(each) or "" for each in own]
        texts += [ast.get_docstring(module) or ""] if own else []
        found |= {name for text in texts for name in CASE.findall(text)}
    return found


@pytest.mark.parametrize("case", CASES)
def test_each_case_of_the_field_has_a_test_of_its_name(case: str) -> None:
    assert case in names_of(TESTS)


def test_a_case_that_no_test_names_is_missed() -> None:
    assert "C99" not in names_of(TESTS)
