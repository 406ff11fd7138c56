"""Engines that fail again and again: which are stopped, how that reads, and what heals it."""

import pytest

from rollfleet_operator.api.rolloutengine import Startup
from rollfleet_operator.api.weightversion import Phase
from rollfleet_operator.core.conditions import find
from rollfleet_operator.core.observed import PodView
from tests.support.builders import make_fleet
from tests.support.simulated_updates import bump, make_world
from tests.support.simulated_world import World

BACK_OFF_S = 10 + 20 + 40 + 80 + 160  # of the five restarts that the budget allows
DAY_S = 86_400.0
BROKEN, AGAIN, LATER = 78, 1, 75


def change_image(world: World, image: str) -> None:
    spec = world.fleet.spec.model_copy(update={"image": image})
    meta = world.fleet.metadata.model_copy(update={"generation": world.fleet.metadata.generation + 1})
    world.fleet = world.fleet.model_copy(update={"spec": spec, "metadata": meta})


def stopped(world: World) -> dict[int, str]:
    """Why, by ordinal."""
    return {pod.view.ordinal: pod.view.stopped for pod in world.pods.values() if pod.view.stopped}


def told(world: World, ordinal: int) -> tuple[str, str]:
    detail = next(each for each in world.fleet.status.engines.details if each.ordinal == ordinal)
    return detail.state, detail.message


def serving(world: World, count: int) -> bool:
    return world.fleet.status.serving_replicas == count


def one_of_three(code: int) -> World:
    """Engine 2 of a fleet that serves is deleted, and its successor can't start."""
    world = make_world(replicas=3)
    world.doom = lambda pod: code if pod.ordinal == 2 else None
    world.delete_pod(world.uid_of(2))
    return world


def test_past_its_budget_an_engine_is_stopped_and_kept() -> None:
    world = one_of_three(AGAIN)
    assert not world.run(BACK_OFF_S, lambda: bool(stopped(world)))
    assert world.run(60, lambda: set(stopped(world)) == {2})
    world.run(5)
    state, text = told(world, 2)
    assert state == "Broken"
    assert text.startswith("RestartBudgetSpent: it failed 6 times without serving in between")
    assert "exit code 1: CrashLoopBackOff; Error: why it ended with 1" in text, "in its own words"
    name = world.pods[world.uid_of(2)].view.name
    assert f"kubectl delete pod {name} -n rl" in text
    assert serving(world, 2)
    uids = set(world.pods)
    world.run(DAY_S / 24)
    assert set(world.pods) == uids, "nobody is made in its place"


def test_exit_code_78_stops_it_at_once() -> None:
    world = one_of_three(BROKEN)
    assert world.run(15, lambda: set(stopped(world)) == {2})
    world.run(5)
    assert told(world, 2)[1].startswith("CannotStart: a restart cures nothing; exit code 78: ")
    assert world.pods[world.uid_of(2)].view.restarts <= 1


def test_exit_code_75_is_tried_for_ever() -> None:
    world = one_of_three(LATER)
    world.run(DAY_S / 24)
    assert stopped(world) == {}
    world.doom = lambda _: None
    assert world.run(330, lambda: world.all_serve(0))


def test_it_survives_an_operator_that_restarts() -> None:
    world = one_of_three(BROKEN)
    assert world.run(15, lambda: bool(stopped(world)))
    uids = set(world.pods)
    world.restart_operator(down_s=5)
    world.run(600)
    assert set(world.pods) == uids
    assert told(world, 2)[1].startswith("CannotStart")


def test_deleting_the_pod_tries_again() -> None:
    world = one_of_three(BROKEN)
    assert world.run(15, lambda: bool(stopped(world)))
    world.doom = lambda _: None
    world.delete_pod(world.uid_of(2))
    assert world.run(30, lambda: world.all_serve(0) and serving(world, 3))


