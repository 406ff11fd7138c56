"""Carry out a decision: the fleet's status first (the fence), then actions, then WeightVersions, then Events."""

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from rollfleet_operator.api.meta import ANNOTATION_STOPPED, LABEL_SERVING, ObjectMeta
from rollfleet_operator.api.weightversion import PhaseSeconds, WeightVersion, WeightVersionStatus
from rollfleet_operator.clients.errors import AlreadyExists, Conflict, InvalidSpec, NotFound, RollfleetError
from rollfleet_operator.clients.events import Recorder
from rollfleet_operator.clients.ownership import demand_ours
from rollfleet_operator.clients.slots import FairSlots
from rollfleet_operator.core.actions import (
    Action,
    ApplyObject,
    CreatePod,
    Decision,
    DeleteObject,
    DeletePod,
    Event,
    GuardCall,
    LabelPod,
    StopPod,
    WeightVersionStatusWrite,
)
from rollfleet_operator.ports import (
    PODS,
    ROLLOUT_ENGINES,
    WEIGHT_VERSIONS,
    Cluster,
    Manifest,
    Meter,
    Resource,
    child_resource,
)
from rollfleet_operator.runtime.observe import Seen
from rollfleet_operator.runtime.records import Records
from rollfleet_operator.runtime.store import fleet_of

logger = logging.getLogger(__name__)

# Calls about pods at once, in all and of one fleet; the client's other connections stay for looks and status writes.
MAX_POD_CALLS, MAX_POD_CALLS_PER_FLEET = 64, 16
MAX_REBASES = 8  # of one status write
CALL_GRACE_S = 2.0  # that a pass waits for guards; those that are slower go on beside it, within their own deadline


@dataclass(frozen=True)
class _Work:
    """One decision on its way."""

    key: str
    namespace: str
    seen: Seen
    decision: Decision
    errors: list[RollfleetError]

    async def attempt(self, step: Awaitable[None]) -> None:
        """Do a step; its failure is kept and stops no other."""
        try:
            await step
        except RollfleetError as error:
            self.errors.append(error)


