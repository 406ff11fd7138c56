"""What a pass sees, put together: each pod with its guard, and what can be said for certain about both.

Two questions matter most. May this engine be open? Only the API server's word that no process runs, a person's that
its node is switched off, or the guard's own under the epoch that counts, answers no. Which epoch counts? The highest
that anybody names, leaving out absurd ones.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cached_property

from rollfleet_operator.api.meta import POD_NAME
from rollfleet_operator.api.rolloutengine import Committed, RolloutEngine
from rollfleet_operator.core.observed import GuardView, NodeView, Observed, PodView, SenderView, Settings
from rollfleet_operator.core.policies import MAX_EPOCH, MAX_EPOCH_JUMP
from rollfleet_protocol.refusals import ClosedReason
from rollfleet_protocol.state import EngineState, Gate, Operation, OperationStatus, WeightsState

# Guards reopen by themselves only what was open, on untouched verified weights (closed reason Updating).
NEVER_REOPENS = tuple(
    reason.value
    for reason in (
        *(ClosedReason.STARTING, ClosedReason.UNCERTAIN, ClosedReason.DRAINING, ClosedReason.ENGINE_DEAD),
        *(ClosedReason.ASLEEP, ClosedReason.WEIGHTS_ABSENT),
    )
)
FIRST_EPOCH = 1  # a fleet's first verification; updates use higher ones


class Fence(StrEnum):
    """How certain it is that an engine answers nobody until this epoch says so."""

    HELD = "Held"  # no process, or closed and drained under this epoch, and armed or unable to reopen by itself
    CLOSED = "Closed"  # closed and drained under this epoch, not armed
    LOOSE = "Loose"  # reachable, and open, draining or under an older epoch
    UNKNOWN = "Unknown"  # may be open, and does not answer


@dataclass(frozen=True)
class Engine:
    """A pod with its guard. Of an engine of several pods it is the one that leads: only that one answers anybody."""

    pod: PodView
    guard: GuardView | None
    ordinal: int
    quarantined: bool = False
    node: NodeView | None = None  # None: nobody looked, or nothing hangs on it
    peers: tuple[PodView, ...] = ()  # the engine's other pods, by node and age

    @property
    def name(self) -> str:
        """The pod's."""
        return self.pod.name

    @property
    def state(self) -> EngineState | None:
        """What the guard told last, whether it answers now or not."""
        return None if self.guard is None else self.guard.state

    @property
    def tried(self) -> bool:
        """Whether this operator has heard of the guard, or tried to."""
        return self.guard is not None and (self.guard.state is not None or bool(self.guard.error))

    @property
    def disowned(self) -> bool:
        """The guard obeys another operator: its pod was made before our ServiceAccount was, and stays as it is."""
        return self.guard is not None and self.guard.disowned

    @property
    def unguarded(self) -> bool:
        """It lets everybody in: whatever it says, it may be open, and nothing of ours opens it."""
        return self.guard is not None and self.guard.unguarded

    @property
    def ended(self) -> bool:
        """The pod is over by the kubelet's word."""
        return self.pod.ended

    @property
    def node_off(self) -> bool:
        """A person says, by the out-of-service taint, that the pod's node is switched off.

        Of a node that is Ready again the taint was left over: engines that tolerate it are started there anew.
        """
        return self.node is not None and self.node.out_of_service and self.node.ready_since is None

    @property
    def stopped(self) -> bool:
        """By the API server's or a person's word, no process runs in which a guard could ever have been opened."""
        if self.pod.vanished:
            return False  # core.vanished says when it is let go
        return self.node_off or self.pod.halted

    @property
    def answering(self) -> EngineState | None:
        """The guard's state, if it answers now."""
        if self.guard is None or not self.guard.reachable or self.ended:
            return None
        return self.guard.state

    @property
    def usable(self) -> EngineState | None:
        """The state of an engine that can take part: it answers, lives, stays, and follows our epochs."""
        state = self.answering
        if state is None or not state.alive or self.quarantined:
            return None
        return None if self.pod.deleting or self.pod.vanished else state

    @property
    def open(self) -> bool:
        """The guard says that it admits requests."""
        state = self.answering
        return state is not None and state.gate is Gate.OPEN

    @property
    def settled(self) -> bool:
        """The kubelet confirms that the engine came up: before that nothing is ever opened, see `stopped`."""
        return self.pod.started and self.pod.phase == "Running"

    def serves(self, committed: Committed | None) -> bool:
        """Whether it answers from the committed version, or, while the fleet rolls, from the one before."""
        state = self.usable
        if state is None or state.gate is not Gate.OPEN:
            return False
        return holds(state, committed) or holds_previous(state, committed)

    def fence(self, epoch: int) -> Fence:
        """How certain it is that this engine stays closed under the epoch."""
        state = self.answering
        if self.stopped and (state is None or _never_reopens(state)):
            return Fence.HELD
        if state is None:
            # Once armed under this epoch only we open it, and nobody does before the commit.
            held = self.state is not None and (_armed(self.state, epoch) or drained(self.state))
            return Fence.HELD if held else Fence.UNKNOWN
        if state.gate is Gate.OPEN or state.in_flight > 0:
            return Fence.LOOSE
        # That its pod is being deleted says less than that it drains: the hook may not have come to it.
        if drained(state):
            return Fence.HELD
        stays_closed = refuses_for_good(state)
        refuses_all = self.quarantined and state.epoch > epoch and stays_closed  # whatever we sent in our lives
        if state.epoch != epoch and not refuses_all:
            return Fence.LOOSE
        return Fence.HELD if stays_closed else Fence.CLOSED

    def running(self) -> Operation | None:
        """The operation that the guard works on now."""
        state = self.state
        operation = None if state is None else state.operation
        return operation if operation is not None and operation.status is OperationStatus.RUNNING else None


