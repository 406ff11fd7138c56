"""Engines that can't start, by a real kubelet's word; and what the API server does not take."""

from examples.demo.kubectl import kubectl
from rollfleet_operator.ports import PODS, ROLLOUT_ENGINES, SERVICE_ACCOUNTS, Manifest, Resource
from tests.support.fleet import World
from tests.support.waiting import until

QUOTAS = Resource("v1", "ResourceQuota", "resourcequotas")


def condition(fleet: Manifest, kind: str) -> Manifest:
    conditions = (fleet.get("status") or {}).get("conditions") or ()
    return next((dict(one) for one in conditions if one["type"] == kind), {})


async def reason(world: World, kind: str, wanted: str, within_s: float) -> Manifest:
    """Wait for a condition of the fleet to have this reason."""
    last: Manifest = {}

    async def is_told() -> bool:
        nonlocal last
        last = condition(await world.read_fleet(), kind)
        return bool(last.get("reason") == wanted)

    await until(is_told, within_s, lambda: f"{last}\n{world.operator.log()[-4000:]}")
    return last


async def stopped(world: World, within_s: float) -> Manifest:
    """Wait until the fleet's one pod is stopped by its kubelet."""
    found: list[Manifest] = []

    async def is_stopped() -> bool:
        found[:] = await world.pods()
        return [pod["status"]["phase"] for pod in found] == ["Failed"]

    await until(is_stopped, within_s, lambda: f"{[pod['status'] for pod in found]}\n{world.operator.log()[-4000:]}")
    return found[0]


async def change(world: World, **spec: object) -> None:
    await world.cluster.merge_patch(ROLLOUT_ENGINES, world.namespace, world.fleet, {"spec": spec})


async def test_exit_code_78_stops_an_engine_at_once_and_a_changed_spec_heals_it(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(1, model={"path": "no-such-model", "servedName": "policy"})
    pod = await stopped(world, 60)
    assert pod["status"]["reason"] == "DeadlineExceeded"
    told = await reason(world, "Available", "CannotStart", 10)
    assert "exit code 78" in told["message"]
    assert "no-such-model" in told["message"]
    name = pod["metadata"]["name"]
    assert "no-such-model" in await kubectl("logs", name, "-n", world.namespace, "-c", "engine")
    await world.operator.kill()
    await world.operator.start()
    await change(world, drainTimeoutSeconds=1)  # nothing new: a pass, and no pod
    await reason(world, "Available", "CannotStart", 10)
    assert [each["metadata"]["uid"] for each in await world.pods()] == [pod["metadata"]["uid"]]
    await change(world, model={"path": "base"})
    await world.serving(1)


async def test_an_engine_past_its_restart_budget_is_stopped_and_deleting_its_pod_tries_again(world: World) -> None:
    """Python itself refuses to start, with exit code 1."""
    await world.operator.start()
    budget = {"timeoutSeconds": 600, "restartBudget": 1}
    nonsense = [{"name": "PYTHONHASHSEED", "value": "nonsense"}]
    await world.create_fleet(1, env=nonsense, startup=budget)
    pod = await stopped(world, 60)
    told = await reason(world, "Available", "RestartBudgetSpent", 10)
    assert "it failed 2 times without serving in between (spec.startup.restartBudget 1)" in told["message"]
    assert "exit code 1" in told["message"]
    assert f"kubectl delete pod {pod['metadata']['name']}" in told["message"]
    await world.cluster.delete(PODS, world.namespace, pod["metadata"]["name"])

    async def another() -> bool:
        uids = [each["metadata"]["uid"] for each in await world.pods()]
        return len(uids) == 1 and uids != [pod["metadata"]["uid"]]

    await until(another, 30, world.operator.log)


async def test_a_quota_is_told_in_the_fleets_status_and_passes_with_it(world: World) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    await world.cluster.create(QUOTAS, world.namespace, quota)
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(1)
    told = await reason(world, "Degraded", "ApplyFailed", 15)
    assert "exceeded quota: few" in told["message"]
    assert condition(await world.read_fleet(), "Available")["message"] == "1 of 2 engines serve version 0"
    await world.cluster.delete(QUOTAS, world.namespace, "few")
    await world.serving(2)
    await reason(world, "Degraded", "AllWell", 15)


async def test_what_keeps_all_pods_away_is_the_reason_why_the_fleet_is_not_available(world: World) -> None:
    account = "no-such-account"
    await world.operator.start()
    await world.create_fleet(1, serviceAccountName=account)
    told = await reason(world, "Available", "ApplyFailed", 15)
    assert account in told["message"]
    await world.cluster.create(SERVICE_ACCOUNTS, world.namespace, {"metadata": {"name": account}})
    await world.serving(1)


async def test_a_place_that_no_node_has_is_told_in_the_schedulers_words_once(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(1, nodeSelector={"rollfleet.test/nowhere": "yes"})
    told = await reason(world, "Available", "Unschedulable", 15)
    assert "nodes are available" in told["message"]
    degraded = await reason(world, "Degraded", "EnginesNotWell", 15)
    assert "is Unschedulable: 0/" in degraded["message"]
    await change(world, nodeSelector=None)
    await world.serving(1)