class Applier:
    """Writes only what differs."""

    def __init__(self, cluster: Cluster, recorder: Recorder, records: Records, meter: Meter) -> None:
        self._cluster = cluster
        self._recorder = recorder
        self._records = records
        self._meter = meter
        self._pod_calls = FairSlots(MAX_POD_CALLS, MAX_POD_CALLS_PER_FLEET)

    async def apply(self, key: str, seen: Seen, decision: Decision) -> list[RollfleetError]:
        """Carry it out. A failure of the fleet's status is raised and ends the pass; others are returned."""
        work = _Work(key, seen.observed.fleet.metadata.namespace, seen, decision, [])
        await self._write_fleet_status(work)
        await asyncio.gather(self._children(work), self._pods(work), self._guards(work))
        await asyncio.gather(
            *(work.attempt(self._write_weight_version(work, write)) for write in decision.weight_version_statuses)
        )
        self._recorder.record(work.namespace, seen.uids(), decision.events)
        return work.errors

    async def apply_orphan(self, manifest: Manifest, weight_version: WeightVersion, decision: Decision) -> None:
        """Tell a WeightVersion that its fleet does not exist."""
        metadata = weight_version.metadata
        for write in decision.weight_version_statuses:
            await self._replace_version(manifest, weight_version, write)
        uids = {(WEIGHT_VERSIONS.kind, metadata.name): metadata.uid}
        self._recorder.record(metadata.namespace, uids, decision.events)

    def report(self, fleet: ObjectMeta, errors: Iterable[RollfleetError]) -> None:
        """Say what the API server would not take, in its own words, where a person looks for it."""
        events = [Event(ROLLOUT_ENGINES.kind, fleet.name, "Warning", "ApplyFailed", str(error)) for error in errors]
        self._recorder.record(fleet.namespace, {(ROLLOUT_ENGINES.kind, fleet.name): fleet.uid}, events)

    async def _write_fleet_status(self, work: _Work) -> None:
        write, fleet = work.decision.fleet_status, work.seen.observed.fleet
        if write is None or write.status == fleet.status:
            return
        await self._replace_status(ROLLOUT_ENGINES, work.seen.fleet, write.status.dump())
        self._records.fleets.put(fleet.model_copy(update={"status": write.status}))

    async def _write_weight_version(self, work: _Work, write: WeightVersionStatusWrite) -> None:
        known = next(one for one in work.seen.observed.weight_versions if one.metadata.name == write.name)
        await self._replace_version(work.seen.weight_versions[write.name], known, write)

    async def _replace_version(self, manifest: Manifest, known: WeightVersion, write: WeightVersionStatusWrite) -> None:
        if write.status == known.status:
            return
        try:
            await self._replace_status(WEIGHT_VERSIONS, manifest, write.status.dump())
        except NotFound:  # deleted meanwhile: nobody to tell
            return
        self._measure(known.metadata.namespace, write.name, known.status, write.status)

    async def _replace_status(self, resource: Resource, manifest: Manifest, status: Manifest) -> None:
        """Write over exactly the spec and status that the decision was made on.

        A writer of labels and annotations moves the resourceVersion too, and must not be able to keep us from writing:
        where only such things have changed, the write is tried again on top of them, still with a resourceVersion.
        """
        base = manifest
        for _ in range(MAX_REBASES):
            try:
                await self._cluster.replace_status(resource, _with_status(base, status))
            except Conflict:
                metadata = base["metadata"]
                base = await self._cluster.get(resource, metadata["namespace"], metadata["name"])
                if _decided_on(base) == _decided_on(_with_status(manifest, status)):
                    return  # it was written, and the answer got lost: what follows of it is still to be told
                if _decided_on(base) != _decided_on(manifest):
                    raise
            else:
                return
        raise Conflict(f"{resource.kind} {manifest['metadata']['name']}: others write to it without a pause")

    def _measure(self, namespace: str, name: str, before: WeightVersionStatus, after: WeightVersionStatus) -> None:
        same_update = (before.version, before.attempt) == (after.version, after.attempt)
        for step in PhaseSeconds.model_fields:
            seconds = getattr(after.phase_seconds, step)
            if seconds and not (same_update and getattr(before.phase_seconds, step)):
                self._meter.update_phase(namespace, name, step, float(seconds))
        for entry in after.history:
            if entry not in before.history:
                self._meter.update_finished(namespace, name, entry.outcome.value)

    async def _children(self, work: _Work) -> None:
        """In their order: a RoleBinding is refused before its Role is there."""
        for action in work.decision.actions:
            if isinstance(action, ApplyObject):
                await work.attempt(self._apply_child(work, action))
            elif isinstance(action, DeleteObject):
                await work.attempt(self._delete_child(work, action))

    async def _apply_child(self, work: _Work, action: ApplyObject) -> None:
        manifest = action.manifest
        resource = child_resource(manifest["apiVersion"], manifest["kind"])
        with suppress(NotFound):
            found = await self._cluster.get(resource, work.namespace, manifest["metadata"]["name"])
            demand_ours(found, resource.kind, work.seen.observed.fleet.metadata)
        answer = await self._cluster.apply(resource, work.namespace, manifest)
        self._records.children.applied(work.key, action.content_hash, manifest, answer)

    async def _delete_child(self, work: _Work, action: DeleteObject) -> None:
        resource = child_resource(action.api_version, action.kind)
        with suppress(NotFound):
            await self._cluster.delete(resource, work.namespace, action.name)
        self._records.children.deleted(work.key, action.kind, action.name)

    async def _pods(self, work: _Work) -> None:
        async def one(step: Awaitable[None]) -> None:
            async with self._pod_calls.slot(work.key):
                await work.attempt(step)

        await asyncio.gather(*(one(step) for step in self._pod_steps(work)))

    def _pod_steps(self, work: _Work) -> list[Awaitable[None]]:
        steps: list[Awaitable[None]] = []
        for action in work.decision.actions:
            if isinstance(action, CreatePod):
                steps.append(self._create_pod(work, action))
            elif isinstance(action, DeletePod):
                steps.append(self._delete_pod(work, action))
            elif isinstance(action, StopPod):
                steps.append(self._stop_pod(work, action))
            elif isinstance(action, LabelPod):
                steps.append(self._label_pod(work, action))
        return steps

    async def _create_pod(self, work: _Work, action: CreatePod) -> None:
        try:
            pod = await self._cluster.create(PODS, work.namespace, action.manifest)
        except AlreadyExists:
            pod = await self._cluster.get(PODS, work.namespace, action.manifest["metadata"]["name"])
            if fleet_of(pod) is None:
                where = f"Pod {work.namespace}/{pod['metadata']['name']}"
                raise InvalidSpec(f"{where} has the name of an engine and is not the operator's: delete it") from None
        self._records.pods.upsert(pod)

    async def _delete_pod(self, work: _Work, action: DeletePod) -> None:
        delete = self._cluster.delete(PODS, work.namespace, action.name, action.uid)
        await self._on_pod(work.namespace, action.name, action.uid, delete)

    async def _stop_pod(self, work: _Work, action: StopPod) -> None:
        """A deadline that is over makes the kubelet end the pod and keep its containers' states and logs."""
        metadata = {"uid": action.uid, "annotations": {ANNOTATION_STOPPED: action.why}}
        patch = {"metadata": metadata, "spec": {"activeDeadlineSeconds": 1}}
        stop = self._cluster.merge_patch(PODS, work.namespace, action.name, patch)
        await self._on_pod(work.namespace, action.name, action.uid, stop)

    async def _label_pod(self, work: _Work, action: LabelPod) -> None:
        labels = {LABEL_SERVING: "true" if action.serving else None}
        patch = {"metadata": {"uid": action.uid, "labels": labels}}  # the uid is a precondition
        label = self._cluster.merge_patch(PODS, work.namespace, action.name, patch)
        await self._on_pod(work.namespace, action.name, action.uid, label)

    async def _on_pod(self, namespace: str, name: str, uid: str, call: Awaitable[Manifest]) -> None:
        """A call that means exactly this pod; the answer is newer than what the watch told."""
        try:
            answer = await call
        except NotFound:
            self._records.pods.remove(uid)
            return
        except Conflict:  # another pod of this name, or another writer: look
            answer = await self._cluster.get(PODS, namespace, name)
        if answer.get("kind") == PODS.kind and answer["metadata"]["uid"] == uid:
            self._records.pods.upsert(answer)
        else:
            self._records.pods.remove(uid)

    async def _guards(self, work: _Work) -> None:
        """All commands at once. Answers reach the views by themselves, and put the key into the queue."""
        calls = [action for action in work.decision.actions if isinstance(action, GuardCall)]
        tasks = {self._records.followers.give(work.key, call.pod_uid, call.command): call for call in calls}
        sent = [task for task in tasks if task is not None]
        if not sent:
            return
        done, _ = await asyncio.wait(sent, timeout=CALL_GRACE_S)
        for task in done:
            if not task.cancelled() and task.result() != "ok":
                call = tasks[task]
                logger.info("%s to %s: %s", type(call.command).__name__, call.pod, task.result())


