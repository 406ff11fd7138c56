"""What a check is: a generator that says what to ask and judges what came of it. It sends nothing itself.

A check yields calls, is sent their exchanges, and returns what is wrong; an empty tuple is a pass. Whoever drives it
decides how calls travel, so the contract suite, the command line and tests with an engine that lies run the same code.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum

from rollfleet_cli.conformance.checks.wire import Call, Exchange, Identity
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.state import EngineState, ProbeReport


class Promise(StrEnum):
    """What is promised, in the words of the design."""

    NEVER_STALE = "Never stale"
    ATOMIC = "Atomic"
    ALWAYS_ENDS = "Always ends"
    NOTHING_HIDDEN = "Nothing hidden"
    LOCKED = "Locked"
    FEATURES = "What the spec asks for"


@dataclass(frozen=True)
class Fault:
    """One thing that is not as promised."""

    cause: str
    told: str = ""  # the engine's own words


@dataclass(frozen=True)
class Subject:
    """One engine, as its operator configured it and as it was just before the check."""

    pod: str
    pod_uid: str  # empty outside of a pod
    config: EngineConfig
    state: EngineState
    probe_tokens: tuple[int, ...]  # within the vocabulary: they serve as prompts too
    allowed: Decimal  # largest difference between two log-probabilities that counts as agreement
    salt: str  # never used before: what is cached under it, this check has put there
    missing: Mapping[Identity, str] = field(default_factory=dict)  # identities that could not be had, and why

    @property
    def version(self) -> int:
        """Of the weights that it holds."""
        return self.state.weights.version or 0

    @property
    def ranks(self) -> int:
        """Data-parallel."""
        return self.config.data_parallel_size

    @property
    def exact(self) -> Decimal:
        """How far apart the same computation may be on this engine."""
        return Decimal(0) if self.config.rl_config.batch_invariant else self.allowed


Steps = Generator[tuple[Call, ...], tuple[Exchange, ...], tuple[Fault, ...]]
Unless = Callable[[Subject], str]


def always(_: Subject) -> str:
    """No reason not to run it."""
    return ""


@dataclass(frozen=True)
class Entry:
    """What is told of a check of whatever kind."""

    id: str
    title: str
    closes: Promise
    remedy: str  # where to look when it fails


@dataclass(frozen=True)
class Check(Entry):
    """Asked of each engine by itself."""

    run: Callable[[Subject], Steps]
    unless: Unless = always  # why it is skipped; empty: it is not


@dataclass(frozen=True)
class Member:
    """What one engine said of itself, for a comparison of all."""

    pod: str
    state: EngineState
    report: ProbeReport | None
    error: str = ""  # why there is no report


@dataclass(frozen=True)
class Held:
    """What the fleet's status says that every engine holds."""

    version: int
    digest: str | None


@dataclass(frozen=True)
class FleetCheck(Entry):
    """Judged of all engines that were asked, together."""

    judge: Callable[[tuple[Member, ...], Held | None, Decimal], tuple[Fault, ...]]
