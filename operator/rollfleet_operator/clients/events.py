"""Kubernetes Events about our objects, each said once.

The name of an Event follows from (uid, reason, message), so a restarted operator says nothing twice while the first
one is kept (an hour by default). A failure to record is logged and stops nothing.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rollfleet_operator.api.meta import API_VERSION
from rollfleet_operator.clients.ending import end_if_asked
from rollfleet_operator.clients.errors import AlreadyExists, RollfleetError, Terminating
from rollfleet_operator.core.actions import Event
from rollfleet_operator.ports import EVENTS, NAME_LENGTH, Cluster, Manifest

logger = logging.getLogger(__name__)

REMEMBERED = 4096
REMEMBERED_S = 3600.0  # what the API server keeps Events for by default
MAX_NOTE = 1024  # characters that events.k8s.io/v1 takes
MAX_WAITING = 1024
MAX_WAITING_OF_ONE = 64  # object: one that has much to say leaves room for the others
WRITERS = 4
CONTROLLER = "rollfleet.io/operator"


@dataclass(frozen=True)
class _Said:
    namespace: str
    uid: str
    event: Event


class Recorder:
    """Records Events beside the passes, which wait for none of them."""

    def __init__(self, cluster: Cluster, instance: str, clock: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._instance = instance
        self._clock = clock
        self._said: OrderedDict[str, float] = OrderedDict()
        self._waiting: asyncio.Queue[_Said] = asyncio.Queue(MAX_WAITING)
        self._waiting_of: Counter[str] = Counter()  # by uid

    def record(self, namespace: str, uids: dict[tuple[str, str], str], events: Sequence[Event]) -> None:
        """Record those that were not said before; `uids` by (kind, name) of the objects of this pass."""
        for event in events:
            said = _Said(namespace, uids.get((event.kind, event.name), ""), event)
            if self._waiting.full() or self._waiting_of[said.uid] >= MAX_WAITING_OF_ONE:
                logger.warning("too many events wait; %s on %s %s is dropped", event.reason, event.kind, event.name)
            elif self._is_fresh(_digest(said)):
                self._waiting.put_nowait(said)
                self._waiting_of[said.uid] += 1

    async def run(self) -> None:
        """Write what was recorded, until cancelled. Several may run at once."""
        while True:
            end_if_asked()
            said = await self._waiting.get()
            self._waiting_of[said.uid] -= 1
            if not self._waiting_of[said.uid]:
                del self._waiting_of[said.uid]
            try:
                await self._write(said)
            finally:
                self._waiting.task_done()

    async def drain(self) -> None:
        """Wait until everything recorded so far is written."""
        await self._waiting.join()

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

    async def _write(self, said: _Said) -> None:
        event = said.event
        try:
            await self._cluster.create(EVENTS, said.namespace, self._manifest(said))
        except (AlreadyExists, Terminating):
            return
        except RollfleetError as error:
            self._said.pop(_digest(said), None)
            where = f"{event.kind} {said.namespace}/{event.name}"
            logger.warning("event %s on %s was not recorded: %s", event.reason, where, error)

    def _manifest(self, said: _Said) -> Manifest:
        event, namespace, uid = said.event, said.namespace, said.uid
        suffix = "." + _digest(said)[:16]
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": event.name[: NAME_LENGTH - len(suffix)].rstrip("-.") + suffix, "namespace": namespace},
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


def _digest(said: _Said) -> str:
    return hashlib.sha256("\0".join((said.uid, said.event.reason, said.event.message)).encode()).hexdigest()
