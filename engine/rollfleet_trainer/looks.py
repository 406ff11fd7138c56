"""What a WeightVersion says of an update, judged. Pure: over objects as the API server has them.

Programs read conditions: Quiesced True and Transferred False is when a trainer sends. `phase` is for people, and for
how long is waited.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollfleet_protocol.words import visible
from rollfleet_trainer.errors import (
    EngineProblem,
    FleetNeedsWeights,
    SenderLost,
    Superseded,
    TrainerError,
    UpdateFailed,
)

Manifest = dict[str, Any]
OPENING_S = 60.0  # after the commit: how long the operator waits for engines that do not answer
GRACE_S = 60.0  # beyond the deadlines of the spec, which count while operator and API server are up


@dataclass(frozen=True)
class Attempt:
    """An attempt whose sender the operator has chosen."""

    epoch: int
    holder: str  # of the Lease then; empty: nobody


@dataclass(frozen=True)
class Asked:
    """A version that was asked for, and of which object."""

    namespace: str
    fleet: str
    name: str  # of the WeightVersion
    uid: str
    version: int
    generation: int  # of the write; the status speaks of it once observedGeneration is as high
    passed: Attempt | None = None  # that the version had before: its sender was another call, and that has ended

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.namespace}/{self.fleet}: version {self.version}"


@dataclass(frozen=True)
class Seat:
    """An engine that takes the version: of status.targets."""

    name: str  # its pod
    pod_uid: str  # empty: of an engine that was started by hand
    incarnation: str
    url: str  # its control port
    rank_offset: int
    world_size: int


@dataclass(frozen=True)
class Serving:
    """What a client of the fleet's samples needs to know of its RolloutEngine."""

    endpoint: str  # empty before an operator has looked at it
    model: str  # its name there
    routed_experts: bool

    @classmethod
    def of(cls, engine: Manifest) -> Serving:
        """Of an object as the API server has it."""
        spec, status = engine["spec"], engine.get("status") or {}
        routed = (spec.get("features") or {}).get("routedExperts") == "Enabled"
        return cls(str(status.get("endpoint") or ""), str(spec["model"]["servedName"]), routed)


class Standing(StrEnum):
    """How far the version is, for who sends it."""

    WAITING = "Waiting"  # the operator's turn
    READY = "Ready"  # all engines are closed and armed, and wait for this sender
    TAKEN = "Taken"  # every engine that counts holds the weights: the sender is not needed any more
    ACTIVE = "Active"
    ENDED = "Ended"  # without the version: `error` says why


@dataclass(frozen=True)
class Look:
    """One look."""

    standing: Standing
    phase: str = "Pending"
    attempt: int = 0
    epoch: int = 0
    done: int = 0  # engines that have done the phase's step
    total: int = 0
    message: str = ""  # what is waited for
    problems: tuple[EngineProblem, ...] = ()
    seats: tuple[Seat, ...] = ()
    error: TrainerError | None = None


def judge(weight_version: Manifest, asked: Asked, holder: str) -> Look:
    """How far the version is. `holder`: who asks, as its Lease names it."""
    status = weight_version.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    known = int(status.get("observedGeneration") or 0) >= asked.generation
    if int(weight_version["spec"]["version"]) > asked.version:
        return _overtaken(weight_version, status, asked)
    if not known:
        return Look(Standing.WAITING, message="the operator has not looked at it yet")
    accepted = conditions.get("Accepted") or {}
    if accepted.get("status") == "False":
        why = UpdateFailed(str(accepted.get("reason")), f"{asked.place} is not accepted: {_words(accepted)}")
        return Look(Standing.ENDED, error=why)
    if status.get("version") != asked.version:
        return Look(Standing.WAITING, message="the operator has not begun it yet")
    return _of_status(status, conditions, asked, holder)


def attempt_of(weight_version: Manifest) -> Attempt | None:
    """The attempt that waits for its sender, or is sent for; None where there is none."""
    status = weight_version.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    sends = _holds(conditions, "Quiesced") and not _holds(conditions, "Transferred") and status.get("phase") != "Failed"
    return _attempt(status) if sends and status.get("version") == weight_version["spec"]["version"] else None


def _attempt(status: Manifest) -> Attempt:
    return Attempt(int(status.get("epoch") or 0), str((status.get("sender") or {}).get("holder") or ""))


def _of_status(status: Manifest, conditions: dict[str, Manifest], asked: Asked, holder: str) -> Look:
    phase, active = str(status.get("phase") or "Pending"), conditions.get("Active") or {}
    progress = status.get("progress") or {}
    look = Look(
        Standing.WAITING,
        phase=phase,
        attempt=int(status.get("attempt") or 0),
        epoch=int(status.get("epoch") or 0),
        done=int(progress.get("done") or 0),
        total=int(progress.get("total") or 0),
        message=_words(active),
        problems=problems_of(status),
    )
    if phase == "Failed":
        return _with(look, Standing.ENDED, error=_failure(asked, str(active.get("reason")), look))
    if active.get("status") == "True":
        return _with(look, Standing.ACTIVE)
    if _holds(conditions, "Transferred"):
        return _with(look, Standing.TAKEN)
    if not _holds(conditions, "Quiesced") or _attempt(status) == asked.passed:
        return look
    chosen = str((status.get("sender") or {}).get("holder") or "")
    if chosen != holder:
        text = f"{asked.place}: the operator has {chosen or 'nobody'!r} as its sender, this process is {holder!r}"
        return _with(look, Standing.ENDED, error=SenderLost(text))
    return _with(look, Standing.READY, seats=tuple(_seat(each) for each in status.get("targets") or ()))


