"""What the random search of the guard's machine remembers by itself, and draws from."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st

from rollfleet_engine.guard.control import COMMANDS
from rollfleet_engine.guard.states import (
    Event,
    OperationRecord,
)
from rollfleet_protocol.commands import (
    CheckpointSource,
    Command,
    Push,
    Sender,
    Verify,
)
from rollfleet_protocol.sleep import ALL_TAGS, Tag
from rollfleet_protocol.state import (
    Failure,
    FailureReason,
    ProbeResult,
)

ME, OTHER = "this", "another"
SILENCE_S = 30.0
TOKENS = (1, 2, 3)
VERSIONS = st.sampled_from(["held", "held", "goal", "other"])
PUSH = Push(sender=Sender(subject="grpo", uid="1"), backend="gloo", rank_offset=1, world_size=2, workers=1)
MOSTLY = st.sampled_from([True, True, True, True, False])
KINDS = st.sampled_from(sorted(COMMANDS))
FAILURE = Failure(reason=FailureReason.TRANSFER_FAILED, message="told by the engine")


def digest_of(version: int) -> str | None:
    """Version 0 is the model as it was loaded, which has none."""
    return f"sha256:{version}" if version else None


@dataclass
class Task:
    """An operation as the shell runs it: steps that report, and may be stopped only between scheduler calls."""

    operation: OperationRecord
    steps: Iterator[Event]
    cancelled: bool = False


@dataclass
class World:
    """The engine, and what is remembered independently of the machine."""

    paused: bool = False
    pauses: int = 0
    resumes: int = 0
    resident: str | None = None  # digest of what the engine holds; None: the model as it was loaded
    touched: bool = False  # a transfer began, and no verification ended well since
    asleep: frozenset[Tag] = frozenset()
    was_open: bool = False  # when the gate closed last
    armed_since_closed: bool = False
    tasks: list[Task] = field(default_factory=list)


def probe_of(command: Verify) -> ProbeResult:
    return ProbeResult(epoch=command.epoch, version=command.version, tokens=TOKENS, logprobs=(-1.0, -2.0), seconds=0)


def command_of(kind: str, epoch: int, incarnation: str, version: int, digest: str | None) -> Command:
    values: dict[str, object] = {
        "version": version,
        "digest": digest or "sha256:none",
        "source": CheckpointSource(path=str(version)),
        "probe_tokens": TOKENS,
        "deadline_seconds": 9,
        "operator_silence_seconds": SILENCE_S,
        "level": 1 + version % 2,
        "tags": (ALL_TAGS, (Tag.WEIGHTS,), (Tag.KV_CACHE,))[(version + epoch) % 3],
        "push": PUSH if version == 2 else None,
    }
    if kind in ("verify", "open"):
        values["digest"] = digest
    if kind == "prepare":
        del values["digest"]
    model = COMMANDS[kind]
    fields = {name: value for name, value in values.items() if name in model.model_fields}
    return model(incarnation=incarnation, epoch=epoch, **fields)  # type: ignore[arg-type]
