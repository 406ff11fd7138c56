"""Which call fails, when, and how: pure. A fault depends on the seed, the kind of call and its number, on nothing else.

So the same seed gives the same faults whatever the timing, and however calls of different kinds fall between each
other.
"""

import hashlib
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

MOST_RULES = 256
MOST_TIMES = 100
LONGEST_S = 3600.0  # of a delay or a hang: longer than any deadline that one wants to try
LARGEST_PLAN = 1 << 20  # bytes of a file


class Call(StrEnum):
    """What is counted, each by itself: the first call of a kind after the start is number 1."""

    PREPARE = "prepare"
    CLOSE = "close"
    ARM = "arm"
    TRANSFER = "transfer"
    VERIFY = "verify"
    OPEN = "open"
    CANCEL = "cancel"
    STATE = "state"  # long polls too
    PROBE = "probe"
    INFERENCE = "inference"  # any route of the serving port that answers from the weights
    HEALTH = "health"  # what routers ask
    LIVEZ = "livez"  # what kubelets ask
    # Inside of the engine, where the guard calls it. Only the simulator's are within reach.
    ENGINE_STAGE = "engine.stage"
    ENGINE_PAUSE = "engine.pause"
    ENGINE_APPLY = "engine.apply"
    ENGINE_RECOVER = "engine.recover"
    ENGINE_RESET_CACHES = "engine.resetCaches"
    ENGINE_RESUME = "engine.resume"
    ENGINE_PROBE = "engine.probe"

    @property
    def inside(self) -> bool:
        """Whether it is a call inside of the engine, not one over HTTP."""
        return self.value.startswith("engine.")


class FaultType(StrEnum):
    """What can be done to a call."""

    REFUSE = "refuse"  # not executed: an error, with a text as the engine's own
    DELAY = "delay"  # executed, so much later
    CUT = "cut"  # executed, and the connection ends within the answer
    BAD_GATEWAY = "badGateway"  # not executed: 502 as from something between, twice unless `times` says otherwise
    CORRUPT = "corrupt"  # a bit of a tensor is another
    SKIP = "skip"  # the tensors of a layer are left out
    DIE = "die"  # the engine's processes are killed, before the call reaches them
    HANG = "hang"  # the engine stands still; inside of the engine only this call
    RESTART = "restart"  # killed and started anew, with the weights of model.path


_OVER_HTTP = frozenset({FaultType.CUT, FaultType.BAD_GATEWAY})
_CORRUPTS = frozenset({Call.PREPARE, Call.TRANSFER})
_SKIPS = frozenset({Call.PREPARE, Call.ENGINE_APPLY})
# Which parameter belongs to which faults.
_PARAMETERS = {
    "seconds": frozenset({FaultType.DELAY, FaultType.HANG}),
    "message": frozenset({FaultType.REFUSE}),
    "status": frozenset({FaultType.REFUSE}),
    "tensor": frozenset({FaultType.CORRUPT}),
    "layer": frozenset({FaultType.SKIP}),
}
DELAY_S = 1.0
REFUSAL = "EngineCore encountered an issue. See stack trace (above) for the root cause."  # vLLM's words
_DEFAULT_STATUS = 500


