"""Commands on the control port: POST /rollfleet/v1/<name>. Every one names (incarnation, epoch).

A command that takes time answers 202 with the state at once and goes on as `state.operation`. The same command again
with the same epoch while it runs, or after it succeeded, is answered with the state and starts nothing, so that a lost
answer is harmless; after it failed it starts anew.
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollfleet_protocol.base import Request
from rollfleet_protocol.sleep import ALL_TAGS, Tag

PREFIX = "/rollfleet/v1"
STATE_PATH = f"{PREFIX}/state"
PROBE_PATH = f"{PREFIX}/probe"
CANARY_PATH = f"{PREFIX}/open"  # asked without identity and without a body: what refuses that is a guard
LONGEST_PROBE_SECONDS = 60
LOOK_PATH = f"{STATE_PATH}?look=true"  # the state at once, and no sign that the operator lives: for people who look

LONGEST_SECONDS = 86400  # of a command: whoever may take longer is told again
Seconds = Annotated[float, Field(gt=0, le=LONGEST_SECONDS)]
Epoch = Annotated[int, Field(ge=1, le=2**62)]
Version = Annotated[int, Field(ge=0, le=2**63 - 1)]
ProbeTokens = Annotated[tuple[int, ...], Field(min_length=2, max_length=4096)]


class Command(Request):
    """What all commands carry."""

    incarnation: str
    epoch: Epoch


class CheckpointRoot(StrEnum):
    """Which of the engine's two read-only folders a path is relative to."""

    CHECKPOINTS = "Checkpoints"  # spec.volumes.checkpoints
    MODEL = "Model"  # model.path itself; the path is then "."


class CheckpointSource(Request):
    """A directory of safetensors files."""

    type: Literal["Checkpoint"] = "Checkpoint"
    root: CheckpointRoot = CheckpointRoot.CHECKPOINTS
    path: Annotated[str, Field(min_length=1, max_length=4096)]


class Prepare(Command):
    """Open, check and hash the source while serving goes on. Touches nothing."""

    version: Version
    source: CheckpointSource
    digest: str | None = None  # what the source must have, where that is known: a committed version's
    deadline_seconds: Seconds


class PauseMode(StrEnum):
    """vLLM's own word for what happens to requests in flight."""

    ABORT = "abort"  # they end at once with what they have, finish_reason "abort"
    WAIT = "wait"  # they may end by themselves for drain_timeout_seconds, then as with abort
    KEEP = "keep"  # they are frozen, and go on under the weights that the gate opens on


class Close(Command):
    """Close the gate, pause the scheduler, see that nothing runs; succeeded means in_flight 0.

    In mode keep, requests stay in the scheduler and count as `kept`. What they say is held back until the gate opens.
    """

    version: Version
    mode: PauseMode = PauseMode.ABORT
    drain_timeout_seconds: Annotated[float, Field(ge=0, le=86400)] = 60.0  # of mode wait
    keep_seconds: Seconds = 3600.0  # of mode keep: the clients of requests that are kept for longer get a 503
    deadline_seconds: Seconds
    operator_silence_seconds: (
        Seconds  # until armed: without a word from the operator for so long, reopen on untouched weights
    )


class Arm(Command):
    """From here on only the operator reopens this engine. Refused while the gate is open or requests are in flight."""


class Sender(Request):
    """Whose ServiceAccount sends the weights, by name and uid."""

    subject: Annotated[str, Field(min_length=1, max_length=512)]  # system:serviceaccount:<namespace>:<name>
    uid: Annotated[str, Field(min_length=1, max_length=128)]


class Push(Request):
    """A trainer sends the weights, by vLLM's native transfer routes on the control port.

    They are open to `sender` alone, from this command to the end of the transfer; /pause and /resume answer it that
    there is nothing to do, as long as the epoch is armed.
    """

    sender: Sender
    # Which of the account's processes: what it says in pushes.HOLDER_HEADER. Empty: they are not told apart.
    holder: Annotated[str, Field(max_length=512)] = ""
    backend: Annotated[str, Field(min_length=1, max_length=64)]
    rank_offset: Annotated[int, Field(ge=1)]  # of this engine's first worker in the trainer's group
    world_size: Annotated[int, Field(ge=2)]  # of the group: the trainer and all workers of all engines
    workers: Annotated[int, Field(ge=1)]  # of this engine, as counted by who numbered the ranks


class Transfer(Command):
    """Apply new weights, through the engine's four phases. Refused unless quiesced and armed.

    Without `push`: what was staged under this epoch, whose digest must be named. With it: what a trainer sends; where
    the digest is named, that is what must come.
    """

    version: Version
    digest: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    push: Push | None = None
    deadline_seconds: Seconds

    @model_validator(mode="after")
    def _of_one_source(self) -> Self:
        if self.push is None and self.digest is None:
            raise ValueError("digest: what was staged must be named, or push say who sends")
        return self


class Verify(Command):
    """Reset caches, resume the scheduler behind the closed gate, answer the probe.

    Refused unless Loaded (or Initial, version 0).
    """

    version: Version
    digest: str | None = None  # None only for Initial weights
    probe_tokens: ProbeTokens
    deadline_seconds: Seconds


class Open(Command):
    """Admit requests. Refused unless the weights are Verified at exactly this version and digest."""

    version: Version
    digest: str | None = None


class Sleep(Command):
    """Give memory back: level 1 moves the weights to host memory, level 2 drops them; the KV cache is dropped.

    Refused unless quiesced under this epoch, and while weights are Uncertain. After it only Wake and Verify (level 1),
    or Wake of the weights, Transfer, Wake of the KV cache and Verify (level 2) lead back to Open.
    """

    level: Literal[1, 2]
    deadline_seconds: Seconds


class Wake(Command):
    """Take memory again, all of it or by tag: weights first. Resumes nothing; the scheduler stays paused until Verify.

    The KV cache is refused while weights sleep, or were dropped and not loaded anew. A tag that is awake stays so.
    """

    tags: Annotated[tuple[Tag, ...], Field(min_length=1)] = ALL_TAGS
    deadline_seconds: Seconds


class Probe(Request):
    """POST PROBE_PATH: probe an engine that may be serving, on every data-parallel rank. Changes and pauses nothing.

    No Command: it names no epoch and takes none. Answered with 200 and a state.ProbeReport when all ranks have spoken;
    409 WrongIncarnation; 409 OrderViolation where the scheduler is paused, an update is at work or the weights are not
    known to be good; 429 Busy while another one runs; 502 ProbeFailed with the engine's own text. A Close that comes
    meanwhile ends it with 409.
    """

    incarnation: str
    tokens: ProbeTokens
    deadline_seconds: Annotated[float, Field(gt=0, le=LONGEST_PROBE_SECONDS)] = 30.0


class Cancel(Command):
    """Give the epoch up: stop staging, resume and reopen on untouched weights. Refused once a tensor was touched."""
