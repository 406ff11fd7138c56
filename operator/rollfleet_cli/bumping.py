"""Asking for another version: what is written, and a loop around the write that no other writer can mislead.

A write carries the resourceVersion that the choice of the number was made on. Where somebody else wrote first, both
are done anew, a few times; where the answer got lost, the object is read again, and tells.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rollfleet_cli.cluster import Writer
from rollfleet_cli.errors import ConflictError, NotFoundError, NotPossibleError, UnreachableError
from rollfleet_operator.api.rolloutengine import Committed, Outcome, RolloutEngine
from rollfleet_operator.api.weightversion import (
    Checkpoint,
    HistoryEntry,
    Phase,
    Source,
    SourceType,
    Stored,
    WeightVersion,
)
from rollfleet_operator.core.accept import in_charge, judge_weight_version

ATTEMPTS = 8  # writes against other writers; each costs two reads and a write
PAUSE_S = 0.1  # longest before the second, twice that before the third: the operator writes in bursts of a second or so
ENDED = (Phase.ACTIVE, Phase.FAILED)


@dataclass(frozen=True)
class Wish:
    """What somebody wants served next."""

    checkpoint: str
    step: str = ""
    version: int | None = None  # None: the next one


@dataclass(frozen=True)
class Asked:
    """What was written."""

    namespace: str
    fleet: str
    weight_version: str
    version: int
    checkpoint: str
    step: str
    created: bool
    supersedes: int | None = None  # a version whose update was under way

    def to_json(self) -> dict[str, Any]:
        """For `-o json`."""
        return asdict(self)

    def words(self) -> str:
        """For a person."""
        step = f" (step {self.step})" if self.step else ""
        over = "" if self.supersedes is None else f"; it takes over from version {self.supersedes}, which was under way"
        verb = "created, asks" if self.created else "asks"
        where = f"{self.namespace}/{self.fleet}: {self.weight_version}"
        return f"{where} {verb} for version {self.version}{step} from {self.checkpoint}{over}"


@dataclass(frozen=True)
class Scene:
    """A fleet and the WeightVersion in charge of it."""

    fleet: RolloutEngine
    charge: WeightVersion | None

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.fleet.metadata.namespace}/{self.fleet.metadata.name}"

    @property
    def committed(self) -> Committed | None:
        """What the fleet serves."""
        return self.fleet.status.committed

    @property
    def highest(self) -> int:
        """The highest number that was ever used, as far as the objects tell."""
        asked = 0 if self.charge is None else self.charge.spec.version
        return max(asked, 0 if self.committed is None else self.committed.version)


def look_at(cluster: Writer, namespace: str, name: str) -> Scene:
    """The objects as they are now, judged as the operator does."""
    fleet = cluster.fleet(namespace, name)
    named = tuple(each for each in cluster.versions(namespace) if each.spec.engine_ref.name == name)
    return Scene(fleet, in_charge(named, fleet.status.committed))


def _attempts() -> Iterator[None]:
    """Each after a pause by chance, longer than the last: two who write in step would stay in step."""
    for done in range(ATTEMPTS):
        time.sleep(random.uniform(0, PAUSE_S * done))  # noqa: S311 - jitter
        yield


def ask_for(cluster: Writer, namespace: str, name: str, wish: Wish) -> Asked:
    """Raise the fleet's WeightVersion, or create it where there is none."""
    words = ""
    for _ in _attempts():
        scene = look_at(cluster, namespace, name)
        wanted = plan_version(scene, wish)
        under_way = _under_way(scene, wanted)
        try:
            written = _write(cluster, scene, wanted)
        except ConflictError as error:
            words = str(error)
            continue
        except UnreachableError:
            scene = look_at(cluster, namespace, name)
            if scene.charge is None or not _says(scene.charge, wanted):
                raise
            written = scene.charge
        return _asked(scene, written, created=wanted.metadata.uid == "", under_way=under_way)
    raise _too_late(scene, words)


