"""Whatever happens, the promises hold: searched for with hypothesis in the simulated cluster.

`World.check` runs after every change and asserts that whoever is open is verified at the committed version and really
holds it, so two versions are never open at once; that no transfer to another version begins while anybody answers;
that no epoch is used before it is recorded, and that committed versions only rise. Here: that every update ends in
time under each policy of spec.onFailure, that the fleet comes back once the faults stop (what is held is released by
its deletion), so that nothing is left paused without an owner, and that it is idle then.
"""

from dataclasses import dataclass, replace

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from rollfleet_operator.api.rolloutengine import Aftermath
from rollfleet_operator.api.weightversion import Deadlines, FailureType, OnFailure, Rolling, Strategy, StrategyType
from rollfleet_operator.api.weightversion import Phase as UpdatePhase
from rollfleet_operator.core.actions import Decision
from rollfleet_operator.core.observed import Observed
from rollfleet_operator.core.plan import plan
from rollfleet_operator.core.policies import OPENING_S, REOPENING_S
from rollfleet_protocol.state import FailureReason, OperationName
from tests.support.builders import NOW, make_fleet, make_observed, make_weight_version
from tests.support.simulated_engine import Temper, fault
from tests.support.simulated_world import Faults, World

DEADLINES = Deadlines(prepare_seconds=60, quiesce_seconds=30, transfer_seconds=60, verify_seconds=30)
ALL_DEADLINES_S = 60 + 60 + 30 + 60 + 30  # Pending has prepareSeconds too
ROLL_S = 4 * (30 + 60 + 30)  # four engines, one by one; a newer version waits for as long
SLACK_S = OPENING_S + REOPENING_S + 20
STEPS = (OperationName.PREPARE, OperationName.CLOSE, OperationName.TRANSFER, OperationName.VERIFY)
FIXPOINT = 4  # passes carried out whole, after which nothing may be left to record


@dataclass(frozen=True)
class Blow:
    """Something bad at a time after the bump."""

    after_s: float
    kind: str
    who: int
    seconds: float


@dataclass(frozen=True)
class Scenario:
    """What a search varies."""

    seed: int
    replicas: int
    load_s: float
    step_s: tuple[float, ...]  # how long each step takes
    faults: Faults
    bumps: tuple[tuple[tuple[Blow, ...], bool, bool], ...]  # (blows, bad checkpoint, bumped again in mid-update)
    policies: tuple[OnFailure, ...] = (OnFailure(),)  # by turns
    min_serving: int = 1
    strategies: tuple[Strategy, ...] = (Strategy(),)  # by turns
    retries: bool = False  # what failed is asked for once more


def chance(most: float) -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, most / 4, most])


POLICIES = (
    OnFailure(),
    OnFailure(type=FailureType.RETRY, max_attempts=2),
    OnFailure(type=FailureType.ROLLBACK),
    OnFailure(type=FailureType.HOLD),
)
STRATEGIES = (
    Strategy(),
    Strategy(type=StrategyType.ROLLING),
    Strategy(type=StrategyType.ROLLING, rolling=Rolling(max_unavailable=2)),
)
FAULTS = (FailureReason.TRANSFER_FAILED, FailureReason.COVERAGE_FAILED, FailureReason.CHECKPOINT_CHANGED)
KINDS = ("crash", "delete", "delete, late hook", "cut off", "fail", "skew", "restart", "down", "new operator")
blows = st.builds(
    Blow,
    after_s=st.sampled_from([0.0, 0.05, 0.15, 0.25, 0.35, 0.5, 1.0, 2.0, 5.0, 15.0]),
    kind=st.sampled_from(KINDS),
    who=st.integers(0, 3),
    seconds=st.sampled_from([1.0, 10.0, 40.0, 80.0]),
)
scenarios = st.builds(
    Scenario,
    seed=st.integers(0, 10_000),
    replicas=st.integers(1, 4),
    load_s=st.sampled_from([0.1, 1.0, 10.0]),
    step_s=st.tuples(*[st.sampled_from([0.01, 0.1, 1.0, 8.0])] * len(STEPS)),
    faults=st.builds(
        Faults,
        lose_command=chance(0.1),
        lose_answer=chance(0.2),
        delay_command=chance(0.2),
        skip_poll=chance(0.5),
        conflict=chance(0.2),
        crash_in_apply=chance(0.1),
    ),
    bumps=st.lists(
        st.tuples(st.lists(blows, max_size=3).map(tuple), st.booleans(), st.booleans()), min_size=1, max_size=3
    ).map(tuple),
    policies=st.lists(st.sampled_from(POLICIES), min_size=1, max_size=3).map(tuple),
    min_serving=st.integers(1, 2),
    strategies=st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=3).map(tuple),
    retries=st.booleans(),
)


