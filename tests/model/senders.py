"""The Lease of a fleet's trainers in the model's API server, and what an operator knows of it.

Its judgement is the operator's own store of Leases; what it is told comes late, and not at all while its watch is dead.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.api.weightversion import WeightVersion
from rollfleet_operator.clients.errors import Conflict, NotFound
from rollfleet_operator.core.observed import SenderView
from rollfleet_operator.runtime.observe import _awaits_sender
from rollfleet_operator.runtime.senders import SenderStore
from rollfleet_operator.runtime.store import key_of
from rollfleet_protocol.senders import OFFERS_ANNOTATION
from tests.model.api_server import ApiServer
from tests.model.clock import Clock
from tests.support.builders import FLEET, NAMESPACE

Manifest = dict[str, Any]
KEY = key_of(NAMESPACE, FLEET)
ACCOUNTS = {"grpo": "account-1", "ppo": "account-2"}


@dataclass(frozen=True)
class Entry:
    """What the Lease said from a time on."""

    at: float
    holder: str
    offers: str


class SenderLease:
    """The object. Its versions are never used twice, also not for one that is made again."""

    def __init__(self, clock: Clock, api: ApiServer) -> None:
        self.manifest: Manifest | None = None
        self.history: list[Entry] = []  # of each write
        self.watches: list[Callable[[Manifest, bool], None]] = []
        self.accounts = dict(ACCOUNTS)  # uid by name, of the ServiceAccounts that there are
        self._clock = clock
        self._api = api
        self._revision = 0

    def make(self, manifest: Manifest) -> None:
        """The operator applies it: what a trainer wrote there stays."""
        if self.manifest is None:
            self._put({"metadata": dict(manifest["metadata"]), "spec": {}})

    def remove(self) -> None:
        """With its fleet, or with spec.trainers."""
        gone, self.manifest = self.manifest, None
        if gone is not None:
            self._revision += 1
            self._tell(self._stamped(gone), deleted=True)

    def read(self) -> Manifest:
        """As it is."""
        self._api.demand_up()
        if self.manifest is None:
            raise NotFound("there is no Lease")
        return self.manifest

    def patch(self, patch: Manifest) -> None:
        """A merge patch over exactly what was read."""
        known = self.manifest
        if known is None:
            raise NotFound("there is no Lease")
        if patch["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            raise Conflict("somebody else wrote first")
        metadata = known["metadata"]
        told = {**(metadata.get("annotations") or {}), **patch["metadata"]["annotations"]}
        annotations = {name: value for name, value in told.items() if value is not None}
        self._put({"metadata": metadata | {"annotations": annotations}, "spec": known["spec"] | patch["spec"]})

    def _put(self, manifest: Manifest) -> None:
        self._revision += 1
        self.manifest = self._stamped(manifest)
        offers = (self.manifest["metadata"].get("annotations") or {}).get(OFFERS_ANNOTATION, "")
        holder = self.manifest["spec"].get("holderIdentity") or ""
        self.history.append(Entry(self._clock.time, holder, offers))
        self._tell(self.manifest, deleted=False)

    def _stamped(self, manifest: Manifest) -> Manifest:
        return manifest | {"metadata": manifest["metadata"] | {"resourceVersion": str(self._revision)}}

    def _tell(self, manifest: Manifest, *, deleted: bool) -> None:
        for watch in self.watches:
            watch(manifest, deleted)


class SenderWatch:
    """What one term of an operator knows. `later` calls back only as long as that lasts."""

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        lease: SenderLease,
        later: Callable[[float, Callable[[], None]], None],
        on_news: Callable[[], None],
    ) -> None:
        self._store = SenderStore(clock.now)
        self._clock = clock
        self._rng = rng
        self._lease = lease
        self._later = later
        self._on_news = on_news
        self._newest = -1.0  # when the last of what is on its way arrives

    def list(self) -> None:
        """The first list is from quorum."""
        if self._lease.manifest is not None:
            self._store.told(self._lease.manifest)

    def hear(self, manifest: Manifest, deleted: bool, lag_s: float, deaf_until: float) -> None:
        """In order, as late as the watch is."""
        when = max(self._clock.time + self._rng.uniform(0.0, lag_s), deaf_until, self._newest)
        self._newest = when

        def arrive() -> None:
            if self._store.told(manifest, deleted=deleted) is not None:
                self._on_news()

        self._later(when - self._clock.time, arrive)

    def look(self, fleet: RolloutEngine, weight_versions: tuple[WeightVersion, ...]) -> SenderView:
        """As the runtime looks at it: nobody is called gone before the Lease itself was read."""
        store = self._store
        if not fleet.spec.trainers or not any(_awaits_sender(each) for each in weight_versions):
            return store.view(KEY)
        if store.is_stale(KEY):
            try:
                store.told(self._lease.read())
            except NotFound:
                store.forget(KEY)
        view = store.view(KEY)
        if view.holder and not view.uid:
            store.identified(KEY, view.holder, self._lease.accounts.get(view.account, ""))
        return store.view(KEY)