def _never_reopens(state: EngineState) -> bool:
    return state.gate is Gate.CLOSED and state.closed_reason in NEVER_REOPENS


def _armed(state: EngineState, epoch: int) -> bool:
    return state.epoch == epoch and state.armed and state.gate is Gate.CLOSED and state.in_flight == 0


def drained(state: EngineState) -> bool:
    """The engine is ending and answers nobody: a draining guard never opens again, and its successor is born closed."""
    draining = state.gate is Gate.CLOSED and state.closed_reason == ClosedReason.DRAINING.value
    return draining and state.in_flight == 0


def refuses_for_good(state: EngineState) -> bool:
    """Closed, and only a command of the epoch that it names, or a later one, opens it."""
    return state.gate is Gate.CLOSED and (state.armed or _never_reopens(state))


def holds(state: EngineState, committed: Committed | None) -> bool:
    """Whether the weights are verified as the committed ones. Version 0 has no digest unless it was reloaded."""
    return committed is not None and _is_verified_at(state, committed.version, committed.digest)


def holds_previous(state: EngineState, committed: Committed | None) -> bool:
    """Whether the weights are verified as those that the fleet is rolling away from."""
    previous = None if committed is None else committed.previous
    return previous is not None and _is_verified_at(state, previous.version, previous.digest)


def _is_verified_at(state: EngineState, version: int, digest: str | None) -> bool:
    if state.weights.state is not WeightsState.VERIFIED or state.weights.version != version:
        return False
    return digest is None or state.weights.digest == digest


@dataclass(frozen=True)
class World:
    """All that a pass decides on, besides the WeightVersion and the clock."""

    fleet: RolloutEngine
    engines: tuple[Engine, ...]  # by ordinal, oldest first
    settings: Settings
    guards_epoch: int  # highest epoch of a guard that is followed
    strays: tuple[PodView, ...] = ()  # pods of engines whose leading pod is gone
    sender: SenderView = field(default_factory=SenderView)

    def is_of_this_fleet(self, engine_uid: str, time: datetime | None) -> bool:
        """Whether a record of a WeightVersion speaks of this fleet, not of one before it under its name.

        By the uid, as two clocks tell the times; records of an operator that noted no uid are judged by those.
        """
        if engine_uid:
            return engine_uid == self.fleet.metadata.uid
        created = self.fleet.metadata.creation_timestamp
        return time is not None and (created is None or time >= created)

    @property
    def usable(self) -> tuple[tuple[Engine, EngineState], ...]:
        """Engines that can take part, with their states."""
        return tuple((engine, state) for engine in self.engines if (state := engine.usable) is not None)

    def serving(self, committed: Committed | None) -> tuple[Engine, ...]:
        """Engines that answer from the committed version."""
        return tuple(engine for engine in self.engines if engine.serves(committed))

    def by_name(self, name: str) -> Engine | None:
        """The engine of a pod."""
        return self._by_name.get(name)

    @cached_property
    def up_since(self) -> dict[str, datetime]:
        """By template, since when the engine of it has been Ready that has been for longest, of those that are well."""
        found: dict[str, datetime] = {}
        for engine, _ in self.usable:
            since, template = engine.pod.ready_since, engine.pod.template_hash
            if since is not None:
                found[template] = min(since, found.get(template, since))
        return found

    @cached_property
    def _by_name(self) -> dict[str, Engine]:
        return {engine.name: engine for engine in self.engines if not engine.pod.vanished}


