"""A simulated cluster around `plan`: an API server, pods, engines behind the real guard machine, and a clock.

The operator keeps nothing between passes but what its followers were told, and loses even that when it is
restarted. Faults are switched on by the tests. After every change the promises are checked: see `check`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from rollfleet_operator.api.rolloutengine import RolloutEngine, RolloutEngineStatus
from rollfleet_operator.api.weightversion import WeightVersion, WeightVersionStatus
from rollfleet_operator.core.actions import (
    ApplyObject,
    CreatePod,
    Decision,
    DeleteObject,
    DeletePod,
    Event,
    GuardCall,
    LabelPod,
    StopPod,
)
from rollfleet_operator.core.observed import GuardView, NodeView, Observed, PodView
from rollfleet_operator.core.plan import plan
from rollfleet_protocol.commands import Arm, Cancel, Close, Command
from rollfleet_protocol.state import EngineState, OperationName, OperationStatus
from tests.support.builders import NOW, make_settings
from tests.support.simulated_engine import Store, Temper
from tests.support.simulated_looks import Looks
from tests.support.simulated_pods import Kubelet, SimulatedPod
from tests.support.simulated_trainer import Lease

PASS_S = 0.01  # what a pass takes at least
STEP_S = 5.0  # the longest time without a pass
UNKNOWN = GuardView(state=None, reachable=False, last_contact=None)


@dataclass
class Faults:
    """How likely what is, for each command, poll and write."""

    lose_command: float = 0.0
    lose_answer: float = 0.0
    delay_command: float = 0.0
    longest_delay_s: float = 20.0
    skip_poll: float = 0.0
    conflict: float = 0.0
    crash_in_apply: float = 0.0


class World(Looks, Kubelet):
    """Everything. Times are seconds since NOW."""

    def __init__(self, fleet: RolloutEngine, seed: int = 0, *, load_s: float = 1.0) -> None:
        self.rng = random.Random(seed)
        self.time = 0.0
        self.fleet = fleet
        self.weight_versions: dict[str, WeightVersion] = {}
        self.pods: dict[str, SimulatedPod] = {}
        self.ghosts: dict[str, SimulatedPod] = {}
        self.terminated: set[str] = set()
        self.nodes: dict[str, NodeView] = {}
        self.store = Store()
        self.faults = Faults()
        self.temper: Callable[[], Temper] = Temper
        self.doom: Callable[[PodView], int | None] = lambda _: None
        self.load_s = load_s
        self.children: dict[str, str] = {}
        self.settings = make_settings(up_since=NOW)
        self.views: dict[str, GuardView] = {}
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.decisions: list[Decision] = []
        self.fleet_writes = 0
        self.weight_version_writes = 0
        self.events: list[Event] = []
        self.whole_passes = 0  # of which every write succeeded, and which no crash cut short
        self.wake_at: float | None = 0.0
        self.down_until = -1.0
        self.committed_versions: list[int] = []
        self.forget_everything = False
        self.stored_nowhere: set[int] = set()  # versions whose record names no checkpoint, as of a push
        self.news = False  # a guard told something new: the next pass comes at once
        self.hold: Callable[[Command], bool] = lambda _: False  # commands that stay on their way until `release`
        self.held: list[GuardCall] = []
        self.lease = Lease()
        self._seen: dict[str, tuple[str, int]] = {}
        self._serial = 0

    # the clock -----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The simulated time."""
        return NOW + timedelta(seconds=self.time)

    def at(self, seconds: float) -> datetime:
        """That simulated time."""
        return NOW + timedelta(seconds=seconds)

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something then."""
        self._serial += 1
        self.agenda.append((self.time + delay_s, self._serial, act))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let the world go on; whether the condition came to hold (or the time passed, without one)."""
        end = self.time + seconds
        while True:
            self.step()
            if until is not None and until():
                return True
            if self.time >= end:
                return until is None

    def step(self) -> None:
        """A pass of the operator, then on to whatever happens next."""
        if self.time >= self.down_until:
            self.wake_at = self._operate()
        upcoming = [when for when, _, _ in self.agenda] + ([self.time] if self.news else [])
        self.news = False
        upcoming += [when for pod in self.all_pods if pod.process and (when := pod.process.next_event()) is not None]
        if self.wake_at is not None and self.time >= self.down_until:
            upcoming.append(self.wake_at)
        target = min([*upcoming, self.time + STEP_S])
        self.time = max(target, self.time + PASS_S)
        due = sorted(item for item in self.agenda if item[0] <= self.time)
        self.agenda = [item for item in self.agenda if item[0] > self.time]
        for _, _, act in due:
            act()
            self.check()
        for pod in self.all_pods:
            if pod.process is not None:
                pod.process.advance(self.time)
                self.check()
        if self.lease.trainer is not None:
            self.lease.trainer.act(self)

    # the operator --------------------------------------------------------------------------------------------------

    def observe(self) -> Observed:
        """What a pass sees."""
        return Observed(
            fleet=self.fleet,
            weight_versions=tuple(self.weight_versions.values()),
            pods=tuple(sorted((pod.view for pod in self.pods.values()), key=lambda view: (view.ordinal, view.name))),
            guards=dict(self.views),
            ca_bundle="Q0E=",
            settings=self.settings,
            children=dict(self.children),
            nodes=dict(self.nodes),
            terminated=frozenset(self.terminated),
            sender=self.lease.view(self),
        )

    def _operate(self) -> float | None:
        if self.forget_everything:
            self.views = {}
        self._poll()
        observed = self.observe()
        decision = plan(observed, self.now)
        self.decisions.append(decision)
        if not self._apply(decision):
            return self.time
        return None if decision.wake_at is None else (decision.wake_at - NOW).total_seconds()

    def restart_operator(self, down_s: float = 0.0) -> None:
        """All memory is gone; deadlines count anew from when it is back."""
        self.views = {}
        self.down_until = self.time + down_s
        self.settings = replace(self.settings, up_since=self.now + timedelta(seconds=down_s))

    def replace_operator(self, uid: str) -> None:
        """Installed anew: its ServiceAccount has another uid."""
        self.restart_operator()
        self.settings = replace(self.settings, operator_uid=uid)

    def _poll(self) -> None:
        """Followers hear of their guards."""
        remembered = {member.uid for member in self.fleet.status.members}
        followed = self.pods | {uid: pod for uid, pod in self.ghosts.items() if uid in remembered}
        for uid, pod in followed.items():
            if self.rng.random() >= self.faults.skip_poll:
                self._hear(uid, pod)
        self.views = {uid: view for uid, view in self.views.items() if uid in followed}

    def _hear(self, uid: str, pod: SimulatedPod) -> None:
        known = self.views.get(uid, UNKNOWN)
        if pod.process is None or self.time < pod.cut_off_until:
            if pod.view.ip:
                self.views[uid] = replace(known, reachable=False, error="connection refused", disowned=False)
            return
        if self._is_disowned(uid, pod):
            return
        self._told(uid, pod.process.wire(self.time))

    def _is_disowned(self, uid: str, pod: SimulatedPod) -> bool:
        """Its guard was told of another operator, and refuses this one."""
        if pod.obeys == self.settings.operator_uid:
            return False
        text = f"uid {self.settings.operator_uid} does not control this engine"
        self.views[uid] = replace(self.views.get(uid, UNKNOWN), reachable=False, error=text, disowned=True)
        return True

    def _told(self, uid: str, state: EngineState) -> None:
        """As the follower in the clients does it."""
        known = self.views.get(uid, UNKNOWN)
        before = known.state
        if before is None or before.incarnation != state.incarnation or state.epoch > before.epoch:
            known = UNKNOWN
        setbacks, last, of = known.setbacks, known.last_setback, known.setback_epoch
        operation = state.operation
        failed = operation is not None and operation.status is OperationStatus.FAILED
        if failed and (known.state is None or known.state.operation != operation):
            setbacks, last, of = setbacks + 1, self.now, max(state.epoch, of or 0)
        self.views[uid] = GuardView(state, True, self.now, "", known.refusals, setbacks, last, of)
        seen = (state.incarnation, state.sequence)
        self.news = self.news or self._seen.get(uid) != seen
        self._seen[uid] = seen

    # applying a decision -------------------------------------------------------------------------------------------

    def _apply(self, decision: Decision) -> bool:
        """False where the fleet's write lost."""
        if decision.fleet_status is not None:
            if self.rng.random() < self.faults.conflict:
                return False
            self._write_fleet(decision.fleet_status.status)
            if self.rng.random() < self.faults.crash_in_apply:
                self.restart_operator(self.rng.uniform(0.0, 5.0))
                return True
        for action in decision.actions:
            self._act(action)
        lost = 0
        for write in decision.weight_version_statuses:
            if self.rng.random() < self.faults.conflict:
                lost += 1
            else:
                self._write_weight_version(write.name, write.status)
        self.whole_passes += not lost
        self.events += decision.events
        return True

    def _write_fleet(self, status: RolloutEngineStatus) -> None:
        before = self.fleet.status
        assert status.epoch >= before.epoch, "the epoch went back"
        self.fleet_writes += 1
        self.fleet = self.fleet.model_copy(update={"status": RolloutEngineStatus.model_validate(status.dump())})
        if status.committed is not None and status.committed != before.committed:
            known = before.committed
            if known is None or status.committed.version != known.version:
                assert known is None or status.committed.version > known.version
                self.committed_versions.append(status.committed.version)
            else:
                # The end of its roll, and an answer to the probe that two engines give later, are all that changes.
                changed = {"previous": status.committed.previous and known.previous}
                changed |= {"probe": status.committed.probe} if known.probe is None else {}
                # A copy was named since, or named again by who moved it.
                copy = status.committed.checkpoint
                pushed = copy is not None and (known.checkpoint is None or copy in self._named(known.version))
                changed |= {"checkpoint": copy} if pushed else {}
                assert status.committed == known.model_copy(update=changed)
        self.check()

    def _named(self, version: int) -> set[str]:
        specs = [each.spec for each in self.weight_versions.values()]
        asked = {each.recovery.checkpoint.path for each in specs if each.version == version and each.recovery}
        return asked | {each.stored.checkpoint.path for each in specs if each.stored and each.stored.version == version}

    def _write_weight_version(self, name: str, status: WeightVersionStatus) -> None:
        if name in self.weight_versions:
            self.weight_version_writes += 1
            told = WeightVersionStatus.model_validate(status.dump())
            self.weight_versions[name] = self.weight_versions[name].model_copy(update={"status": told})

    def _act(self, action: Any) -> None:
        if isinstance(action, GuardCall):
            self._send(action)
        elif isinstance(action, CreatePod):
            self.create_pod(action.manifest)
        elif isinstance(action, DeletePod):
            self.delete_pod(action.uid)
        elif isinstance(action, StopPod):
            self.stop_pod(action.uid, action.why)
        elif isinstance(action, LabelPod):
            self.change(action.uid, serving_label=action.serving)
        elif isinstance(action, ApplyObject):
            self.children[f"{action.manifest['kind']}/{action.manifest['metadata']['name']}"] = action.content_hash
        elif isinstance(action, DeleteObject):
            self.children.pop(f"{action.kind}/{action.name}", None)

    def _send(self, call: GuardCall) -> None:
        if self.hold(call.command):
            self.held.append(call)
            self._unheard(call.pod_uid)
            return
        luck = self.rng.random()
        if luck < self.faults.lose_command:
            self._unheard(call.pod_uid)
        elif luck < self.faults.lose_command + self.faults.delay_command:
            self._unheard(call.pod_uid)
            self.later(self.rng.uniform(0.0, self.faults.longest_delay_s), lambda: self._deliver(call, answer=False))
        else:
            self._deliver(call, answer=self.rng.random() >= self.faults.lose_answer)

    def release(self) -> int:
        """What was held arrives now, too late; how much it was."""
        held, self.held, self.hold = self.held, [], lambda _: False
        for call in held:
            self._deliver(call, answer=False)
        return len(held)

    def _unheard(self, uid: str) -> None:
        self.views[uid] = replace(self.views.get(uid, UNKNOWN), reachable=False, error="timed out", disowned=False)

    def _deliver(self, call: GuardCall, *, answer: bool) -> None:
        pod = (self.pods | self.ghosts).get(call.pod_uid)
        if pod is None or pod.process is None or self.time < pod.cut_off_until or self._is_disowned(call.pod_uid, pod):
            return
        on_time = self.fleet.status.epoch == call.command.epoch or isinstance(call.command, Cancel)
        if on_time and pod.process.state.epoch <= call.command.epoch:
            self._check_command(pod, call.command)
        rejection = pod.process.command(call.command, self.time)
        self.check()
        if not answer:
            self._unheard(call.pod_uid)
        elif rejection is None:
            self._told(call.pod_uid, pod.process.wire(self.time))
            if isinstance(call.command, Close):
                self._let_arm_again(call.pod_uid)
        else:
            self._refused(call, rejection.message)

    def _let_arm_again(self, uid: str) -> None:
        """As the follower does it: a Close was taken."""
        view = self.views.get(uid, UNKNOWN)
        self.views[uid] = replace(view, refusals=tuple(entry for entry in view.refusals if entry[0] != Arm.__name__))

    def _refused(self, call: GuardCall, text: str) -> None:
        view = self.views.get(call.pod_uid, UNKNOWN)
        entry = (type(call.command).__name__, text)
        refusals = tuple(other for other in view.refusals if other != entry)
        self.views[call.pod_uid] = replace(
            view,
            refusals=(*refusals, entry)[-8:],
            setbacks=view.setbacks + 1,
            last_setback=self.now,
            setback_epoch=max(call.command.epoch, view.setback_epoch or 0),
        )


def slow(name: OperationName, seconds: float) -> Callable[[], Temper]:
    """Engines that take so long over this operation."""
    return lambda: Temper(seconds=lambda step: seconds if step is name else 0.1)
