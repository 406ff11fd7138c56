"""The operator of the model: real decisions, carried out step by step as the runtime does it.

A pass takes time: it reads, decides, writes the fleet's status, and only then acts, one action after the other in any
order, before it writes the WeightVersions. It can die between any two steps, or stall in one for many seconds while
another operator goes on. What it knows of pods comes from a watch that lags; what it knows of guards from followers.
"""

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from datetime import timedelta

from rollfleet_operator.clients.errors import Conflict, NotFound, Retryable, RollfleetError, Unreachable
from rollfleet_operator.core.actions import (
    Action,
    ApplyObject,
    CreatePod,
    Decision,
    DeleteObject,
    DeletePod,
    GuardCall,
    LabelPod,
    StopPod,
)
from rollfleet_operator.core.observed import Observed, PodView, Settings
from rollfleet_operator.core.plan import plan
from rollfleet_operator.core.vanished import suspect_nodes, vanished
from rollfleet_operator.runtime.uptime import Uptime
from tests.model.api_server import ApiServer, Read
from tests.model.clock import Clock
from tests.model.following import Following
from tests.model.network import Network
from tests.model.nodes import Nodes
from tests.support.builders import make_settings

RESYNC_S = 60.0  # without news or a time to wake; the runtime's is longer
HOLD_S = 0.1
SILENCE_S = 12.0  # after which guards reopen; above the longest poll, and short so that it matters often
LONGEST_BACK_OFF_S = 8.0
FIRST_WORDS_S = 2.0  # that the first pass waits for its guards
PASS_S = 60.0  # of one pass, as in the runtime
QUICK_S = 0.004  # a step of a pass

Steps = Generator[float, None, "float | None"]


@dataclass
class Pace:
    """How slow an operator may be."""

    stall: float = 0.0  # how likely a step takes long
    longest_stall_s: float = 40.0
    watch_lag_s: float = 0.05  # of what it hears of pods