def _overtaken(weight_version: Manifest, status: Manifest, asked: Asked) -> Look:
    """A higher version is asked for. What was committed before that has succeeded all the same."""
    ended = [each for each in status.get("history") or () if each["version"] == asked.version]
    if ended and ended[-1]["outcome"] == "Active":
        return Look(Standing.ACTIVE, phase="Active")
    if ended and ended[-1]["outcome"] == "Failed":
        return Look(Standing.ENDED, error=UpdateFailed("UpdateFailed", f"{asked.place}: {_words(ended[-1])}"))
    if not ended and status.get("committedVersion") == asked.version:
        return Look(Standing.TAKEN, phase="Opening", epoch=int(status.get("epoch") or 0), message="it is committed")
    newer = weight_version["spec"]["version"]
    text = f"{asked.place} was superseded: {asked.name} asks for {newer} now; send that one, or a higher one"
    return Look(Standing.ENDED, error=Superseded(text))


def _failure(asked: Asked, reason: str, look: Look) -> TrainerError:
    text = f"{asked.place}: {look.message}"
    if reason == "SenderLost":
        return SenderLost(
            f"{text} (the operator's word: this trainer's Lease ran out, or it offered the version no more)"
        )
    if reason == "WeightsLost":
        cure = "send a version by update, or name a checkpoint by `rollfleet bump`"
        return FleetNeedsWeights(reason, f"{text}; {cure}", look.problems)
    return UpdateFailed(reason, text, look.problems)


def problems_of(status: Manifest) -> tuple[EngineProblem, ...]:
    """Engines that hold the update up, or were left out of it."""
    failed = (status.get("progress") or {}).get("failed") or ()
    return tuple(
        EngineProblem(str(each["name"]), str(each["reason"]), visible(str(each["message"]))) for each in failed
    )


def _with(look: Look, standing: Standing, *, error: TrainerError | None = None, seats: tuple[Seat, ...] = ()) -> Look:
    return Look(
        standing,
        phase=look.phase,
        attempt=look.attempt,
        epoch=look.epoch,
        done=look.done,
        total=look.total,
        message=look.message,
        problems=look.problems,
        seats=seats,
        error=error,
    )


def _seat(target: Manifest) -> Seat:
    return Seat(
        name=str(target["name"]),
        pod_uid=str(target.get("podUid") or ""),
        incarnation=str(target["incarnation"]),
        url=str(target["url"]),
        rank_offset=int(target["rankOffset"]),
        world_size=int(target["worldSize"]),
    )


def _holds(conditions: dict[str, Manifest], kind: str) -> bool:
    return (conditions.get(kind) or {}).get("status") == "True"


def _words(said: Manifest) -> str:
    return visible(str(said.get("message") or said.get("reason") or ""))


class Patience:
    """How long each phase is waited for: what the spec gives it, and some for an operator that is being replaced.

    Each attempt has its phases anew. Seconds are of the caller's monotonic clock.
    """

    def __init__(self, weight_version: Manifest, engine: Manifest, now_s: float) -> None:
        given = {"prepareSeconds": 600, "quiesceSeconds": 120, "transferSeconds": 600, "verifySeconds": 120}
        given |= weight_version["spec"].get("deadlines") or {}  # the API server has filled the defaults in
        startup = ((engine.get("spec") or {}).get("startup") or {}).get("timeoutSeconds") or 1800
        self.transfer_s = float(given["transferSeconds"])
        self._seconds = {
            "Pending": given["prepareSeconds"] + startup,
            "Preparing": given["prepareSeconds"],
            "Quiescing": given["quiesceSeconds"],
            "Transferring": given["transferSeconds"],
            "Verifying": given["verifySeconds"],
            "Opening": OPENING_S,
        }
        self._at = ("", 0, 0)
        self._began_s = now_s

    def left_s(self, look: Look, now_s: float) -> float:
        """Seconds until nothing is to be expected any more of the phase that the look shows."""
        at = (look.phase, look.attempt, look.epoch)
        if at != self._at:
            self._at, self._began_s = at, now_s
        return self._began_s + self._seconds.get(look.phase, math.inf) + GRACE_S - now_s

    def over(self, look: Look, asked: Asked, away: str) -> UpdateFailed:
        """What is raised then. `away`: why nothing is heard of the API server."""
        seconds = self._seconds.get(look.phase, 0) + GRACE_S
        text = f"{asked.place} has been {look.phase} for {seconds:g} s, longer than its spec allows"
        return UpdateFailed(
            "OperatorSilent", f"{text}: {away or 'does the operator run?'} {look.message}".strip(), look.problems
        )
