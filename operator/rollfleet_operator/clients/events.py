"""Kubernetes Events about our objects, each said once.

The name of an Event follows from (uid, reason, message), so a restarted operator says nothing twice while the first
one is kept (an hour by default). A failure to record is logged and stops nothing.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import datetime

from rollfleet_operator.api.meta import API_VERSION
from rollfleet_operator.clients.errors import AlreadyExists, RollfleetError
from rollfleet_operator.core.actions import Event
from rollfleet_operator.ports import EVENTS, NAME_LENGTH, Cluster, Manifest

logger = logging.getLogger(__name__)

REMEMBERED = 4096
REMEMBERED_S = 3600.0  # what the API server keeps Events for by default
MAX_NOTE = 1024  # characters that events.k8s.io/v1 takes
MAX_AT_ONCE = 8
CONTROLLER = "rollfleet.io/operator"


class Recorder:
    """Records Events of decisions."""

    def __init__(self, cluster: Cluster, instance: str, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._instance = instance
        self._clock = clock
        self._said: OrderedDict[str, float] = OrderedDict()

    async def record(self, namespace: str, uids: dict[tuple[str, str], str], events: Sequence[Event]) -> None:
        """Record those that were not said before; `uids` by (kind, name) of the objects of this pass."""
        slots = asyncio.Semaphore(MAX_AT_ONCE)
        fresh = [(event, uids.get((event.kind, event.name), "")) for event in events]
        await asyncio.gather(
            *(self._one(slots, namespace, uid, event) for event, uid in fresh if self._is_fresh(_digest(uid, event)))
        )

    def _is_fresh(self, digest: str) -> bool:
        now = time.monotonic()
        said = self._said.get(digest)
        if said is not None and now - said < REMEMBERED_S:
            return False
        self._said[digest] = now
        self._said.move_to_end(digest)
        if len(self._said) > REMEMBERED:
            self._said.popitem(last=False)
        return True

    async def _one(self, slots: asyncio.Semaphore, namespace: str, uid: str, event: Event) -> None:
        manifest = self._manifest(namespace, uid, event)
        async with slots:
            try:
                await self._cluster.create(EVENTS, namespace, manifest)
            except AlreadyExists:
                return
            except RollfleetError as error:
                self._said.pop(_digest(uid, event), None)
                logger.warning(
                    "event %s on %s %s/%s was not recorded: %s", event.reason, event.kind, namespace, event.name, error
                )

    def _manifest(self, namespace: str, uid: str, event: Event) -> Manifest:
        suffix = "." + _digest(uid, event)[:16]
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": event.name[: NAME_LENGTH - len(suffix)] + suffix, "namespace": namespace},
            "eventTime": self._clock().strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance[:128],
            "action": "Reconcile",
            "type": event.type,
            "reason": event.reason,
            "note": event.message if len(event.message) <= MAX_NOTE else event.message[: MAX_NOTE - 1] + "…",
            "regarding": {
                "apiVersion": API_VERSION, "kind": event.kind, "namespace": namespace, "name": event.name, "uid": uid,
            },
        }  # fmt: skip


def _digest(uid: str, event: Event) -> str:
    return hashlib.sha256("\0".join((uid, event.reason, event.message)).encode()).hexdigest()