class PlanError(Exception):
    """A plan cannot be used; the message says where and why."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Rule(_Model):
    """One fault, and the calls that it strikes."""

    call: Call
    fault: FaultType
    at: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(max_length=1000)] = ()
    probability: Annotated[float, Field(gt=0, le=1)] | None = None  # of each call, instead of `at`
    until: Annotated[int, Field(ge=1)] | None = None  # with probability: calls after this number are spared
    times: Annotated[int, Field(ge=1, le=MOST_TIMES)] | None = None  # how many calls in a row, from each that is struck
    seconds: Annotated[float, Field(gt=0, le=LONGEST_S)] | None = None
    message: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    status: Annotated[int, Field(ge=400, le=599)] | None = None
    tensor: str | None = None  # None: one that the seed chooses
    layer: str | None = None  # as "model.layers.3"; None: one that the seed chooses

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if bool(self.at) == (self.probability is not None):
            raise ValueError("give either at (numbers of calls, from 1) or probability")
        if self.until is not None and self.probability is None:
            raise ValueError("until belongs to probability")
        for name, faults in _PARAMETERS.items():
            if getattr(self, name) is not None and self.fault not in faults:
                raise ValueError(f"{name} belongs to {', '.join(sorted(faults))}, not to {self.fault}")
        if self.status is not None and self.call.inside:
            raise ValueError(f"status is HTTP's: {self.call} is a call inside of the engine")
        if text := _out_of_place(self.fault, self.call):
            raise ValueError(text)
        return self

    @property
    def lasts(self) -> int:
        """Calls in a row."""
        return self.times or (2 if self.fault is FaultType.BAD_GATEWAY else 1)

    @property
    def duration_s(self) -> float:
        """Of a delay or a hang."""
        return self.seconds or (DELAY_S if self.fault is FaultType.DELAY else LONGEST_S)

    @property
    def words(self) -> str:
        """What a refused call is told."""
        return self.message or REFUSAL

    @property
    def answer_status(self) -> int:
        """Of a refusal over HTTP."""
        return self.status or _DEFAULT_STATUS


def _out_of_place(fault: FaultType, call: Call) -> str:
    if fault in _OVER_HTTP and call.inside:
        return f"{fault} is for calls over HTTP, {call} is one inside of the engine"
    for only, calls in ((FaultType.CORRUPT, _CORRUPTS), (FaultType.SKIP, _SKIPS)):
        if fault is only and call not in calls:
            return f"{fault} is for {' and '.join(sorted(calls))}, not for {call}"
    return ""


class Plan(_Model):
    """Rules in order; of several that strike the same call the first one counts."""

    seed: int = 0
    rules: Annotated[tuple[Rule, ...], Field(max_length=MOST_RULES)] = ()

    def strike(self, call: Call, number: int) -> Rule | None:
        """What happens to the call of this number."""
        seen: Counter[FaultType] = (
            Counter()
        )  # rules are drawn by their place among those alike, whatever others there are
        for rule in self.rules:
            if rule.call is call:
                seen[rule.fault] += 1
                firsts = range(max(1, number - rule.lasts + 1), number + 1)
                if any(self._starts(rule, seen[rule.fault], first) for first in firsts):
                    return rule
        return None

    def _starts(self, rule: Rule, place: int, number: int) -> bool:
        if rule.probability is None:
            return number in rule.at
        if rule.until is not None and number > rule.until:
            return False
        return share(self.seed, rule.call, rule.fault, place, number) < rule.probability

    def has(self, fault: FaultType, call: Call) -> bool:
        """Whether a rule does this to calls of this kind."""
        return any(rule.fault is fault and rule.call is call for rule in self.rules)


def share(*parts: object) -> float:
    """A number in [0, 1) that is the same for the same parts, everywhere and always."""
    raw = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(raw[:6], "big") / 2**48


def choose(names: list[str], *parts: object) -> str:
    """One of the names, always the same for the same parts."""
    return sorted(names)[int(share(*parts) * len(names))]


def parse_plan(text: str | bytes, what: str) -> Plan:
    """A plan from JSON. Raises PlanError."""
    try:
        return Plan.model_validate_json(text)
    except ValidationError as error:
        found = (
            f"{'.'.join(str(part) for part in each['loc']) or 'the file'}: {each['msg'].removeprefix('Value error, ')}"
            for each in error.errors(include_url=False, include_input=False, include_context=False)
        )
        raise PlanError(f"{what}: {'; '.join(found)}") from error


def read_plan(path: Path, seed: int | None = None) -> Plan:
    """The plan in a file, drawn by another seed where one is given. Raises PlanError."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_PLAN + 1)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from error
    if len(text) > LARGEST_PLAN:
        raise PlanError(f"{path}: is larger than {LARGEST_PLAN} bytes")
    plan = parse_plan(text, str(path))
    return plan if seed is None else plan.model_copy(update={"seed": seed})


# What a seed without a file gives: an update has about seven commands, so that about every second one meets a fault.
DRAWN = (
    Rule(call=Call.PREPARE, fault=FaultType.REFUSE, probability=0.05, message="drawn: the engine refuses to prepare"),
    Rule(call=Call.PREPARE, fault=FaultType.CORRUPT, probability=0.02),
    Rule(call=Call.PREPARE, fault=FaultType.SKIP, probability=0.05),
    Rule(call=Call.CLOSE, fault=FaultType.DELAY, probability=0.1, seconds=2),
    Rule(call=Call.CLOSE, fault=FaultType.CUT, probability=0.05),
    Rule(call=Call.ARM, fault=FaultType.BAD_GATEWAY, probability=0.05),
    Rule(call=Call.TRANSFER, fault=FaultType.CORRUPT, probability=0.05),
    Rule(call=Call.TRANSFER, fault=FaultType.CUT, probability=0.05),
    Rule(call=Call.TRANSFER, fault=FaultType.RESTART, probability=0.02),
    Rule(call=Call.VERIFY, fault=FaultType.HANG, probability=0.02, seconds=5),
    Rule(call=Call.VERIFY, fault=FaultType.DIE, probability=0.01),
    Rule(call=Call.OPEN, fault=FaultType.BAD_GATEWAY, probability=0.05),
)


def drawn_plan(seed: int) -> Plan:
    """The plan of a seed alone."""
    return Plan(seed=seed, rules=DRAWN)