def _decided_on(manifest: Manifest) -> tuple[object, ...]:
    """What a decision depends on, of the object whose status it writes."""
    metadata = manifest["metadata"]
    return metadata["uid"], metadata["generation"], "deletionTimestamp" in metadata, manifest.get("status") or {}


def _with_status(manifest: Manifest, status: Manifest) -> Manifest:
    """The object as it was read, with another status; managedFields are the API server's business."""
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "managedFields"}
    return manifest | {"metadata": metadata, "status": status}


def summary(action: Action) -> str:  # noqa: PLR0911 - one answer per case
    """An action in a few words, for the log."""
    if isinstance(action, ApplyObject):
        return f"Apply {action.manifest['kind']}/{action.manifest['metadata']['name']}"
    if isinstance(action, DeleteObject):
        return f"Delete {action.kind}/{action.name}"
    if isinstance(action, CreatePod):
        return f"CreatePod {action.manifest['metadata']['name']}"
    if isinstance(action, DeletePod):
        return f"DeletePod {action.name}: {action.why}"
    if isinstance(action, StopPod):
        return f"StopPod {action.name}: {action.why}"
    if isinstance(action, LabelPod):
        return f"LabelPod {action.name} serving={'true' if action.serving else 'absent'}"
    return f"{type(action.command).__name__} {action.pod} epoch={action.command.epoch}"
