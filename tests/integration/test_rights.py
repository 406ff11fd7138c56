"""The operator under the chart's own RBAC: what it uses is what it was granted."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
import yaml

from examples.demo.environment import ROOT, run
from examples.demo.kubectl import kubectl
from rollfleet_operator.ports import CHILDREN, PODS, ROLLOUT_ENGINES, SERVICE_ACCOUNTS, WEIGHT_VERSIONS
from rollfleet_operator.runtime.permissions import NEEDED, NEEDED_IN_CLUSTER, needed_at_home
from tests.support.fleet import World
from tests.support.waiting import until

KINDS_OF_RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
WATCHED_BY_KOPF = {("watch", resource.plural) for resource in (ROLLOUT_ENGINES, WEIGHT_VERSIONS, PODS, *CHILDREN)}
# What this test gives no reason to do: objects are read one by one after a clash only, and children other than pods are
# deleted by the garbage collector unless the fleet wants them no more.
UNUSED_HERE = {("get", kind) for kind in ("pods", "weightversions", "nodes")} | {
    ("delete", kind)
    for kind in ("services", "serviceaccounts", "roles", "rolebindings", "deployments", "networkpolicies", "leases")
}
REQUEST = re.compile(r'rollfleet_kubernetes_request_seconds_count\{outcome="(\w+)",resource="([\w/]+)",verb="(\w+)"\}')


@pytest_asyncio.fixture
async def rights(world: World) -> AsyncIterator[list[dict[str, Any]]]:
    """Those of the chart, for the namespace; the operator is to run with them. Cluster-wide ones go at the end."""
    world.operator.service_account = f"{world.namespace}-operator"
    world.operator.arguments = (*world.operator.arguments, "--lease", world.operator.service_account)
    world.operator.arguments = (*world.operator.arguments, "--operator-pod", "app.kubernetes.io/name=rollfleet")
    documents = chart_rights(world.namespace)
    yield documents
    for document in documents:
        if document["kind"].startswith("Cluster"):
            await kubectl("delete", document["kind"], document["metadata"]["name"], "--ignore-not-found")


def chart_rights(namespace: str) -> list[dict[str, Any]]:
    """ServiceAccount, roles and bindings as the chart renders them for one namespace, under names of their own."""
    rendered = run(
        "helm", "template", "rollfleet", str(ROOT / "charts/rollfleet"), "--namespace", namespace,
        "--set", f"watchNamespaces={{{namespace}}}", "--set", "image.repository=unused",
        "--set", "rbac.aggregateToUserRoles=false", "--set", f"fullnameOverride={namespace}",
        quiet=True,
    )  # fmt: skip
    documents = [document for document in yaml.safe_load_all(rendered) if document]
    return [document for document in documents if document["kind"] in KINDS_OF_RIGHTS]


async def kubeconfig_of(world: World, folder: Path) -> Path:
    """Credentials of the operator's own ServiceAccount, and of nobody else."""
    view = json.loads(await kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    request = {"spec": {"expirationSeconds": 3600}}
    subresource = (world.operator.service_account, "token")
    answer = await world.cluster.create(SERVICE_ACCOUNTS, world.namespace, request, subresource)
    view["users"] = [{"name": view["users"][0]["name"], "user": {"token": answer["status"]["token"]}}]
    path = folder / "operator.kubeconfig"
    path.write_text(json.dumps(view), encoding="utf-8")
    return path


async def test_it_runs_under_the_charts_rights_and_uses_them_all(
    world: World, rights: list[dict[str, Any]], tmp_path: Path
) -> None:
    for document in rights:
        await kubectl("apply", "-f", "-", manifest=document)
    world.operator.kubeconfig = await kubeconfig_of(world, tmp_path)
    await world.operator.start()
    await world.create_fleet(2, router={"mode": "Enabled", "replicas": 1, "policy": "round_robin"})
    await world.serving(2)
    await world.bump(1)
    await world.active(1)
    first = (await world.pods())[0]["metadata"]["name"]
    await kubectl("label", "pod", first, "-n", world.namespace, "rollfleet.io/serving-")
    await kubectl(
        "patch", "rolloutengine", world.fleet, "-n", world.namespace, "--type=merge", "-p", '{"spec":{"replicas":1}}'
    )
    await world.serving(1)
    requests = {REQUEST.match(name): value for name, value in (await world.operator.metrics()).items()}
    used = {(match[3], match[2]) for match in requests if match and match[2] != "selfsubjectaccessreviews"}
    denied = [match[0] for match in requests if match and match[1] == "Denied"]
    assert denied == []
    account = world.operator.service_account
    needs = (*NEEDED, *NEEDED_IN_CLUSTER, *needed_at_home(account, account))
    granted = {
        (verb, need.resource.plural + (f"/{need.subresource}" if need.subresource else ""))
        for need in needs
        for verb in need.verbs
    }
    applied = {("create", resource) for verb, resource in used if verb == "patch"}  # by server-side apply
    assert used | applied | WATCHED_BY_KOPF | UNUSED_HERE == granted


async def test_missing_rights_are_named_one_by_one(world: World, rights: list[dict[str, Any]], tmp_path: Path) -> None:
    for document in rights:
        if document["kind"] == "Role" and not document["metadata"]["name"].endswith("-own"):
            for rule in document["rules"]:
                if "pods" in rule["resources"]:
                    rule["verbs"].remove("delete")
        await kubectl("apply", "-f", "-", manifest=document)
    world.operator.kubeconfig = await kubeconfig_of(world, tmp_path)
    await world.operator.launch()

    async def is_named() -> bool:
        return f"delete pods (group core) in namespace {world.namespace}" in world.operator.log()

    await until(is_named, 30, world.operator.log)
    assert await world.operator.status("/readyz") != 200
    assert await world.operator.status("/healthz") == 200
    assert "create pods" not in world.operator.log()
