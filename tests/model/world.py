"""One schedule lived through: a fleet comes up, things happen, all is healed, and the fleet must be well again."""

import random
from collections.abc import Callable
from dataclasses import replace

from rollfleet_operator.api.launch import TrainerRef, WeightTransfer
from rollfleet_operator.api.rolloutengine import Startup
from rollfleet_operator.api.weightversion import Deadlines, Phase
from rollfleet_operator.core.policies import OPENING_S, REOPENING_S
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.rolling import roll_seconds
from rollfleet_protocol.launch_settings import TransferBackend
from rollfleet_protocol.state import OperationName
from tests.model.api_server import ApiFaults, ApiServer
from tests.model.asks import PLAIN, RETRY, Ask
from tests.model.chaos import Chaos
from tests.model.clock import Clock
from tests.model.describing import describe
from tests.model.engines import Damage, Shelf
from tests.model.leases import Lease
from tests.model.looks import BY_RECORD, Looks
from tests.model.network import Network
from tests.model.nodes import Host, Nodes
from tests.model.operators import Operator, Pace
from tests.model.promises import Auditor, BrokenPromise
from tests.model.report import Report, report
from tests.model.schedule import STEPS, Schedule
from tests.model.senders import ACCOUNTS, SenderLease
from tests.model.trainers import Trainer
from tests.support.builders import NOW, make_fleet

SECONDS_OF = {
    Phase.PREPARING: "prepare_seconds",
    Phase.QUIESCING: "quiesce_seconds",
    Phase.TRANSFERRING: "transfer_seconds",
    Phase.VERIFYING: "verify_seconds",
}
LATE_S = 60.0  # an operator that stalls, or whose writes fail, sees a deadline late
UP_S = 120.0  # a healthy fleet comes up, or changes, within this
HEALED_S = 700.0  # a kubelet gets minutes to end what the API server has forgotten, see KUBELET_S
IDLE_S = 90.0
MAX_EVENTS = 60_000  # of one schedule: more is a loop that never ends
TICK_S = 1.0
COLLECTED_SHARE = 0.2  # of what has no owner, each second
FLEET_SPEC = {
    "startup": Startup(restart_budget=2),
    "trainers": tuple(TrainerRef(service_account_name=name) for name in ACCOUNTS),
    "weight_transfer": WeightTransfer(backend=TransferBackend.GLOO),
}
FOR_GOOD_S = 1e9
OF_PUSHES = ("kill_trainer_in_phase", "stall_trainer", "freeze_trainer", "lie", "flip", "old_step")
PUSH_S = 25.0  # until what is meant to happen to the last push has happened
LOOK_S = 0.05  # how often a guard looks at its clock


def longest_s(deadlines: Deadlines) -> float:
    """Of an update: all its attempts, with Pending, which has prepareSeconds too, and its end."""
    in_all = 2 * deadlines.prepare_seconds + deadlines.quiesce_seconds
    in_all += deadlines.transfer_seconds + deadlines.verify_seconds
    return RETRY.attempts * in_all + OPENING_S + REOPENING_S + 60.0


