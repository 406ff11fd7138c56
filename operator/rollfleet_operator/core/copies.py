"""Stored copies of what a trainer sent: how they come into the commit and into the history.

While the spec asks for the version, spec.recovery names its copy. A trainer may raise the version a moment after it
has named one, before any operator has looked: for that the name stays in spec.stored, with the version that it is of.
It is written over only by one who has seen the status speak of a later spec, and that was written by an operator that
had seen this one: so no copy that was named is lost, however late an operator looks. status.stored tells which one was
seen, and is written after the commit that holds it.
"""

from dataclasses import replace

from rollfleet_operator.api.rolloutengine import Committed, Outcome
from rollfleet_operator.api.weightversion import HistoryEntry, Stored, WeightVersionStatus
from rollfleet_operator.core.moves import Update


def stored_since(update: Update) -> Committed | None:
    """The commit of what a trainer sent, with the copy that was named since; None where nothing is new."""
    committed = update.record.committed
    if committed is None or not update.pushed or not update.path or committed.checkpoint == update.path:
        return None
    return _read_again(update, committed, update.path)


def with_stored(update: Update) -> Update:
    """The commit of a version that the spec has left, with the copy that was named before.

    Once: a copy that was named by hand after an operator had seen this one has moved it.
    """
    committed, stored = update.record.committed, _stored(update)
    if committed is None or stored is None or stored == update.status.stored:
        return update
    ours = committed.weight_version_uid == update.weight_version.metadata.uid
    if not ours or not committed.version == stored.version < update.version:
        return update  # until the spec leaves the version, spec.recovery speaks of it
    path = stored.checkpoint.path
    if committed.checkpoint == path:
        return update
    found = _read_again(update, committed, path)
    return replace(update, record=replace(update.record, committed=found))


def name_stored(update: Update, committed: Committed | None, status: WeightVersionStatus) -> WeightVersionStatus:
    """The history names it too, and the status that it was seen.

    committed: as it is about to be written. What it should name and does not has not been looked at yet.
    """
    stored = _stored(update)
    if stored is None or stored == update.status.stored:
        return status
    path = stored.checkpoint.path
    if committed is None or committed.version < stored.version:
        return status  # spec.recovery speaks of it when it is committed
    ours = committed.weight_version_uid == update.weight_version.metadata.uid
    if ours and committed.version == stored.version and committed.checkpoint not in (path, update.path):
        return status
    seen = status.model_copy(update={"stored": stored})
    if stored.version == update.version:
        return seen
    return seen.model_copy(update={"history": _named(status, stored.version, path)})


def with_copy(status: WeightVersionStatus, version: int, path: str) -> WeightVersionStatus:
    """The record and its history name the copy, so that a rollback finds it."""
    return status.model_copy(update={"checkpoint": path, "history": _named(status, version, path)})


def _named(status: WeightVersionStatus, version: int, path: str) -> tuple[HistoryEntry, ...]:
    return tuple(
        entry.model_copy(update={"checkpoint": path})
        if (entry.version, entry.outcome) == (version, Outcome.ACTIVE)
        else entry
        for entry in status.history
    )


def _stored(update: Update) -> Stored | None:
    mounted = update.world.fleet.spec.volumes.checkpoints is not None
    return update.weight_version.spec.stored if mounted else None


def _read_again(update: Update, committed: Committed, path: str) -> Committed:
    update.work.note(f"version {committed.version} can be read again from {path!r}")
    return committed.model_copy(update={"checkpoint": path})