def strike(world: World, blow: Blow, calm: list[bool]) -> None:
    """Let it happen."""
    if calm or not world.pods:
        return
    uid = sorted(world.pods)[blow.who % len(world.pods)]
    if blow.kind == "crash":
        world.crash(uid)
    elif blow.kind == "delete":
        world.delete_pod(uid)
    elif blow.kind == "delete, late hook":
        world.delete_pod(uid, hook_after_s=blow.seconds)
    elif blow.kind == "new operator":
        world.replace_operator(f"operator-{world.time}")
    elif blow.kind == "cut off":
        world.cut_off(uid, blow.seconds)
    elif blow.kind == "fail":
        step = STEPS[int(blow.seconds) % len(STEPS)]
        world.pods[uid].temper.fails[step] = fault(FAULTS[blow.who % len(FAULTS)], "boom")
    elif blow.kind == "skew":
        world.pods[uid].temper.skew = blow.seconds
    else:
        world.restart_operator(blow.seconds if blow.kind == "down" else 0.0)


def live_through(scenario: Scenario) -> World:
    """Run it, with the promises checked at every step; then let the faults stop, and see the fleet come back."""
    world = World(make_fleet(replicas=scenario.replicas), scenario.seed, load_s=scenario.load_s)
    seconds = dict(zip(STEPS, scenario.step_s, strict=True))
    world.temper = lambda: Temper(seconds=lambda step: seconds.get(step, 0.05))
    assert world.run(120, lambda: world.all_serve(0))
    world.faults = scenario.faults
    calm: list[bool] = []
    version = 0
    for hits, bad, again in scenario.bumps:
        version += 1
        if bad:
            world.store.faults[f"step-{version}"] = fault(FailureReason.CHECKPOINT_INCOMPLETE, "half-written")
        policy = scenario.policies[version % len(scenario.policies)]
        strategy = scenario.strategies[version % len(scenario.strategies)]
        spec = {
            "deadlines": DEADLINES,
            "on_failure": policy,
            "strategy": strategy,
            "min_serving": min(scenario.min_serving, scenario.replicas),
        }
        world.apply_weight_version(make_weight_version(version, **spec))
        for blow in hits:
            world.later(blow.after_s, lambda blow=blow: strike(world, blow, calm))  # type: ignore[misc]
        if again:
            world.run(0.4)
            continue
        see_it_end(world, version, policy)
        if scenario.retries and world.in_phase(UpdatePhase.FAILED):
            world.apply_weight_version(make_weight_version(version, **spec, retry_request="again"))
            see_it_begin_again(world)
            see_it_end(world, version, policy)
    calm.append(True)
    recover(world, version)
    return world


def see_it_begin_again(world: World) -> None:
    """A new request starts work: not within so many seconds, as operators go and writes fail, but by whole passes."""
    enough = world.whole_passes + FIXPOINT
    world.run(2000, lambda: not world.in_phase(UpdatePhase.FAILED) or world.whole_passes >= enough)
    assert not world.in_phase(UpdatePhase.FAILED), f"{FIXPOINT} passes were carried out and none began it"


def see_it_end(world: World, version: int, policy: OnFailure) -> None:
    """In time: deadlines count from when somebody could act, so the return of an operator begins them anew."""
    assert world.run(2000, lambda: world.ended(version)), world.status().phase
    up_since = world.settings.up_since or NOW
    counted = (world.now - max(up_since, world.status().started_at or NOW)).total_seconds()
    assert counted < policy.attempts * ALL_DEADLINES_S + 2 * ROLL_S + SLACK_S, "too late"


def recover(world: World, version: int) -> None:
    """Nothing bad happens any more."""
    world.faults = Faults()
    world.store.faults.clear()
    for pod in world.pods.values():
        pod.temper.fails.clear()
        pod.temper.skew = 0.0
        pod.cut_off_until = -1.0
    assert world.run(3 * ALL_DEADLINES_S + 2 * ROLL_S + SLACK_S, lambda: world.ended(version)), world.status().phase
    last = world.fleet.status.last_finished
    if last is not None and last.aftermath is Aftermath.HELD:
        world.weight_versions.clear()
    world.run(40, lambda: bool(odd_ones(world)))
    for uid in odd_ones(world):
        world.delete_pod(uid)  # as its status says
    committed = world.fleet.status.committed
    assert committed is not None
    assert world.run(200, lambda: is_well(world, committed.version)), world.fleet.status.engines
    world.run(30)  # commands that are still on their way arrive
    writes = world.fleet_writes, world.weight_version_writes
    world.run(60)
    assert (world.fleet_writes, world.weight_version_writes) == writes, "C31: an idle fleet is written to"
    assert world.decisions[-1] == Decision()


