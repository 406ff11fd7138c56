"""Counts calls, says what strikes them, and writes down what was done."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollfleet_engine.faults.plan import Call, Plan, PlanError, Rule
from rollfleet_engine.guard.log import GuardLog

LOGGER = "rollfleet.faults"
DONE = "fault"  # the event of a line that tells of one


@dataclass(frozen=True)
class Strike:
    """A fault that is due now."""

    rule: Rule
    number: int  # of the call, among those of its kind


class Injector:
    """What all of an engine's ports share. Lives in one event loop."""

    def __init__(self, plan: Plan, log: GuardLog, counts: Mapping[str, int] | None = None) -> None:
        self._log = log
        self._counts: Counter[Call] = Counter({Call(name): count for name, count in (counts or {}).items()})
        self.plan = plan
        self._tell()

    def _tell(self) -> None:
        self._log.write("faults.plan", seed=self.plan.seed, rules=len(self.plan.rules))

    def replace(self, read: Callable[[], Plan]) -> None:
        """Another plan; counting begins anew. One that cannot be read changes nothing."""
        try:
            self.plan = read()
        except PlanError as error:
            self._log.write("faults.plan_refused", error=str(error))
            return
        self._counts.clear()
        self._tell()

    def not_done(self, call: Call, error: str) -> None:
        """Say that what was announced came to nothing."""
        self._log.write("faults.not_done", call=call, error=error)

    def counts(self) -> dict[str, int]:
        """Calls so far, by kind."""
        return {call.value: count for call, count in self._counts.items()}

    def strike(self, call: Call) -> Strike | None:
        """Count a call that has come, and say what is to be done to it; that is logged before it is done."""
        self._counts[call] += 1
        number = self._counts[call]
        rule = self.plan.strike(call, number)
        if rule is None:
            return None
        self._log.write(DONE, seed=self.plan.seed, rule=told(rule, number))
        return Strike(rule, number)


def told(rule: Rule, number: int) -> dict[str, Any]:
    """The rule that does the same to this one call, as JSON."""
    same = rule.model_copy(update={"at": (number,), "probability": None, "until": None, "times": 1})
    return same.model_dump(mode="json", by_alias=True, exclude_none=True)


def plan_of_log(lines: Iterable[str]) -> Plan:
    """The plan that does again what a log tells: of several runs in it, all of them. Raises PlanError."""
    rules, seed = [], 0
    for line in lines:
        start = line.find("{")
        if start < 0 or f'"{LOGGER}"' not in line:
            continue
        try:
            entry = json.loads(line[start:])
        except ValueError as error:
            raise PlanError(f"not a line of {LOGGER}: {line[:200]!r}: {error}") from error
        if entry.get("event") == DONE:
            rules.append(entry["rule"])
            seed = entry["seed"]
    return Plan.model_validate({"seed": seed, "rules": rules})


def read_log(path: Path) -> Plan:
    """As plan_of_log."""
    try:
        return plan_of_log(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from error