class Operator:
    """A process that comes and goes. All it knows it loses with it."""

    def __init__(self, name: str, clock: Clock, rng: random.Random, api: ApiServer, network: Network, nodes: Nodes):
        self.name = name
        self.pace = Pace()
        self.passes = 0
        self.last_decision: Decision | None = None
        self.on_decision: Callable[[Decision], None] = lambda _: None
        self.up = False
        self.account_uid = make_settings().operator_uid
        self.deaf_until = -1.0  # its watch of pods stalls
        self._clock = clock
        self._rng = rng
        self._api = api
        self._network = network
        self._nodes = nodes
        self._life = 0
        self.start()
        api.watches.append(self._hear_of_objects)
        api.pod_watches.append(self._hear_of_pod)

    # its life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process."""
        self._life += 1
        self.up = True
        self.uptime = Uptime(self._clock.now, lambda: self._clock.time)
        self.following = Following(self.name, self.account_uid, self._clock, self._network, self._nodes, self.wake)
        self._cache: dict[str, PodView] = {}
        self._gone: dict[str, bool] = {}
        self._cached = False
        self._due: list[tuple[float, str, PodView | None]] = []
        self._children: dict[str, str] = {}
        self._working = False
        self._wanted = False
        self._failures = 0
        self._timer = 0
        self.wake()

    def kill(self, down_s: float) -> None:
        """Gone between two steps; back later."""
        if self.up:
            self.following.stop()
        self.up = False
        self._life += 1
        life = self._life
        self._clock.later(down_s, lambda: self.start() if self._life == life else None)

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        life = self._life
        self._clock.later(delay_s, lambda: act() if self._life == life else None)

    # what it hears --------------------------------------------------------------------------------------------------

    def _hear_of_objects(self) -> None:
        if self.up:
            self._later(self._rng.uniform(0.001, 0.02), self.wake)

    def _hear_of_pod(self, uid: str, view: PodView | None) -> None:
        """In order, each as late as the watch is."""
        if not self.up or not self._cached:
            return
        when = max(self._clock.time + self._rng.uniform(0.0, self.pace.watch_lag_s), self.deaf_until)
        if self._due:
            when = max(when, self._due[-1][0])
        self._due.append((when, uid, view))
        self._later(when - self._clock.time, self._take_in)

    def _take_in(self) -> None:
        while self._due and self._due[0][0] <= self._clock.time + 1e-9:
            _, uid, view = self._due.pop(0)
            if view is None:
                self._forget(uid)
            elif uid not in self._gone:
                self._cache[uid] = view
        self.wake()

    def _forget(self, uid: str) -> None:
        """Gone; whether its containers had ended is remembered, as far as it was told."""
        known = self._cache.pop(uid, None)
        self._gone[uid] = self._gone.get(uid, False) or (known is not None and known.halted)

    def hear_all(self) -> None:
        """Its watch catches up."""
        self.deaf_until = -1.0
        self._due = [(self._clock.time, uid, view) for _, uid, view in self._due]
        self._take_in()

    def _list_pods(self) -> None:
        """The first list is from quorum."""
        self._cache = dict(self._api.pods)
        self._due.clear()
        self._cached = True

    # passes ---------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There is news."""
        self._wanted = True
        if not self._working:
            self._working = True
            self._later(HOLD_S if self._failures else 0.0, self._begin)

    def _begin(self) -> None:
        self._wanted = False
        self._timer += 1
        self.passes += 1
        self._go_on(self._pass(), self._clock.time)

    def _go_on(self, steps: Steps, began: float) -> None:
        try:
            if self._clock.time > began + PASS_S:
                raise Unreachable("the pass took too long")
            pause_s = next(steps)
        except StopIteration as done:
            self._failures = 0
            self._rest(done.value)
        except Conflict:
            self._failures += 1
            self._rest(0.0)
        except RollfleetError:
            self._failures += 1
            self._rest(min(LONGEST_BACK_OFF_S, 0.1 * 2.0 ** min(self._failures, 10)))
        else:
            self._later(pause_s, lambda: self._go_on(steps, began))

    def _rest(self, wake_s: float | None) -> None:
        self._working = False
        if self._wanted:
            self.wake()
            return
        timer = self._timer
        delay_s = RESYNC_S if wake_s is None else max(0.0, wake_s)
        self._later(delay_s, lambda: self.wake() if self._timer == timer else None)

    def _pause(self) -> float:
        if self._rng.random() < self.pace.stall:
            return self._rng.uniform(0.1, self.pace.longest_stall_s)
        return self._rng.uniform(0.0, QUICK_S)

    def _pass(self) -> Steps:
        try:
            read = self._api.read()
            if not self._cached:
                self._list_pods()
        except Unreachable:
            self.uptime.lost()
            raise
        self.uptime.seen()
        yield self._pause()
        if not self.following.followed:  # a new process waits for first words
            self._follow(read)
            yield self._rng.choice((FIRST_WORDS_S / 40, FIRST_WORDS_S))
        observed = self._observe(read)
        decision = plan(observed, self._clock.now())
        self.last_decision = decision
        self.on_decision(decision)
        yield self._pause()
        yield from self._apply(read, decision)
        if decision.wake_at is None:
            return None
        return (decision.wake_at - self._clock.now()) / timedelta(seconds=1)

    def settings(self) -> Settings:
        """What it was started with."""
        return make_settings(
            up_since=self.uptime.since,
            away=self.uptime.away(""),
            operator_uid=self.account_uid,
            operator_silence_s=SILENCE_S,
        )

    def _observe(self, read: Read) -> Observed:
        pods = self._cache
        terminated = self._follow(read)
        self.following.vouch(read.fleet.status.epoch)
        observed = Observed(
            fleet=read.fleet,
            weight_versions=tuple(weight_version for weight_version, _ in read.weight_versions.values()),
            pods=tuple(sorted(pods.values(), key=lambda view: (view.ordinal, view.name))),
            guards=self.following.views(),
            ca_bundle="Q0E=",
            settings=self.settings(),
            children=dict(self._children),
            terminated=terminated,
        )
        nodes = {} if self._api.down else self._nodes.views(suspect_nodes(observed))
        return replace(observed, nodes=nodes)

    def _follow(self, read: Read) -> frozenset[str]:
        """All pods with an address, and those that only the status remembers; the uids of those that ended."""
        terminated = frozenset(member.uid for member in read.fleet.status.members if self._gone.get(member.uid, False))
        gone = vanished(read.fleet, self._cache, terminated)
        self.following.ensure(
            {uid for uid, view in self._cache.items() if view.ip} | {member.uid for member in gone if member.ip}
        )
        return terminated

    def _apply(self, read: Read, decision: Decision) -> Generator[float, None, None]:
        write = decision.fleet_status
        if write is not None and write.status != read.fleet.status:
            self._write_fleet(read, decision)
            yield self._pause()
        errors: list[RollfleetError] = []
        actions = list(decision.actions)
        self._rng.shuffle(actions)  # the runtime begins them all at once
        for action in actions:
            try:
                self._act(action)
            except RollfleetError as error:
                errors.append(error)
            yield self._pause()
        for told in decision.weight_version_statuses:
            known, version = read.weight_versions[told.name]
            if told.status == known.status:
                continue
            try:
                self._api.replace_weight_status(told.name, version, told.status)
            except NotFound:
                pass
            except RollfleetError as error:
                errors.append(error)
            yield self._pause()
        if errors:
            raise next((error for error in errors if not isinstance(error, Retryable)), errors[0])

    def _write_fleet(self, read: Read, decision: Decision) -> None:
        """The fence between two operators: nothing is done where it fails."""
        if decision.fleet_status is not None:
            self._api.replace_fleet_status(read.fleet_version, decision.fleet_status.status)

    def _act(self, action: Action) -> None:
        if isinstance(action, GuardCall):
            self.following.give(action.pod_uid, action.command)
        elif isinstance(action, CreatePod):
            self._api.write_pod(lambda: self._nodes.create(action.manifest))
            self._learn(next((uid for uid, view in self._api.pods.items() if view.name == _name(action)), ""))
        elif isinstance(action, DeletePod):
            self._api.write_pod(lambda: self._nodes.delete(action.uid))
            self._learn(action.uid)
        elif isinstance(action, StopPod):
            self._api.write_pod(lambda: self._nodes.stop(action.uid, action.why))
            self._learn(action.uid)
        elif isinstance(action, LabelPod):
            self._api.write_pod(lambda: self._api.change_pod(action.uid, serving_label=action.serving))
            self._learn(action.uid)
        elif isinstance(action, ApplyObject):
            self._children[f"{action.manifest['kind']}/{action.manifest['metadata']['name']}"] = action.content_hash
        elif isinstance(action, DeleteObject):
            self._children.pop(f"{action.kind}/{action.name}", None)

    def _learn(self, uid: str) -> None:
        """The answer to a write is newer than what the watch told."""
        view = self._api.pods.get(uid)
        if view is None:
            self._forget(uid)
        else:
            self._cache[uid] = view


def _name(action: CreatePod) -> str:
    return str(action.manifest["metadata"]["name"])
