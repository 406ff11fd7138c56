"""Proof that the process still sees and works: what /healthz answers.

A watch is proved end to end, whatever framework runs it: an object that a list shows at a revision which no event told
of must be told of soon, else the watch is deaf. One that stays deaf when it was started anew is a reason to restart the
process. An API server that does not answer is none.
"""

import asyncio
import time
from dataclasses import dataclass

from rollfleet_operator.ports import Manifest, Resource
from rollfleet_operator.runtime.store import revision

HEARTBEAT_S = 1.0
MAX_HEARTBEAT_AGE_S = 15.0
MAX_PASS_S = 180.0  # a pass has a deadline of its own far below
EVENT_GRACE_S = 20.0  # after which a watch is deaf
DEAD_WATCH_S = 180.0  # after which nothing in this process has cured it
MAX_EXPECTED = 10_000


@dataclass(frozen=True)
class _Expected:
    revision: int
    namespace: str
    since: float


class WatchLedger:
    """Objects that a list showed and that the watch has yet to tell of."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, int]] = {}  # plural -> uid -> revision
        self._expected: dict[str, dict[str, _Expected]] = {}

    def told(self, resource: Resource, manifest: Manifest, *, deleted: bool = False) -> None:
        """An event came."""
        uid, seen = manifest["metadata"]["uid"], revision(manifest)
        told, expected = self._told.setdefault(resource.plural, {}), self._expected.setdefault(resource.plural, {})
        if deleted:
            told.pop(uid, None)
            expected.pop(uid, None)
            return
        told[uid] = max(seen, told.get(uid, 0))
        if uid in expected and seen >= expected[uid].revision:
            del expected[uid]

    def listed(self, resource: Resource, namespace: str | None, items: tuple[Manifest, ...]) -> None:
        """A list was read: what it shows must have been told, or be told within the grace."""
        told, expected = self._told.setdefault(resource.plural, {}), self._expected.setdefault(resource.plural, {})
        now = time.monotonic()
        present = {item["metadata"]["uid"] for item in items}
        for item in items:
            uid, seen = item["metadata"]["uid"], revision(item)
            if seen > told.get(uid, 0) and uid not in expected and len(expected) < MAX_EXPECTED:
                expected[uid] = _Expected(seen, item["metadata"]["namespace"], now)
        for uid, waited in list(expected.items()):  # what no list shows any more needs no telling
            if uid not in present and namespace in (None, waited.namespace):
                del expected[uid]

    def overdue(self, grace_s: float = EVENT_GRACE_S) -> str | None:
        """Which watch is deaf."""
        now = time.monotonic()
        for plural, expected in self._expected.items():
            late = [uid for uid, waited in expected.items() if now - waited.since > grace_s]
            if late:
                return f"the watch on {plural} has not told of {len(late)} changes for more than {grace_s:.0f} s"
        return None


class Watchdog:
    """Gathers the signs of life."""

    def __init__(self, ledger: WatchLedger, max_list_age_s: float) -> None:
        self.ledger = ledger
        self._max_list_age_s = max_list_age_s
        self._beat = time.monotonic()
        self._listed = time.monotonic()

    async def beat(self) -> None:
        """Prove that the loop turns, until cancelled."""
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(HEARTBEAT_S)

    def listed(self) -> None:
        """A resync succeeded, or the API server does not answer, which no restart of ours would cure."""
        self._listed = time.monotonic()

    def problems(self, longest_pass_s: float) -> list[str]:
        """Why the process should be restarted; empty while all is well."""
        now = time.monotonic()
        found = []
        if now - self._beat > MAX_HEARTBEAT_AGE_S:
            found.append(f"the event loop has not turned for {now - self._beat:.0f} s")
        if now - self._listed > self._max_list_age_s:
            found.append(f"the last whole list of objects is {now - self._listed:.0f} s old")
        if longest_pass_s > MAX_PASS_S:
            found.append(f"a pass has been running for {longest_pass_s:.0f} s")
        dead = self.ledger.overdue(DEAD_WATCH_S)
        return [*found, dead] if dead else found
