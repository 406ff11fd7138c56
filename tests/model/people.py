"""What people do to the objects: ask, retry, delete, make again, scale, change, and break checkpoints."""

from collections.abc import Callable
from dataclasses import replace

from rollfleet_operator.api.launch import TrainerRef
from rollfleet_operator.api.meta import ObjectMeta
from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.api.weightversion import Checkpoint, Phase, Recovery, SourceType, Stored, WeightVersion
from rollfleet_operator.core.accept import in_charge
from rollfleet_operator.core.ending import UNDER_WAY
from rollfleet_protocol.state import FailureReason
from tests.model.api_server import ApiServer
from tests.model.asks import PLAIN, Ask, ask_of
from tests.model.clock import Clock
from tests.model.nodes import Nodes
from tests.model.promises import Auditor
from tests.model.schedule import Happening
from tests.support.builders import FLEET_UID, WEIGHT_VERSION, make_weight_version
from tests.support.simulated_engine import fault

HELD = (Phase.VERIFYING, Phase.OPENING, Phase.ACTIVE)
HALF_WRITTEN = fault(FailureReason.CHECKPOINT_INCOMPLETE, "half-written")


class People:
    """Their hands."""

    def __init__(self, clock: Clock, api: ApiServer, nodes: Nodes, auditor: Auditor) -> None:
        self.newest = 0  # highest version that was ever asked for
        self.on_asked: Callable[[], None] = lambda: None
        self._clock = clock
        self._api = api
        self._nodes = nodes
        self._auditor = auditor
        self._created = 0
        self._fleets = 0
        self._listed: tuple[TrainerRef, ...] = ()  # who may push again later

    # objects --------------------------------------------------------------------------------------------------------

    @property
    def charge(self) -> WeightVersion | None:
        """The WeightVersion that leads the fleet."""
        present = tuple(weight_version for weight_version, _ in self._api.weight_versions.values())
        return in_charge(present, self._auditor.book.committed)

    def ask(self, version: int, path: str = "", ask: Ask = PLAIN, *, same_name: bool = False) -> None:
        """kubectl apply: raise the version, or create the object."""
        self.newest = max(self.newest, version)
        known = self.charge
        spec: dict[str, object] = {"path": path or None, **ask.fields()}
        if known is None:
            self._created += 1
            name = WEIGHT_VERSION if same_name else f"{WEIGHT_VERSION}-{self._created}"
            uid = f"wv-uid-{self._created}"
            wanted = make_weight_version(version, name=name, uid=uid, created=self._clock.second(), **spec)
        else:
            if version <= known.spec.version:
                return  # the API server's rule
            meta = known.metadata.model_copy(update={"generation": known.metadata.generation + 1})
            wanted = make_weight_version(version, stored=known.spec.stored, **spec)
            wanted = wanted.model_copy(update={"status": known.status, "metadata": meta})
        self._put(wanted)

    def _saw_in_update(self, what: str) -> None:
        charge = self.charge
        if charge is not None and charge.status.phase in UNDER_WAY:
            self._auditor.saw(f"{what} in mid-update")

    def _put(self, wanted: WeightVersion) -> None:
        self._auditor.asked(wanted)
        self._api.put_weight_version(wanted)
        self.on_asked()

    def _ask_of(self, blow: Happening, *, rolls: bool = False) -> Ask:
        return ask_of(blow.luck, self._api.fleet.spec.replicas, rolls=rolls)

    def bump(self, blow: Happening) -> None:
        """A higher version; every third time to a step that was used before, as a rollback by hand is."""
        version = self.newest + 1
        path = f"step-{max(1, version - 2)}" if blow.who % 3 == 2 and version > 2 else ""
        self.ask(version, path, self._ask_of(blow))

    def roll(self, blow: Happening) -> None:
        """A higher version, batch by batch."""
        self.ask(self.newest + 1, "", self._ask_of(blow, rolls=True))

    def push(self, blow: Happening) -> None:
        """A higher version, which a trainer sends; every fourth one is to be stored as well."""
        copy = f"copy-{self.newest + 1}" if blow.who % 4 == 3 else ""
        self.ask(self.newest + 1, "", replace(self._ask_of(blow), pushed=True, copy=copy))

    def name_copy(self, blow: Happening) -> None:
        """The checkpoint of what was pushed is named: as it is, with other weights in it, or not there yet.

        Every second time the next version is asked for at once.
        """
        known, committed = self.charge, self._auditor.book.committed
        if known is None or known.spec.source.type is not SourceType.TRAINER:
            return
        path = f"copy-{known.spec.version}-{blow.who}"
        if committed is not None and committed.digest is not None and blow.luck % 3:
            self._nodes.shelf.changed[path] = committed.digest
        if blow.luck % 3 == 1:
            self._break(path, blow.seconds)
        found: dict[str, object] = {"recovery": Recovery(checkpoint=Checkpoint(path=path))}
        if known.status.version == known.spec.version and known.status.phase in HELD:  # as publish does
            found["stored"] = Stored(version=known.spec.version, checkpoint=Checkpoint(path=path))
        spec = known.spec.model_copy(update=found)
        meta = known.metadata.model_copy(update={"generation": known.metadata.generation + 1})
        self._put(known.model_copy(update={"spec": spec, "metadata": meta}))
        if blow.who % 2:
            self.push(blow)

    def bump_to_broken(self, blow: Happening) -> None:
        """Half-written, and whole after a while."""
        version = self.newest + 1
        self._break(f"step-{version}", blow.seconds)
        self.ask(version, "", self._ask_of(blow))

    def retry(self, blow: Happening) -> None:
        """rollfleet retry."""
        known = self.charge
        if known is not None:
            spec = known.spec.model_copy(update={"retry_request": f"{self._clock.time:g}"})
            meta = known.metadata.model_copy(update={"generation": known.metadata.generation + 1})
            self._put(known.model_copy(update={"spec": spec, "metadata": meta}))

    def delete_version(self, blow: Happening) -> None:
        """In mid-update or not."""
        known = self.charge
        if known is not None:
            self._saw_in_update("version: deleted")
            self._auditor.deleted(known)
            self._api.remove_weight_version(known.metadata.name)

    def create_version_again(self, blow: Happening) -> None:
        """Another object, at a lower, the same or a higher version than before, of another step, or of another name."""
        self.delete_version(blow)
        version = max(1, self.newest + (blow.who % 3) - 1)
        path = f"step-{version + 1}" if blow.luck % 2 else ""
        self.ask(version, path, self._ask_of(blow), same_name=blow.luck % 3 > 0)

    def scale(self, blow: Happening) -> None:
        """Up or down, to none as well."""
        self.scale_to(blow.who % 5)

    def scale_to(self, replicas: int) -> None:
        """kubectl scale."""
        spec = self._api.fleet.spec.model_copy(update={"replicas": replicas})
        self._api.put_fleet(self._api.fleet.model_copy(update={"spec": spec, "metadata": self._next_generation()}))
        self.on_asked()

    def change_template(self, blow: Happening) -> None:
        """Another image."""
        image = f"registry.example/engine:{self._api.fleet.metadata.generation + 1}"
        spec = self._api.fleet.spec.model_copy(update={"image": image})
        self._api.put_fleet(self._api.fleet.model_copy(update={"spec": spec, "metadata": self._next_generation()}))

    def trainers_off(self, blow: Happening) -> None:
        """Nobody of the fleet's trainers may push for a while."""
        listed = self._api.fleet.spec.trainers
        if listed and not self._listed:
            self._listed = listed
            self._set_trainers((TrainerRef(service_account_name="somebody-else"),))
            self._clock.later(blow.seconds, self.trainers_on)

    def trainers_on(self) -> None:
        """They may again."""
        if self._listed:
            listed, self._listed = self._listed, ()
            self._set_trainers(listed)

    def _set_trainers(self, listed: tuple[TrainerRef, ...]) -> None:
        spec = self._api.fleet.spec.model_copy(update={"trainers": listed})
        self._api.put_fleet(self._api.fleet.model_copy(update={"spec": spec, "metadata": self._next_generation()}))

    def _next_generation(self) -> ObjectMeta:
        meta = self._api.fleet.metadata
        return meta.model_copy(update={"generation": meta.generation + 1})

    def lose_status(self, blow: Happening) -> None:
        """The object was restored without its status."""
        self._auditor.status_lost()
        self._api.put_fleet(self._api.fleet.model_copy(update={"status": RolloutEngineStatus()}))

    def delete_fleet(self, blow: Happening) -> None:
        """And make it again, soon or a while later: another uid, and nothing is known of the one before."""
        if self._api.fleet_present:
            self._saw_in_update("fleet: made again")
            self._auditor.fleet_made("")
            self._api.remove_fleet()
            self._clock.later(blow.seconds / 10, self._make_fleet_again)

    def _make_fleet_again(self) -> None:
        self._fleets += 1
        uid = f"{FLEET_UID}-{self._fleets}"
        made = {"uid": uid, "generation": 1, "creation_timestamp": self._clock.second()}
        old = self._api.fleet
        fresh = {"metadata": old.metadata.model_copy(update=made), "status": RolloutEngineStatus()}
        self._auditor.fleet_made(uid)
        self._api.make_fleet_again(old.model_copy(update=fresh))
        self.on_asked()

    # checkpoints ----------------------------------------------------------------------------------------------------

    def _break(self, path: str, seconds: float) -> None:
        self._nodes.shelf.faults[path] = HALF_WRITTEN
        self._clock.later(seconds, lambda: self._nodes.shelf.faults.pop(path, None))

    def break_checkpoint(self, blow: Happening) -> None:
        """The committed one, or the one that is asked for, vanishes for a while."""
        self._break(f"step-{max(1, self.newest - blow.who % 2)}", blow.seconds)

    def change_checkpoint(self, blow: Happening) -> None:
        """Somebody writes over it."""
        path = f"step-{max(1, self.newest - blow.who % 2)}"
        self._nodes.shelf.changed[path] = f"sha256:{path}/changed-{self._clock.time:g}"