def ask_again(cluster: Writer, namespace: str, name: str, request: str) -> Asked:
    """Retry the version that failed; `request` is a string that was never used."""
    words = ""
    for _ in _attempts():
        scene = look_at(cluster, namespace, name)
        charge = failed_version(scene)
        try:
            written = cluster.patch_version(namespace, charge.metadata.name, _change(charge, retryRequest=request))
        except ConflictError as error:
            words = str(error)
            continue
        except UnreachableError:
            scene = look_at(cluster, namespace, name)
            if scene.charge is None or scene.charge.spec.retry_request != request:
                raise
            written = scene.charge
        return _asked(scene, written, created=False, under_way=None)
    raise _too_late(scene, words)


def failed_version(scene: Scene) -> WeightVersion:
    """The WeightVersion in charge, if there is something to retry; else an error that says why not."""
    charge = scene.charge
    if charge is None:
        raise NotFoundError(f"{scene.place}: no WeightVersion names this fleet")
    status, version = charge.status, charge.spec.version
    if charge.metadata.generation > status.observed_generation:
        raise NotPossibleError(f"{scene.place}: the operator has not looked at version {version} yet")
    if status.phase is not Phase.FAILED:
        raise NotPossibleError(f"{scene.place}: version {version} is {status.phase}; only one that failed is retried")
    return charge


def plan_version(scene: Scene, wish: Wish) -> WeightVersion:
    """The WeightVersion as it shall be. NotPossibleError where the operator would not accept it."""
    if scene.fleet.metadata.deletion_timestamp is not None:
        raise NotPossibleError(f"{scene.place}: the fleet is being deleted")
    version = scene.highest + 1 if wish.version is None else wish.version
    if version <= scene.highest:
        which = "is asked for" if scene.charge and scene.charge.spec.version == scene.highest else "is committed"
        raise NotPossibleError(f"{scene.place}: version {version} must exceed {scene.highest}, which {which} already")
    changes: dict[str, Any] = {
        "version": version,
        "step": wish.step,
        "source": Source(type=SourceType.CHECKPOINT, checkpoint=Checkpoint(path=wish.checkpoint)),
    }
    if scene.charge is not None:
        probe = scene.charge.spec.verify.probe.model_copy(update={"expected_logprobs": ()})
        verify = scene.charge.spec.verify.model_copy(update={"probe": probe})
        changes |= {"recovery": None, "stored": _stored(scene.charge), "verify": verify}
        spec = scene.charge.spec.model_copy(update=changes)
        wanted = scene.charge.model_copy(update={"spec": spec})
    else:
        wanted = WeightVersion.model_validate({"metadata": _new_name(scene), "spec": _engine_ref(scene) | changes})
    verdict = judge_weight_version(wanted, scene.fleet, scene.charge, scene.committed)
    if not verdict.accepted:
        raise NotPossibleError(f"{scene.place}: {verdict.reason}: {verdict.message}")
    return wanted


def choose_earlier(scene: Scene, version: int | None) -> HistoryEntry:
    """The ended update to go back to; NotFoundError says why there is none."""
    committed, charge = scene.committed, scene.charge
    if charge is None:
        raise NotFoundError(f"{scene.place}: no WeightVersion names this fleet, so there is no history to go back in")
    able = [entry for entry in charge.status.history if entry.outcome is Outcome.ACTIVE and entry.checkpoint]
    if version is not None:
        return _named(scene, able, charge.status.history, version)
    if committed is None:
        raise NotFoundError(f"{scene.place}: nothing is committed, so nothing is before it")
    earlier = [each for each in able if each.version < committed.version and each.checkpoint != committed.checkpoint]
    if not earlier:
        raise NotFoundError(
            f"{scene.place}: history tells of no version that was Active before {committed.version} from another "
            "checkpoint; `rollfleet bump --checkpoint PATH` serves any checkpoint that there is"
        )
    return earlier[-1]


