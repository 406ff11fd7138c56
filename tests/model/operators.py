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
from rollfleet_operator.clients.pace import Pace as PaceOfNews
from rollfleet_operator.core.actions import (
    Decision,
    WeightVersionStatusWrite,
)
from rollfleet_operator.core.observed import Observed, PodView, Settings
from rollfleet_operator.core.plan import plan, plan_orphan
from rollfleet_operator.core.vanished import suspect_nodes, to_follow, vanished
from rollfleet_operator.runtime.queue import MAX_PASSES, PASSES_PER_S
from rollfleet_operator.runtime.uptime import Uptime
from tests.model.acting import Hands
from tests.model.api_server import ApiServer, Read
from tests.model.clock import Clock
from tests.model.following import Following
from tests.model.leases import Candidate, Lease
from tests.model.network import Network
from tests.model.nodes import Nodes
from tests.model.senders import Manifest, SenderLease, SenderWatch
from tests.model.watching import PodWatch
from tests.support.builders import make_settings

RESYNC_S = 60.0  # without news or a time to wake; the runtime's is longer
THAW_S = 1.0  # after which a process that stands still finds that it goes on
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

    def __init__(
        self,
        name: str,
        clock: Clock,
        rng: random.Random,
        api: ApiServer,
        network: Network,
        nodes: Nodes,
        senders: SenderLease,
        lease: Lease | None = None,
        drift: float = 1.0,
    ):
        self.name = name
        self.late_acts = 0  # done after its term had ended, by its own clock
        self.lost_terms = 0
        self.frozen_until = -1.0  # its process stands still
        self.freezes_s = 0.0  # for so long, once it has asked whether it leads and before it acts on that
        self.pace = Pace()
        self.passes = 0
        self.last_decision: Decision | None = None
        self.on_decision: Callable[[Decision], None] = lambda _: None
        self.judge: Callable[[Observed, Decision], None] = lambda _, __: None
        self.judge_at_once: Callable[[Observed, Decision], None] = lambda _, __: None
        self.up = False
        self.account_uid = make_settings().operator_uid
        self.deaf_until = -1.0  # its watch of pods stalls
        self._clock = clock
        self._rng = rng
        self._api = api
        self._network = network
        self._nodes = nodes
        self._senders = senders
        self._lease = lease
        self._drift = drift
        self._candidate: Candidate | None = None
        self._life = self._term = 0
        self._leading = False
        self._forget_all()
        self.start()
        api.watches.append(self._hear_of_objects)
        api.pod_watches.append(self._hear_of_pod)
        senders.watches.append(self._hear_of_sender)

    # its life -------------------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether it acts."""
        if not self.up or not self._leading or self._clock.time < self.frozen_until:
            return False
        return self._candidate is None or self._candidate.leads()

    def start(self) -> None:
        """A new process."""
        self._life += 1
        self.up = True
        self._candidate = None
        if self._lease is None:
            self._begin_term()
            return
        self._candidate = Candidate(
            self.name, self._drift, self._clock, self._rng, self._api, self._lease, self._in_this_life
        )
        self._candidate.on_term, self._candidate.on_end = self._begin_term, self._lose_term

    def _begin_term(self) -> None:
        """From here on it acts; all that it knows begins anew."""
        self._term += 1
        self._leading = True
        self._forget_all()
        self.wake()

    def _forget_all(self) -> None:
        self.uptime = Uptime(self._clock.now, lambda: self._clock.time)
        self.following = Following(self.name, self.account_uid, self._clock, self._network, self._nodes, self.wake)
        self.watch = PodWatch(self._clock, self._rng, self._api, self._later, self.wake)
        watch = self.watch
        self.following.known_addresses = lambda: {view.ip for view in watch.pods.values()}
        self.senders = SenderWatch(self._clock, self._rng, self._senders, self._later, self.wake)
        self._hands = Hands(self._api, self._nodes, self._senders, self.following, watch)
        self._working = False
        self._wanted = False
        self._failures = 0
        self._news = PaceOfNews(MAX_PASSES, PASSES_PER_S)
        self._held_until = 0.0
        self._timer = 0

    def _lose_term(self) -> None:
        self.lost_terms += 1
        self._end_term()

    def _end_term(self) -> None:
        if self._leading:
            self.following.stop()
        self._leading = False
        self._term += 1

    def kill(self, down_s: float) -> None:
        """Gone between two steps; back later."""
        self._end_term()
        self.up = False
        self._life += 1
        life = self._life
        self._clock.later(down_s, lambda: self.start() if self._life == life else None)

    def _in_this_life(self, delay_s: float, act: Callable[[], None]) -> None:
        life = self._life
        self._clock.later(delay_s, lambda: self._unless_frozen(act, lambda: self._life == life))

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        term = self._term
        self._clock.later(delay_s, lambda: self._unless_frozen(act, lambda: self._term == term))

    def _unless_frozen(self, act: Callable[[], None], holds: Callable[[], bool]) -> None:
        if not holds():
            return
        if self._clock.time < self.frozen_until:  # in steps: it may be healed before
            left_s = self.frozen_until - self._clock.time
            self._clock.later(min(left_s, THAW_S), lambda: self._unless_frozen(act, holds))
        else:
            act()

    def _demand(self) -> None:
        if self._candidate is not None:
            self._candidate.demand()

    def _do(self, act: Callable[[], None]) -> Generator[float, None, None]:
        """It asks whether it leads, and acts a moment later."""
        self._demand()
        if self.freezes_s:
            self.frozen_until, self.freezes_s = self._clock.time + self.freezes_s, 0.0
        yield self._rng.uniform(0.0, QUICK_S)
        if not self.leads:
            self.late_acts += 1
        act()

    # what it hears --------------------------------------------------------------------------------------------------

    def _hear_of_objects(self) -> None:
        if self._leading:
            self._later(self._rng.uniform(0.001, 0.02), self.wake)

    def _hear_of_pod(self, uid: str, view: PodView | None) -> None:
        if self._leading:
            self.watch.hear(uid, view, self.pace.watch_lag_s, self.deaf_until)

    def _hear_of_sender(self, lease: Manifest, deleted: bool) -> None:
        if self._leading:
            self.senders.hear(lease, deleted, self.pace.watch_lag_s, self.deaf_until)

    def hear_all(self) -> None:
        """Its watch catches up."""
        self.deaf_until = -1.0
        if self._leading:
            self.watch.catch_up()

    # passes ---------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There is news."""
        self._wanted = True
        if not self._working:
            self._working = True
            self._later(max(HOLD_S if self._failures else 0.0, self._held_until - self._clock.time), self._begin)

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
            self._held_until = self._clock.time + self._news.take(self._clock.time)
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
            if not self.watch.listed:
                self.watch.list()
                self.senders.list()
        except Unreachable:
            self.uptime.lost()
            raise
        self.uptime.seen()
        yield self._pause()
        if not read.present:
            yield from self._tell_orphans(read)
            return None
        if not self.following.followed:  # a new process waits for first words
            self._follow(read)
            yield self._rng.choice((FIRST_WORDS_S / 40, FIRST_WORDS_S))
        observed = self._observe(read)
        decision = plan(observed, self._clock.now())
        self.last_decision = decision
        self.on_decision(decision)
        self.judge_at_once(observed, decision)
        yield self._pause()
        yield from self._apply(read, observed, decision)
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
        terminated = self._follow(read)
        pods = self._pods(read)
        self.following.vouch(read.fleet.status.epoch)
        observed = Observed(
            fleet=read.fleet,
            weight_versions=tuple(weight_version for weight_version, _ in read.weight_versions.values()),
            pods=tuple(sorted(pods.values(), key=lambda view: (view.ordinal, view.name))),
            guards=self.following.views(),
            ca_bundle="Q0E=",
            settings=self.settings(),
            children=dict(self._hands.children),
            terminated=terminated,
            sender=self.senders.look(read.fleet, tuple(each for each, _ in read.weight_versions.values())),
        )
        nodes = {} if self._api.down else self._nodes.views(suspect_nodes(observed))
        return replace(observed, nodes=nodes)

    def _follow(self, read: Read) -> frozenset[str]:
        """All pods with an address, and those that only the status remembers; the uids of those that ended."""
        terminated = frozenset(member.uid for member in read.fleet.status.members if self.watch.ended(member.uid))
        pods = self._pods(read)
        gone = vanished(read.fleet, pods, terminated)
        followed = to_follow(tuple(pods.values()), gone)
        self.following.ensure({each.uid: each.ip for each in followed if each.ip})
        return terminated

    def _pods(self, read: Read) -> dict[str, PodView]:
        """Not those of a deleted fleet of the same name."""
        fleet = read.fleet.metadata.uid
        return {uid: view for uid, view in self.watch.pods.items() if self._api.owners.get(uid) == fleet}

    def _apply(self, read: Read, observed: Observed, decision: Decision) -> Generator[float, None, None]:
        write = decision.fleet_status
        if write is not None and write.status != read.fleet.status:
            yield from self._do(lambda: self._write_fleet(read, decision))
            yield self._pause()
        self.judge(observed, decision)  # what is decided by an old record comes no further than its write
        errors: list[RollfleetError] = []
        actions = list(decision.actions)
        self._rng.shuffle(actions)  # the runtime begins them all at once
        for action in actions:
            try:
                yield from self._do(lambda action=action: self._hands.act(action))  # type: ignore[misc]
            except RollfleetError as error:
                errors.append(error)
            yield self._pause()
        yield from self._tell(read, decision.weight_version_statuses, errors)
        if errors:
            raise next((error for error in errors if not isinstance(error, Retryable)), errors[0])

    def _tell(
        self, read: Read, writes: tuple[WeightVersionStatusWrite, ...], errors: list[RollfleetError]
    ) -> Generator[float, None, None]:
        for told in writes:
            known, version = read.weight_versions[told.name]
            if told.status == known.status:
                continue
            try:
                yield from self._do(
                    lambda told=told, version=version: self._api.replace_weight_status(told.name, version, told.status)  # type: ignore[misc]
                )
            except NotFound:
                pass
            except RollfleetError as error:
                errors.append(error)
            yield self._pause()

    def _tell_orphans(self, read: Read) -> Generator[float, None, None]:
        """The fleet is gone: nothing of it is followed, and its WeightVersions are told."""
        self.following.ensure({})
        self._hands.children.clear()
        errors: list[RollfleetError] = []
        for weight_version, _ in read.weight_versions.values():
            decision = plan_orphan(weight_version, self._clock.now())
            yield from self._tell(read, decision.weight_version_statuses, errors)
        if errors:
            raise errors[0]

    def _write_fleet(self, read: Read, decision: Decision) -> None:
        """The fence between two operators: nothing is done where it fails."""
        if decision.fleet_status is not None:
            self._api.replace_fleet_status(read.fleet_version, decision.fleet_status.status)