def build_world(observed: Observed) -> World:
    """Put pods and guards together, leaving out pods that are no engines of this fleet."""
    fleet = observed.fleet
    quarantined, highest = judge_epochs(
        fleet.status.epoch,
        {uid: view.state.epoch for uid, view in observed.guards.items() if view.state is not None},
        {uid: view.vouched for uid, view in observed.guards.items() if view.vouched is not None},
    )
    heirs = _heirs(observed.pods)
    engines = [
        Engine(
            pod,
            _guard(observed, pod, heirs),
            ordinal,
            pod.uid in quarantined,
            observed.nodes.get(pod.node),
            () if pod.vanished else _peers(observed, pod.name),
        )
        for pod in observed.pods
        if pod.leads and (ordinal := _ordinal(pod, fleet.metadata.name)) is not None
    ]
    engines.sort(key=lambda engine: (engine.ordinal, engine.pod.created, engine.pod.name))
    led = {engine.name for engine in engines if not engine.pod.vanished}
    strays = tuple(pod for pod in observed.pods if not pod.leads and pod.leader not in led)
    return World(fleet, tuple(engines), observed.settings, highest, strays, observed.sender)


def _peers(observed: Observed, leader: str) -> tuple[PodView, ...]:
    found = (pod for pod in observed.pods if not pod.leads and pod.leader == leader)
    return tuple(sorted(found, key=lambda pod: (pod.node_index, pod.created, pod.name)))


def _heirs(pods: tuple[PodView, ...]) -> dict[str, str]:
    """Whose each address is: the newest pod's that has it. A network may give it away before its last owner is gone."""
    present = (pod for pod in pods if pod.ip and not (pod.vanished or pod.ended))
    return {pod.ip: pod.uid for pod in sorted(present, key=lambda pod: (pod.created, pod.uid))}


def _guard(observed: Observed, pod: PodView, heirs: dict[str, str]) -> GuardView | None:
    """At the address of a pod that vanished, or whose node is cut off, another one may answer by now."""
    if pod.ip and not pod.ended and heirs.get(pod.ip, pod.uid) != pod.uid:
        return GuardView(None, reachable=False, last_contact=None, error="its address belongs to another engine now")
    return observed.guards.get(pod.uid)


def _ordinal(pod: PodView, fleet: str) -> int | None:
    """From the label, or from the name where somebody tampered with the label: it may be open all the same."""
    if pod.ordinal >= 0:
        return pod.ordinal
    found = POD_NAME.fullmatch(pod.name)
    return int(found["ordinal"]) if found and found["fleet"] == fleet else None


def judge_epochs(
    recorded: int, told: dict[str, int], vouched: dict[str, int] | None = None
) -> tuple[frozenset[str], int]:
    """Guards whose epoch nobody can have given them, and the highest epoch of the others.

    Zeros (a new fleet, a new process) say nothing about where the fleet is, so they are no measure for a jump; what no
    fleet can have come to is absurd even there.

    A guard may be ahead of the record when it is met: the record may have been lost. While it is followed it rises by
    our commands only, and those name what is recorded. One that rises beyond that would make us raise the record again
    and again, and no update would ever come to its end.
    """
    highest = recorded
    absurd: set[str] = set()
    known = vouched or {}
    for uid, epoch in sorted(told.items(), key=lambda item: (item[1], item[0])):
        invented = epoch > max(recorded, known.get(uid, epoch))
        if invented or epoch > MAX_EPOCH or (highest > 0 and epoch > highest + MAX_EPOCH_JUMP):
            absurd.add(uid)
        else:
            highest = max(highest, epoch)
    return frozenset(absurd), highest