def _named(scene: Scene, able: list[HistoryEntry], history: tuple[HistoryEntry, ...], version: int) -> HistoryEntry:
    found = next((entry for entry in reversed(able) if entry.version == version), None)
    if found is not None:
        return found
    others = ", ".join(str(entry.version) for entry in able) or "none"
    ended = next((entry for entry in reversed(history) if entry.version == version), None)
    why = "is not in the history, which keeps the last ten" if ended is None else f"ended {ended.outcome.value}"
    if version == 0:
        why = "is model.path as it was loaded at start, which no WeightVersion can name: copy it below the checkpoints"
    raise NotFoundError(f"{scene.place}: version {version} {why}; one can go back to: {others}")


def patch_of(wanted: WeightVersion) -> dict[str, Any]:
    """The merge patch that makes it so, if nobody wrote meanwhile. What was of the version before goes."""
    spec = wanted.spec
    source = {"trainer": None} | spec.source.dump()
    verify = {"probe": {"expectedLogprobs": None}}
    kept = {} if spec.stored is None else {"stored": spec.stored.dump()}
    return _change(wanted, version=spec.version, step=spec.step, source=source, recovery=None, verify=verify, **kept)


def _stored(charge: WeightVersion) -> Stored | None:
    """The copy of the version before, which a trainer may have named a moment ago: the operator still hears of it.

    What stored said until now has been recorded: the operator has seen the spec that holds it.
    """
    spec, status = charge.spec, charge.status
    held = status.version == spec.version and status.phase in (Phase.VERIFYING, Phase.OPENING, Phase.ACTIVE)
    if spec.recovery is None or not held:
        return spec.stored
    return Stored(version=spec.version, checkpoint=spec.recovery.checkpoint)


def _change(found: WeightVersion, **spec: Any) -> dict[str, Any]:
    """A merge patch of the spec that holds only for the object as it was read."""
    metadata = found.metadata
    return {"metadata": {"resourceVersion": metadata.resource_version, "uid": metadata.uid}, "spec": spec}


def _too_late(scene: Scene, words: str) -> ConflictError:
    return ConflictError(f"{scene.place}: {ATTEMPTS} writes in a row were too late; the last answer: {words}")


def _write(cluster: Writer, scene: Scene, wanted: WeightVersion) -> WeightVersion:
    namespace = scene.fleet.metadata.namespace
    if scene.charge is not None:
        return cluster.patch_version(namespace, wanted.metadata.name, patch_of(wanted))
    spec = {"version": wanted.spec.version, "step": wanted.spec.step, "source": wanted.spec.source.dump()}
    spec |= _engine_ref(scene)
    return cluster.create_version(namespace, {"metadata": _new_name(scene), "spec": spec})


def _new_name(scene: Scene) -> dict[str, str]:
    metadata = scene.fleet.metadata
    return {"name": f"{metadata.name}-policy", "namespace": metadata.namespace}


def _engine_ref(scene: Scene) -> dict[str, Any]:
    return {"engineRef": {"name": scene.fleet.metadata.name}}


def _says(found: WeightVersion, wanted: WeightVersion) -> bool:
    theirs, ours = found.spec, wanted.spec
    return (theirs.version, theirs.step, theirs.source) == (ours.version, ours.step, ours.source)


def _under_way(scene: Scene, wanted: WeightVersion) -> int | None:
    """The version that the operator works on now, which this one takes over from."""
    charge = scene.charge
    if charge is None or charge.spec.version >= wanted.spec.version:
        return None
    known = charge.metadata.generation <= charge.status.observed_generation
    return None if known and charge.status.phase in ENDED else charge.spec.version


def _asked(scene: Scene, written: WeightVersion, *, created: bool, under_way: int | None) -> Asked:
    checkpoint = written.spec.source.checkpoint
    return Asked(
        namespace=scene.fleet.metadata.namespace,
        fleet=scene.fleet.metadata.name,
        weight_version=written.metadata.name,
        version=written.spec.version,
        checkpoint="" if checkpoint is None else checkpoint.path,
        step=written.spec.step,
        created=created,
        supersedes=under_way,
    )