class World(Looks):
    """Everything of one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.rng = random.Random(schedule.seed + 1)
        self.clock = Clock()
        self.api = ApiServer(self.clock, self.rng, make_fleet(replicas=schedule.replicas, **FLEET_SPEC))
        self.nodes = Nodes(self.clock, self.rng, self.api, Shelf())
        self.nodes.load_s = schedule.load_s
        self.nodes.make_damage = self._make_damage
        self.nodes.on_change = self._changed
        self.network = Network(self.clock, self.rng)
        self.senders = SenderLease(self.clock, self.api)
        self.api.on_fleet_gone = self.senders.remove
        self.auditor = Auditor(self.clock, self.api, self.nodes, self.senders)
        self.trainers = [
            Trainer(
                f"trainer-{number}",
                "grpo",
                drift,
                self.clock,
                self.rng,
                self.api,
                self.senders,
                self.nodes,
                self.network,
            )
            for number, drift in enumerate((1.0, schedule.trainer_drift))
        ]
        lease = Lease() if schedule.lease else None
        self.operators = [
            Operator(
                f"operator-{number}",
                self.clock,
                self.rng,
                self.api,
                self.network,
                self.nodes,
                self.senders,
                lease,
                drift,
            )
            for number, drift in enumerate((1.0, schedule.drift)[: schedule.operators])
        ]
        self.chaos = Chaos(
            self.clock,
            self.api,
            self.nodes,
            self.network,
            self.senders,
            self.trainers,
            self.operators,
            self.auditor,
        )
        self.chaos.on_asked = self._asked
        for operator in self.operators:
            operator.judge = self.auditor.decided
            operator.judge_at_once = self.auditor.pushes.decided
        self.auditor.statuses.is_called_halted = self._is_called_halted
        self.asked_at = 0.0
        self.able_since = 0.0
        self.settled_at = 0.0  # when no operator stands still any more, once nothing bad happens
        self.calm = True
        self._lives: tuple[object, ...] = ()
        self.outcomes: dict[str, int] = {}
        self._ended: set[tuple[str, int]] = set()
        self.clock.later(TICK_S, self._tick)

    # life -----------------------------------------------------------------------------------------------------------

    def live(self) -> Report:
        """All of it; raises BrokenPromise."""
        self._run_until(UP_S, "a new fleet comes up", lambda: self._all_serve(0))
        self._let_loose()
        for blow in self.schedule.happenings:
            self.clock.later(blow.at, lambda blow=blow: self.chaos.strike(blow))  # type: ignore[misc]
        to_come_s = PUSH_S if any(blow.kind in OF_PUSHES for blow in self.schedule.happenings) else 5.0
        end = self.clock.time + max(blow.at for blow in self.schedule.happenings) + to_come_s
        while self.clock.time < end:
            self._step()
        self._heal()
        self._run_until(HEALED_S, "the fleet is well once nothing bad happens", self._is_well)
        if self.api.fleet.spec.replicas == 0:
            self.chaos.scale_to(2)
        if self.api.fleet.status.committed is None or self._is_held() or self._disowned():
            self._decide_by_hand()
        self._ask_for_a_good_one()
        self._run_until(HEALED_S, "a good version becomes active on a healthy fleet", self._is_active)
        self._stay_idle()
        return report(self)

    def _ask_for_a_good_one(self) -> None:
        """From a checkpoint, or from a trainer."""
        self.chaos.ask(self.chaos.newest + 1, "", Ask(pushed=True) if self.schedule.seed % 3 == 1 else PLAIN)

    def _let_loose(self) -> None:
        self.calm = False
        for trainer in self.trainers[: self.schedule.trainers]:
            trainer.start()
        self.network.faults = replace(self.schedule.net)
        self.api.faults = replace(self.schedule.api)
        for operator in self.operators:
            operator.pace = replace(self.schedule.pace)

    def _heal(self) -> None:
        """Nothing bad happens any more; what is on its way still arrives, and what stands still goes on later."""
        self.calm = True
        stall = self.schedule.pace
        self.settled_at = self.clock.time + (stall.longest_stall_s if stall.stall else 0.0)
        self.network.heal()
        self.api.faults, self.api.down_until = ApiFaults(), -1.0
        self._restore_checkpoints()
        self.chaos.calm_down()
        for node in self.nodes.nodes:
            node.lost_until = node.cut_until = node.off_until = node.deaf_until = -1.0
            node.forgotten = False
        for host in self.nodes.hosts.values():
            host.damage.fails.clear()
            host.damage.wrong_digest = host.damage.silent = False
            if host.process is not None:
                host.process.unhang(self.clock.time)
                self._changed(host)
        self.nodes.away.clear()
        self.nodes.unjudged_until = -1.0
        for operator in self.operators:
            operator.pace = Pace()
            operator.frozen_until = -1.0
            operator.hear_all()
        for operator in () if self.schedule.lease else self.operators[1:]:
            operator.kill(FOR_GOOD_S)  # from here on one leads

    def _restore_checkpoints(self) -> None:
        committed = self.auditor.book.committed
        self.nodes.shelf.heal(committed and committed.checkpoint, committed and committed.digest)

    def _clear_away(self) -> None:
        """A person does what the status says: deletes pods that were stopped, or that answer unlike the others."""
        details = self.api.fleet.status.engines.details
        advised = {each.name for each in details if "delete the pod" in each.message and BY_RECORD not in each.message}
        for uid, view in list(self.api.pods.items()):
            if (view.stopped or view.name in advised) and not view.deleting:
                self.nodes.delete(uid)

    def _decide_by_hand(self) -> None:
        """The operator won't: a person gives up pods that obey an operator who is no more."""
        for host in list(self.nodes.hosts.values()):
            if host.obeys != self.operators[0].account_uid:
                self.nodes.delete(host.uid)

    def _step(self) -> None:
        self.clock.step()
        # Two that act, one of them deaf to pods, write over each other for as long as that lasts: no Lease, no peace.
        most = MAX_EVENTS if self.schedule.lease or self.schedule.operators == 1 else 4 * MAX_EVENTS
        if self.clock.events > most:
            raise BrokenPromise("always ends", f"{most} events and no end: something spins")
        self.auditor.look()
        if self.schedule.lease and sum(operator.leads for operator in self.operators) > 1:
            raise BrokenPromise("one leader", f"{[(each.name, each.leads) for each in self.operators]}")

    def _run_until(self, seconds: float, what: str, holds: Callable[[], bool]) -> None:
        end = self.clock.time + seconds
        checked = -1.0
        while True:
            if self.clock.time > checked + 0.25:
                checked = self.clock.time
                if holds():
                    return
            if self.clock.time >= end:
                raise BrokenPromise("always ends", f"not within {seconds:g} s: {what}: {describe(self)}")
            self._step()

    # engines --------------------------------------------------------------------------------------------------------

    def _make_damage(self) -> Damage:
        damage = Damage()
        usual = dict(zip(STEPS, self.schedule.step_s, strict=True))

        def seconds(step: OperationName) -> float:
            uid = next((uid for uid, host in self.nodes.hosts.items() if host.damage is damage), "")
            if self.chaos.slow.get(uid) is step:
                del self.chaos.slow[uid]
                return 14.0 if step is OperationName.REOPEN else 1e6  # the guard's own deadline for Reopen is 15 s
            return usual[step]

        damage.seconds = seconds
        return damage

    def _changed(self, host: Host) -> None:
        """After whatever happened to an engine: tell who waits, and come back when something is due in it."""
        for operator in self.operators:
            operator.following.changed(host)
        process = host.process
        when = None if process is None else process.next_event()
        if process is None or when is None or (self.clock.time < host.due <= when):
            return
        when = max(when, self.clock.time + LOOK_S)  # what is due already waits for something else
        host.due = when

        def go_on() -> None:
            host.due = -1.0
            if host.process is process:
                process.advance(self.clock.time)
                self._changed(host)

        self.clock.later(when - self.clock.time, go_on)

    # deadlines ------------------------------------------------------------------------------------------------------

    def _asked(self) -> None:
        self.asked_at = self.clock.time

    def _tick(self) -> None:
        self.clock.later(TICK_S, self._tick)
        able = not self.api.down and any(
            operator.leads and operator.frozen_until <= self.clock.time for operator in self.operators
        )
        # A new term, or the first answer after an outage: an operator finds out with its next try, 30 s later at most.
        lives = tuple(
            (operator.uptime.since, operator.uptime.away("")) if operator.leads else None for operator in self.operators
        )
        if not able or lives != self._lives:  # deadlines count from when somebody can act
            self.able_since = self.clock.time
        self._lives = lives
        self._note_outcome()
        self._collect_garbage()
        if self.calm:
            self._restore_checkpoints()
            self._clear_away()
        self._judge_end()
        self._judge_phase()
        calm = self.calm and self.clock.time >= self.settled_at
        mild = calm or (self.schedule.pace.stall == 0.0 and self.schedule.api == ApiFaults())
        if mild and self.chaos.charge is not None and not self._has_ended():
            self.auditor.pushes.judge_wait(self.chaos.charge, max(self.able_since, self.settled_at))
        if self.rng.random() < 0.3 and self.nodes.hosts:
            host = self.rng.choice(sorted(self.nodes.hosts.values(), key=lambda host: host.uid))
            seconds, streams = self.rng.choice((0.05, 1.0, 15.0)), self.rng.random() < 0.5
            self.auditor.begin(host, seconds, streams=streams, pinned=self.rng.random() < 0.2)

    def _collect_garbage(self) -> None:
        """Pods of a fleet that is gone go, sooner or later."""
        present = self.api.fleet.metadata.uid if self.api.fleet_present else ""
        for uid, view in list(self.api.pods.items()):
            if self.api.owners.get(uid) != present and not view.deleting and self.rng.random() < COLLECTED_SHARE:
                self.nodes.delete(uid)

    def _note_outcome(self) -> None:
        charge = self.chaos.charge
        if charge is None or not charge.status.history:
            return
        for entry in charge.status.history:
            key = (charge.metadata.uid, entry.version)
            if key not in self._ended:
                self._ended.add(key)
                self.outcomes[entry.outcome.value] = self.outcomes.get(entry.outcome.value, 0) + 1

    def _judge_end(self) -> None:
        charge = self.chaos.charge
        if charge is None or self._has_ended():
            return
        bound_s = longest_s(charge.spec.deadlines)
        if self.clock.time > max(self.asked_at, self.able_since) + bound_s:
            raise BrokenPromise("always ends", f"not ended within {bound_s:g} s: {describe(self)}")

    def _judge_phase(self) -> None:
        """Each phase ends by its own deadline, counted from when somebody could act."""
        charge = self.chaos.charge
        if self._has_ended() or charge is None or charge.status.phase_started_at is None:
            return
        status = charge.status
        if status.version != charge.spec.version or status.phase not in (*SECONDS_OF, Phase.OPENING):
            return
        if status.phase is Phase.OPENING:
            seconds = OPENING_S + roll_seconds(charge, max(self.api.fleet.spec.replicas, len(self.nodes.hosts)))
        else:
            seconds = getattr(charge.spec.deadlines, SECONDS_OF[status.phase])
        began = (status.phase_started_at - NOW).total_seconds()
        if self.clock.time > max(began, self.able_since, self.asked_at) + seconds + LATE_S:
            raise BrokenPromise("always ends", f"{status.phase} has lasted since {began:.1f}: {describe(self)}")

    def _is_active(self) -> bool:
        charge, last = self.chaos.charge, self.api.fleet.status.last_finished
        if charge is None or charge.status.version != charge.spec.version:
            return False
        if charge.status.phase is Phase.FAILED:
            if last is None or last.reason != Reason.CANNOT_BE_FENCED:
                raise BrokenPromise("always ends", f"a good version failed on a healthy fleet: {describe(self)}")
            # A pod went while nobody looked: its kubelet must have had its time before anything may change.
            self._ask_for_a_good_one()
            return False
        if charge.status.phase is Phase.ACTIVE and self._wait_for_weights():
            self._ask_for_a_good_one()  # who came too late for a push is fed by the next one
            return False
        return charge.status.phase is Phase.ACTIVE and self._all_serve(charge.spec.version)

    def _stay_idle(self) -> None:
        """C31: nothing is written while nothing happens."""
        end = self.clock.time + 40.0  # what is still on its way arrives
        while self.clock.time < end:
            self._step()
        writes, end = self.api.writes, self.clock.time + IDLE_S
        while self.clock.time < end:
            self._step()
        if self.api.writes != writes:
            raise BrokenPromise("idle", f"{self.api.writes - writes} writes while nothing happened: {describe(self)}")
