"""What the parts of one operator share."""

from dataclasses import dataclass, field

from rollfleet_operator.clients.followers import Followers
from rollfleet_operator.runtime.queue import KeyedQueue
from rollfleet_operator.runtime.senders import SenderStore
from rollfleet_operator.runtime.store import ChildStore, FleetStore, PodStore
from rollfleet_operator.runtime.watchdog import WatchLedger


@dataclass(frozen=True)
class Records:
    """Memory of this process. All of it can be lost: everything is derived again from the API server and the guards."""

    queue: KeyedQueue
    followers: Followers
    pods: PodStore = field(default_factory=PodStore)
    fleets: FleetStore = field(default_factory=FleetStore)
    children: ChildStore = field(default_factory=ChildStore)
    senders: SenderStore = field(default_factory=SenderStore)
    ledger: WatchLedger = field(default_factory=WatchLedger)
    rejected: dict[str, str] = field(default_factory=dict)  # by key: what the API server refused in the newest pass

    async def stand_down(self) -> None:
        """Another process may act by now: what this one did, said and was told by guards is of yesterday.

        What the watches tell stays, and goes on.
        """
        self.queue.stop()
        await self.followers.close()
        self.fleets.clear()
        self.children.clear()
        self.rejected.clear()

    def forget(self, key: str) -> None:
        """The fleet is gone; the garbage collector takes its pods, and what no watch sees of them is over."""
        for view in self.pods.doubtful(key):
            self.pods.remove(view.uid)
        self.queue.forget(key)
        self.followers.forget(key)
        self.fleets.remove(key)
        self.children.forget(key)
        self.senders.forget(key)
        self.rejected.pop(key, None)
