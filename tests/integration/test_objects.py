"""What a RolloutEngine brings into being, and that it goes away with it."""

import pytest

from rollfleet_operator.api.meta import FIELD_MANAGER
from rollfleet_operator.ports import (
    DEPLOYMENTS,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    ROLLOUT_ENGINES,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    Manifest,
)
from tests.support.fleet import World
from tests.support.waiting import until

ENGINES, CLIENTS, ROUTER, TLS = "qwen-engines", "qwen", "qwen-router", "qwen-engine-tls"


def owner_uids(manifest: Manifest) -> list[str]:
    return [owner["uid"] for owner in manifest["metadata"].get("ownerReferences", ())]


def managers(manifest: Manifest) -> set[str]:
    return {entry["manager"] for entry in manifest["metadata"]["managedFields"] if entry.get("subresource") != "status"}


async def test_a_fleet_gets_its_objects_and_takes_them_along(world: World) -> None:
    await world.operator.start()
    fleet = await world.create_fleet(2, router={"mode": "Enabled", "replicas": 1, "policy": "round_robin"})
    await world.serving(2)
    expected = [
        (SERVICES, ENGINES),
        (SERVICES, CLIENTS),
        (SECRETS, TLS),
        (SERVICE_ACCOUNTS, ROUTER),
        (ROLES, ROUTER),
        (ROLE_BINDINGS, ROUTER),
        (DEPLOYMENTS, ROUTER),
    ]
    children = [await world.cluster.get(resource, world.namespace, name) for resource, name in expected]
    pods = await world.pods()
    assert [pod["metadata"]["name"].rsplit("-", 1)[0] for pod in pods] == ["qwen-0-0", "qwen-1-0"]
    for child in (*children, *pods):
        where = f"{child.get('kind')} {child['metadata']['name']}"
        assert owner_uids(child) == [fleet["metadata"]["uid"]], where
        assert FIELD_MANAGER in managers(child), where
        assert not child["metadata"].get("finalizers"), where
    stored = await world.read_fleet()
    assert not stored["metadata"].get("finalizers")
    assert not stored["metadata"].get("annotations")
    await world.cluster.delete(ROLLOUT_ENGINES, world.namespace, world.fleet)
    await world.gone()


async def staying(world: World) -> set[str]:
    """Names of pods that are not being deleted."""
    return {pod["metadata"]["name"] for pod in await world.pods() if "deletionTimestamp" not in pod["metadata"]}


