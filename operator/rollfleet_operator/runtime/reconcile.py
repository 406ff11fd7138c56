"""One pass over one fleet: read, observe, plan, apply. The only place where every exception is caught."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime

from rollfleet_operator.api.meta import LABEL_OPERATOR
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.api.weightversion import WeightVersion, WeightVersionStatus
from rollfleet_operator.clients.ending import end_if_asked
from rollfleet_operator.clients.errors import (
    Busy,
    Conflict,
    Rejected,
    Retryable,
    RollfleetError,
    Terminating,
    Unreachable,
)
from rollfleet_operator.core.actions import Decision
from rollfleet_operator.core.observed import Observed
from rollfleet_operator.ports import Meter
from rollfleet_operator.runtime.apply import Applier, summary
from rollfleet_operator.runtime.observe import Observer, Read, Seen, parse_fleet, parse_weight_version
from rollfleet_operator.runtime.records import Records

logger = logging.getLogger(__name__)

PASS_S = 60.0  # of one pass; every call in it has a shorter deadline
MAX_REJECTED = 900  # characters that a condition tells
IDLE_S = 20.0  # of passes that do nothing, after which guards hear no more of us
LASTING_S = 30.0  # after which people are told of calls that get no answer, though the API server reads and writes
MAX_LOGGED = 50  # actions of one decision
Plan = Callable[[Observed, datetime], Decision]
PlanOrphan = Callable[[WeightVersion, datetime], Decision]


class Reconciler:
    """Works on keys."""

    def __init__(
        self,
        observer: Observer,
        applier: Applier,
        plan: Plan,
        plan_orphan: PlanOrphan,
        records: Records,
        meter: Meter,
        clock: Callable[[], datetime],
        name: str = "",
    ) -> None:
        self._observer = observer
        self._applier = applier
        self._plan = plan
        self._plan_orphan = plan_orphan
        self._records = records
        self._meter = meter
        self._clock = clock
        self._name = name
        self._failing: dict[str, float] = {}  # since when (time of the loop) calls of this fleet are not answered
        self._acted: set[str] = set()  # in the pass that runs
        self._idle_since: dict[str, float] = {}  # since when passes end before they have acted

    async def work(self) -> None:
        """Take keys from the queue until cancelled."""
        while True:
            end_if_asked()
            await self.reconcile(await self._records.queue.get())

    async def reconcile(self, key: str) -> None:
        """One pass, whatever comes of it."""
        started, queue = time.monotonic(), self._records.queue
        outcome = "ok"
        try:
            async with asyncio.timeout(PASS_S):
                wake = await self._pass(key)
            self._acted.add(key)
            queue.done(key)
            queue.wake(key, wake)
        except Conflict as error:
            outcome = "conflict"
            logger.info("conflict", extra={"fields": {"key": key, "error": str(error)}})
            queue.conflicted(key)
        except Terminating:
            outcome = "terminating"
            queue.failed(key)
        except (RollfleetError, TimeoutError) as error:
            outcome = "retry" if isinstance(error, Retryable | TimeoutError) else "rejected"
            delay = queue.failed(key, getattr(error, "after", None))
            fields = {"key": key, "error": str(error) or "the pass took too long", "retryInSeconds": round(delay, 1)}
            logger.warning("pass failed", extra={"fields": fields})
        except Exception:  # the one top-level place: a bug in one fleet's pass must not stop the others
            outcome = "crashed"
            delay = queue.failed(key)
            logger.exception("pass crashed", extra={"fields": {"key": key, "retryInSeconds": round(delay, 1)}})
        finally:
            self._meter.reconcile(outcome, time.monotonic() - started)
            self._speak_or_be_silent(key)

    def _speak_or_be_silent(self, key: str) -> None:
        """An operator whose passes fail before they act (no right to write, a webhook, a bug) is none to the guards.

        Those that it closed and has not armed then reopen by themselves, as if its process were gone.
        """
        if key in self._acted:
            self._acted.discard(key)
            self._idle_since.pop(key, None)
            self._records.followers.be_silent(key, False)
            return
        now = asyncio.get_running_loop().time()
        idle_s = now - self._idle_since.setdefault(key, now)
        if idle_s >= IDLE_S:
            self._records.followers.be_silent(key, True)

    async def _pass(self, key: str) -> float | None:
        """Seconds until the next look, if the decision names a time."""
        read = await self._observer.read(key)
        if read.fleet is None:
            self._records.forget(key)
            self._failing.pop(key, None)
            await self._tell_orphans(read)
            return None
        if read.fleet["metadata"].get("labels", {}).get(LABEL_OPERATOR, "") != self._name:
            self._records.forget(key)  # another operator's
            return None
        fleet = parse_fleet(read.fleet)
        self._records.fleets.put(fleet)
        if fleet.metadata.deletion_timestamp is not None:  # the garbage collector takes the children
            self._records.followers.forget(key)  # nobody leads its engines: what is closed, and not armed, reopens
            return None
        return await self._decide(key, fleet, read)

    async def _decide(self, key: str, fleet: RolloutEngine, read: Read) -> float | None:
        try:
            seen = await self._observer.observe(key, fleet, read)
        except Rejected as error:
            self._applier.report(fleet.metadata, [error])
            raise
        now = self._clock()
        decision = self._plan(seen.observed, now)
        _log(key, seen, decision)
        try:
            errors = await self._applier.apply(key, seen, decision)
        except RollfleetError as error:  # the status itself is not taken: nothing but an Event can tell
            told = [error] if isinstance(error, Rejected) else self._lasting(key, [error])
            self._applier.report(fleet.metadata, told)
            raise
        self._acted.add(key)
        if errors:
            self._fail(key, fleet, errors)
        self._failing.pop(key, None)
        if self._records.rejected.pop(key, None) is not None:
            self._records.queue.put(key)  # the status still tells of what was refused before
        return (decision.wake_at - self._clock()).total_seconds() if decision.wake_at else None

    async def _tell_orphans(self, read: Read) -> None:
        """WeightVersions that name a fleet which does not exist."""
        for manifest in read.weight_versions.values():
            weight_version = parse_weight_version(manifest)
            decision = self._plan_orphan(weight_version, self._clock())
            await self._applier.apply_orphan(manifest, weight_version, decision)

    def _fail(self, key: str, fleet: RolloutEngine, errors: list[RollfleetError]) -> None:
        """The rest was done; the pass counts as failed by the gravest error."""
        rejected = [error for error in errors if not isinstance(error, Retryable)] + self._lasting(key, errors)
        self._applier.report(fleet.metadata, rejected)
        if rejected:
            self._records.rejected[key] = "; ".join(sorted({str(error) for error in rejected}))[:MAX_REJECTED]
        gravest = (rejected or [error for error in errors if not isinstance(error, Conflict)] or errors)[0]
        raise gravest

    def _lasting(self, key: str, errors: list[RollfleetError]) -> list[RollfleetError]:
        """What may pass by itself, and has not for too long to keep quiet about: a webhook that is down, for one."""
        found: list[RollfleetError] = [error for error in errors if isinstance(error, Unreachable | Busy | Conflict)]
        if not found:
            self._failing.pop(key, None)
            return []
        now = asyncio.get_running_loop().time()
        return found if now - self._failing.setdefault(key, now) >= LASTING_S else []


def _log(key: str, seen: Seen, decision: Decision) -> None:
    """One line per decision that does something."""
    actions = [summary(action) for action in decision.actions[:MAX_LOGGED]]
    writes = ["FleetStatus"] if _changes_fleet(seen, decision) else []
    known = {one.metadata.name: one.status for one in seen.observed.weight_versions}
    writes += [
        f"WeightVersionStatus {w.name}" for w in decision.weight_version_statuses if known.get(w.name) != w.status
    ]
    fields = {
        "key": key,
        "generation": seen.observed.fleet.metadata.generation,
        "step": _step(decision, known),
        "actions": actions,
        "writes": writes,
        "events": [f"{event.reason}: {event.message}" for event in decision.events],
        "notes": list(decision.notes),
    }
    if len(decision.actions) > MAX_LOGGED:
        fields["actionsInAll"] = len(decision.actions)
    level = logging.INFO if actions or writes or decision.events else logging.DEBUG
    logger.log(level, "decision", extra={"fields": fields})


def _changes_fleet(seen: Seen, decision: Decision) -> bool:
    return decision.fleet_status is not None and decision.fleet_status.status != seen.observed.fleet.status


def _step(decision: Decision, known: Mapping[str, WeightVersionStatus]) -> str:
    """Phase of the update that the decision speaks of."""
    phases = [write.status.phase.value for write in decision.weight_version_statuses]
    phases += [status.phase.value for status in known.values()]
    return phases[0] if phases else ""