def test_another_template_heals_it_at_once() -> None:
    """A wrong image in one slot: a right one must come without anybody's help, while the others serve."""
    world = make_world(replicas=3)
    bad = "registry.example/engine:bad"
    hashes: list[str] = []
    good = {pod.view.template_hash for pod in world.pods.values()}

    def doom(pod: PodView) -> int | None:
        if pod.template_hash in good:
            return None
        hashes.append(pod.template_hash)
        return BROKEN

    world.doom = doom
    change_image(world, bad)
    assert world.run(60, lambda: bool(stopped(world)))
    world.run(300)
    assert list(stopped(world)) == [2], "one engine tried it, the others were left alone"
    assert len(world.open_versions()) == 2
    world.doom = lambda _: None
    change_image(world, "registry.example/engine:good")
    while not (world.all_serve(0) and not stopped(world)):
        world.step()
        assert len(world.open_versions()) >= 2
    assert set(hashes) == {hashes[0]}


def test_a_template_that_never_served_stops_the_whole_fleet_and_says_why() -> None:
    world = World(make_fleet(replicas=2))
    world.doom = lambda _: BROKEN
    assert world.run(15, lambda: set(stopped(world)) == {0, 1})
    world.run(5)
    available = find(world.fleet.status.conditions, "Available")
    assert available is not None
    assert (available.status, available.reason) == ("False", "CannotStart")
    assert "exit code 78" in available.message
    writes = world.fleet_writes
    world.run(DAY_S / 24)
    assert world.fleet_writes == writes, "a fleet that is stopped costs nothing"


@pytest.mark.parametrize("code", [AGAIN, BROKEN])
def test_a_cause_that_all_share_and_that_passes_takes_nobody_down_for_good(code: int) -> None:
    """The model's volume is away, and all engines restart meanwhile."""
    world = make_world(replicas=3)
    world.doom = lambda _: code
    for uid in list(world.pods):
        world.crash(uid)
    world.run(3 * 3600.0)
    assert stopped(world) == {}
    assert serving(world, 0)
    assert "no engine of this template is up" in told(world, 0)[1]
    world.doom = lambda _: None
    assert world.run(330, lambda: world.all_serve(0)), "within the kubelet's longest back-off"


def test_what_failed_before_it_served_counts_no_more() -> None:
    world = make_world(replicas=2)
    for _ in range(12):
        world.crash(world.uid_of(1))
        assert world.run(30, lambda: world.all_serve(0) and serving(world, 2))
        world.run(1)
    assert world.pods[world.uid_of(1)].view.restarts == 12
    assert stopped(world) == {}
    world.doom = lambda pod: AGAIN if pod.ordinal == 1 else None
    world.crash(world.uid_of(1))
    four_tries_s = 4 * 300  # after so many restarts the kubelet's back-off is at its longest
    assert not world.run(four_tries_s - 60, lambda: bool(stopped(world))), "its budget is whole again"
    assert world.run(120, lambda: set(stopped(world)) == {1})


def test_a_budget_of_none() -> None:
    world = make_world(replicas=2)
    spec = world.fleet.spec.model_copy(update={"startup": Startup(restart_budget=0)})
    world.fleet = world.fleet.model_copy(update={"spec": spec})
    world.doom = lambda pod: AGAIN if pod.ordinal == 1 else None
    world.crash(world.uid_of(1))
    assert world.run(15, lambda: set(stopped(world)) == {1})


def test_scaled_down_and_up_again_it_is_tried_anew() -> None:
    world = one_of_three(BROKEN)
    assert world.run(15, lambda: bool(stopped(world)))
    world.doom = lambda _: None
    for replicas in (2, 3):
        spec = world.fleet.spec.model_copy(update={"replicas": replicas})
        world.fleet = world.fleet.model_copy(update={"spec": spec})
        assert world.run(30, lambda: world.all_serve(0))


@pytest.mark.parametrize("phase", [Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING])
def test_nobody_is_stopped_or_replaced_in_mid_update(phase: Phase) -> None:
    world = one_of_three(BROKEN)
    bump(world, 1)
    assert world.run(30, lambda: world.in_phase(phase))
    world.doom = lambda _: BROKEN
    world.crash(world.uid_of(1))
    change_image(world, "registry.example/engine:2")
    before = {uid: pod.view.stopped for uid, pod in world.pods.items()}
    while world.status().phase in (Phase.QUIESCING, Phase.TRANSFERRING, Phase.VERIFYING, Phase.OPENING):
        assert {uid: pod.view.stopped for uid, pod in world.pods.items()} == before
        world.step()
    assert world.run(200, lambda: world.ended(1))