async def test_a_deleted_pod_is_replaced_and_a_smaller_fleet_has_fewer(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(2)
    first, second = await world.pods()
    await world.cluster.delete(PODS, world.namespace, first["metadata"]["name"])

    async def replaced() -> bool:
        return len(await staying(world)) == 2

    await until(replaced, 30, world.operator.log)
    await world.serving(2)
    names = await staying(world)
    assert second["metadata"]["name"] in names
    assert first["metadata"]["name"] not in names
    await world.cluster.merge_patch(ROLLOUT_ENGINES, world.namespace, world.fleet, {"spec": {"replicas": 1}})
    await world.serving(1)

    async def one_left() -> bool:
        return len(await world.pods()) == 1

    await until(one_left, 60)


async def in_the_serving_set(world: World) -> bool:
    """All pods, by their labels, which may come after the status."""
    return all("rollfleet.io/serving" in pod["metadata"]["labels"] for pod in await world.pods())


@pytest.mark.parametrize("label", ["rollfleet.io/serving", "rollfleet.io/fleet", "rollfleet.io/component"])
async def test_c05_a_removed_label_is_restored(world: World, label: str) -> None:
    """Any of them: a pod that no selector finds any more serves all the same, and must not be lost sight of."""
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(2)
    await until(lambda: in_the_serving_set(world), 20, world.operator.log)
    victim, other = await world.pods()
    name = victim["metadata"]["name"]
    removed = await world.cluster.merge_patch(PODS, world.namespace, name, {"metadata": {"labels": {label: None}}})
    assert label not in removed["metadata"]["labels"]

    async def restored() -> bool:
        pod = await world.cluster.get(PODS, world.namespace, name)
        return bool(pod["metadata"]["labels"].get(label) == victim["metadata"]["labels"][label])

    await until(restored, 20, world.operator.log)
    assert (await world.read_fleet())["status"]["servingReplicas"] == 2
    assert [pod["metadata"]["uid"] for pod in await world.pods()] == [pod["metadata"]["uid"] for pod in (victim, other)]
    await world.bump(1)
    await world.active(1)


async def test_c05_a_label_removed_while_the_operator_is_away_is_restored(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(1)
    await world.serving(1)
    await until(lambda: in_the_serving_set(world), 20, world.operator.log)
    (pod,) = await world.pods()
    await world.operator.kill()
    bare = {"metadata": {"labels": {"rollfleet.io/fleet": None}}}
    await world.cluster.merge_patch(PODS, world.namespace, pod["metadata"]["name"], bare)
    await world.operator.start()
    await world.bump(1)
    await world.active(1)
    (again,) = await world.pods()
    assert again["metadata"]["uid"] == pod["metadata"]["uid"]
    assert again["metadata"]["labels"] == pod["metadata"]["labels"]


async def test_children_that_were_edited_or_deleted_come_back(world: World) -> None:
    await world.operator.start()
    await world.create_fleet(1)
    await world.serving(1)
    service = await world.cluster.get(SERVICES, world.namespace, ENGINES)
    edited = {"spec": {"selector": {"rollfleet.io/fleet": "another"}}}
    await world.cluster.merge_patch(SERVICES, world.namespace, ENGINES, edited)

    async def selector_is_back() -> bool:
        now = await world.cluster.get(SERVICES, world.namespace, ENGINES)
        return bool(now["spec"]["selector"] == service["spec"]["selector"])

    await until(selector_is_back, 15, world.operator.log)
    await world.cluster.delete(SERVICES, world.namespace, ENGINES)

    async def is_back() -> bool:
        return ENGINES in [
            item["metadata"]["name"] for item in (await world.cluster.list(SERVICES, world.namespace)).items
        ]

    await until(is_back, 15, world.operator.log)
    await world.cluster.delete(SECRETS, world.namespace, TLS)

    async def secret_is_back() -> bool:
        return TLS in [item["metadata"]["name"] for item in (await world.cluster.list(SECRETS, world.namespace)).items]

    await until(secret_is_back, 15, world.operator.log)


async def test_a_foreign_secret_of_that_name_is_left_alone_and_said(world: World) -> None:
    foreign = {"metadata": {"name": TLS, "namespace": world.namespace}, "stringData": {"mine": "yes"}}
    created = await world.cluster.create(SECRETS, world.namespace, foreign)
    await world.operator.start()
    await world.create_fleet(1)
    read = world.events_of("ApplyFailed")

    async def is_said() -> bool:
        return any("qwen-engine-tls is not the operator's" in event["note"] for event in await read())

    await until(is_said, 20, world.operator.log)
    stored = await world.cluster.get(SECRETS, world.namespace, TLS)
    assert stored["metadata"]["resourceVersion"] == created["metadata"]["resourceVersion"]


async def test_a_pod_that_lost_its_owner_while_the_operator_is_away_takes_part_in_the_next_update(world: World) -> None:
    await world.operator.start()
    fleet = await world.create_fleet(1)
    await world.serving(1)
    (pod,) = await world.pods()
    await world.operator.kill()
    orphaned = {"metadata": {"ownerReferences": []}}
    await world.cluster.merge_patch(PODS, world.namespace, pod["metadata"]["name"], orphaned)
    await world.operator.start()
    await world.bump(1)
    await world.active(1)
    (again,) = await world.pods()
    assert again["metadata"]["uid"] == pod["metadata"]["uid"]
    assert owner_uids(again) == [fleet["metadata"]["uid"]]
