"""The API server of the model: optimistic concurrency, and every way in which a write can go wrong."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from rollfleet_operator.api.rolloutengine import RolloutEngine, RolloutEngineStatus
from rollfleet_operator.api.weightversion import WeightVersion, WeightVersionStatus
from rollfleet_operator.clients.errors import Conflict, NotFound, Unreachable
from rollfleet_operator.core.observed import PodView
from tests.model.clock import Clock


@dataclass
class ApiFaults:
    """How likely what is, for each write."""

    conflict: float = 0.0
    lose_request: float = 0.0
    lose_answer: float = 0.0  # done, and nobody is told


@dataclass(frozen=True)
class Read:
    """The objects as one pass reads them, with their resourceVersions."""

    fleet: RolloutEngine
    fleet_version: int
    weight_versions: dict[str, tuple[WeightVersion, int]]
    present: bool = True  # else the fleet is what it was when it was deleted


PodWatch = Callable[[str, PodView | None], None]
Watch = Callable[[], None]


class ApiServer:
    """Objects, writes and watches."""

    def __init__(self, clock: Clock, rng: random.Random, fleet: RolloutEngine) -> None:
        self.faults = ApiFaults()
        self.down_until = -1.0
        self.fleet = fleet
        self.fleet_version = 1
        self.fleet_present = True
        self.weight_versions: dict[str, tuple[WeightVersion, int]] = {}
        self.pods: dict[str, PodView] = {}
        self.owners: dict[str, str] = {}  # pod uid -> uid of the RolloutEngine
        self.writes = 0
        self._revision = 0  # never used twice, also not for another object of the same name
        self.counts: dict[str, int] = {}
        self.watches: list[Watch] = []
        self.pod_watches: list[PodWatch] = []
        self.on_fleet_gone: Callable[[], None] = lambda: None
        self.on_fleet_status: Callable[[RolloutEngineStatus, RolloutEngineStatus], None] = lambda _, __: None
        self.on_weight_status: Callable[[WeightVersion, WeightVersionStatus], None] = lambda _, __: None
        self._clock = clock
        self._rng = rng

    @property
    def down(self) -> bool:
        """Whether it answers nobody."""
        return self._clock.time < self.down_until

    def read(self) -> Read:
        """The fleet and its WeightVersions, from quorum."""
        self.demand_up()
        return Read(self.fleet, self.fleet_version, dict(self.weight_versions), self.fleet_present)

    def demand_up(self) -> None:
        """Raise where it is not."""
        if self.down:
            raise Unreachable("the API server does not answer")

    def _before(self) -> None:
        self.demand_up()
        luck, faults = self._rng.random(), self.faults
        if luck < faults.lose_request:
            self._count("api request lost")
            raise Unreachable("the request was lost")
        if luck < faults.lose_request + faults.conflict:
            self._count("api conflict")
            raise Conflict("somebody else wrote first")

    def _after(self) -> None:
        if self._rng.random() < self.faults.lose_answer:
            self._count("api answer lost")
            raise Unreachable("no answer within the deadline")

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def replace_fleet_status(self, version: int, status: RolloutEngineStatus) -> None:
        """With the resourceVersion that was read."""
        self._before()
        if not self.fleet_present:
            raise NotFound("the RolloutEngine is gone")
        if version != self.fleet_version:
            raise Conflict("the RolloutEngine was changed since")
        before = self.fleet.status
        told = RolloutEngineStatus.model_validate(status.dump())
        self.writes += 1
        self.put_fleet(self.fleet.model_copy(update={"status": told}))
        self.on_fleet_status(before, told)
        self._after()

    def replace_weight_status(self, name: str, version: int, status: WeightVersionStatus) -> None:
        """With the resourceVersion that was read."""
        self._before()
        if name not in self.weight_versions:
            raise NotFound(name)
        known, present = self.weight_versions[name]
        if version != present:
            raise Conflict("the WeightVersion was changed since")
        told = WeightVersionStatus.model_validate(status.dump())
        self.writes += 1
        self.put_weight_version(known.model_copy(update={"status": told}))
        self.on_weight_status(known, told)
        self._after()

    def put_fleet(self, fleet: RolloutEngine) -> None:
        """Whoever writes it."""
        self.fleet, self.fleet_version = fleet, self.fleet_version + 1
        self._tell()

    def remove_fleet(self) -> None:
        """Deleted; what it owns is collected by and by."""
        self.fleet_present = False
        self.fleet_version += 1
        self.on_fleet_gone()
        self._tell()

    def make_fleet_again(self, fleet: RolloutEngine) -> None:
        """Another one of the same name."""
        self.fleet_present = True
        self.put_fleet(fleet)

    def put_weight_version(self, weight_version: WeightVersion) -> None:
        """Whoever writes it."""
        name = weight_version.metadata.name
        self._revision += 1
        self.weight_versions[name] = (weight_version, self._revision)
        self._tell()

    def remove_weight_version(self, name: str) -> None:
        """Deleted."""
        if self.weight_versions.pop(name, None) is not None:
            self._tell()

    def _tell(self) -> None:
        for watch in self.watches:
            watch()

    def put_pod(self, view: PodView) -> None:
        """Create it, or change what is said of it."""
        if self.pods.get(view.uid) != view:
            self.pods[view.uid] = view
            self._tell_pod(view.uid)

    def change_pod(self, uid: str, **changes: object) -> None:
        """Change what is said of a pod that is there."""
        if uid in self.pods:
            self.put_pod(replace(self.pods[uid], **changes))  # type: ignore[arg-type]

    def remove_pod(self, uid: str) -> None:
        """The object is gone."""
        if self.pods.pop(uid, None) is not None:
            self._tell_pod(uid)

    def _tell_pod(self, uid: str) -> None:
        for watch in self.pod_watches:
            watch(uid, self.pods.get(uid))

    def write_lease(self, act: Callable[[], None]) -> None:
        """Over a connection of its own, through the same weather. No write of the fleet's."""
        self._before()
        act()
        self._after()

    def write_pod(self, act: Callable[[], None]) -> None:
        """A create, delete or patch by an operator."""
        self._before()
        self.writes += 1
        act()
        self._after()