def odd_ones(world: World) -> list[str]:
    """Engines that answered the probe unlike the others, while they did."""
    committed = world.fleet.status.committed
    excluded = () if committed is None else committed.excluded
    told = [detail.message for detail in world.fleet.status.engines.details if "differ by" in detail.message]
    return [
        uid
        for uid, pod in world.pods.items()
        if any(pod.view.name in message for message in told)
        or (pod.process is not None and pod.process.state.incarnation in excluded)
    ]


def is_well(world: World, version: int) -> bool:
    """All serve the version, and obey the operator that there is."""
    obey = all(pod.obeys == world.settings.operator_uid for pod in world.pods.values())
    return obey and world.all_serve(version)


QUIET = Scenario(
    seed=0,
    replicas=2,
    load_s=1.0,
    step_s=(0.1, 0.1, 0.1, 0.1),
    faults=Faults(),
    bumps=(((), False, False), ((), False, False)),
)


ARM_REFUSED = Scenario(  # found by a search: an old refusal of Arm kept an engine closed for ever
    seed=4253,
    replicas=1,
    load_s=0.1,
    step_s=(1.0, 8.0, 0.01, 8.0),
    faults=Faults(lose_command=0.1, lose_answer=0.05, skip_poll=0.125, conflict=0.05, crash_in_apply=0.025),
    bumps=(
        ((), False, False),
        ((Blow(15.0, "cut off", 3, 80.0),), False, True),
        ((Blow(5.0, "fail", 0, 1.0), Blow(15.0, "cut off", 3, 80.0), Blow(0.35, "delete", 3, 1.0)), False, False),
    ),
    retries=True,
)


@given(scenarios)
@example(QUIET)
@example(ARM_REFUSED)
@example(replace(QUIET, faults=Faults(delay_command=0.3, lose_answer=0.2, skip_poll=0.3), replicas=3))
@example(replace(QUIET, bumps=(((Blow(0.25, "down", 0, 40.0), Blow(0.25, "crash", 1, 1.0)), False, False),)))
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_the_promises_hold_and_every_update_ends(scenario: Scenario) -> None:
    live_through(scenario)


class Still(World):
    """At every pass: the decision's own writes leave nothing more to write while the world stands still."""

    def _operate(self) -> float | None:
        self._poll()
        settle(self.observe(), self)
        return super()._operate()


def settle(observed: Observed, world: World) -> None:
    """Apply what is recorded, and nothing else, until nothing is."""
    for _ in range(FIXPOINT):
        decision = plan(observed, world.now)
        if decision.fleet_status is None and not decision.weight_version_statuses:
            return
        observed = with_writes(observed, decision)
    raise AssertionError(f"still writing: {decision}")


def with_writes(observed: Observed, decision: Decision) -> Observed:
    """The same world with the statuses written."""
    fleet = observed.fleet
    if decision.fleet_status is not None:
        fleet = fleet.model_copy(update={"status": decision.fleet_status.status})
    told = {write.name: write.status for write in decision.weight_version_statuses}
    weight_versions = tuple(
        each.model_copy(update={"status": told.get(each.metadata.name, each.status)})
        for each in observed.weight_versions
    )
    return replace(observed, fleet=fleet, weight_versions=weight_versions)


def test_c31_a_decision_leaves_nothing_more_to_write_while_nothing_happens() -> None:
    world = Still(make_fleet(replicas=3))
    assert world.run(60, lambda: world.all_serve(0))
    world.store.faults["step-2"] = fault(FailureReason.CHECKPOINT_INCOMPLETE, "half-written")
    for version, hit in ((1, "crash"), (2, "restart"), (3, "fail"), (4, "delete")):
        world.apply_weight_version(make_weight_version(version, deadlines=DEADLINES))
        world.run(0.3)
        strike(world, Blow(0.0, hit, version, 2.0), [])
        assert world.run(200, lambda version=version: world.ended(version))  # type: ignore[misc]
    assert world.run(60, lambda: world.all_serve(4))


def test_c31_a_healthy_fleet_of_ten_is_left_alone() -> None:
    world = World(make_fleet(replicas=10))
    assert world.run(60, lambda: world.all_serve(0))
    world.run(10)
    writes = world.fleet_writes
    decisions = len(world.decisions)
    world.run(60)
    assert world.fleet_writes == writes
    assert len(world.decisions) > decisions
    assert world.decisions[decisions:] == [Decision()] * (len(world.decisions) - decisions)


def test_c31_a_foreign_annotation_changes_nothing() -> None:
    """What others write to the metadata never reaches a decision."""
    world = World(make_fleet())
    assert world.run(60, lambda: world.all_serve(0))
    world.run(10)
    meta = world.fleet.metadata.model_copy(update={"resource_version": "999"})
    world.fleet = world.fleet.model_copy(update={"metadata": meta})
    assert plan(world.observe(), world.now) == Decision()


def test_the_same_world_gives_the_same_decision() -> None:
    observed = make_observed()
    assert plan(observed, NOW) == plan(observed, NOW)
