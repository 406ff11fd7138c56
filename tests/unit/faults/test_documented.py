"""docs/fault-injection.md says what there is."""

import re
from pathlib import Path

from rollfleet_engine.faults.plan import Call, FaultType, parse_plan

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "fault-injection.md").read_text(encoding="utf-8")


def test_every_fault_and_every_call_is_told():
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)) == {fault.value for fault in FaultType}
    assert all(f"`{call.value}`" in TEXT for call in Call)


def test_the_example_is_a_plan():
    (example,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    plan = parse_plan(example, "the example")
    assert plan.seed == 7
    assert len(plan.rules) == 4
