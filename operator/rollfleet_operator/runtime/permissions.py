"""What the operator must be allowed to do, and a check of it at start that says precisely what is missing."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from rollfleet_operator.api.meta import API_VERSION
from rollfleet_operator.clients.certificates import CA_SECRET
from rollfleet_operator.clients.errors import NotFound
from rollfleet_operator.ports import (
    ACCESS_REVIEWS,
    CHILDREN,
    EVENTS,
    LEASES,
    NODES,
    PODS,
    ROLLOUT_ENGINES,
    SECRETS,
    SERVICE_ACCOUNTS,
    WEIGHT_VERSIONS,
    Cluster,
    Resource,
)

MAX_REVIEWS = 16  # at once
WATCHED = ("get", "list", "watch")
APPLIED = (
    "get",
    "list",
    "watch",
    "create",
    "patch",
    "delete",
)  # server-side apply is a patch, and a create where nothing is there
SERVED = ("rolloutengines", "rolloutengines/status", "weightversions", "weightversions/status")


@dataclass(frozen=True)
class Need:
    """Verbs on a kind; `name` narrows it to one object."""

    resource: Resource
    verbs: tuple[str, ...]
    subresource: str = ""
    name: str = ""


# In the cluster: a node's word may fence an engine that does not answer.
NEEDED_IN_CLUSTER = (Need(NODES, ("get",)),)
# In every namespace with fleets.
NEEDED = (
    Need(ROLLOUT_ENGINES, WATCHED),
    Need(ROLLOUT_ENGINES, ("update",), "status"),
    Need(WEIGHT_VERSIONS, WATCHED),
    Need(WEIGHT_VERSIONS, ("update",), "status"),
    Need(PODS, (*WATCHED, "create", "patch", "delete")),
    Need(SECRETS, ("get", "create", "patch")),  # the fleets' certificates
    Need(EVENTS, ("create",)),
    *(Need(child, APPLIED) for child in CHILDREN),
)


def needed_at_home(service_account: str, lease: str = "") -> tuple[Need, ...]:
    """In the operator's own namespace."""
    election = (Need(LEASES, ("create",)), Need(LEASES, ("get", "patch"), name=lease)) if lease else ()
    return (
        *election,
        Need(SECRETS, ("create",)),  # the CA: RBAC cannot narrow create by name
        Need(SECRETS, ("get", "patch"), name=CA_SECRET),
        Need(SERVICE_ACCOUNTS, ("get",), name=service_account),
        Need(SERVICE_ACCOUNTS, ("create",), "token", service_account),
    )


async def missing_kinds(cluster: Cluster) -> list[str]:
    """Which of our kinds the API server does not serve, with the cure."""
    cure = "install the chart's CRDs (kubectl apply -f crds/)"
    try:
        served = await cluster.served(API_VERSION)
    except NotFound:
        return [f"{API_VERSION} is not served: {cure}"]
    return [f"{API_VERSION} {name} is not served: {cure}" for name in SERVED if name not in served]


async def missing_permissions(
    cluster: Cluster, namespaces: Iterable[str | None], home: str, service_account: str, lease: str = ""
) -> list[str]:
    """What RBAC does not grant, one line each."""
    slots = asyncio.Semaphore(MAX_REVIEWS)
    asked: list[tuple[str | None, Need, str]] = [
        (None, need, verb) for need in NEEDED_IN_CLUSTER for verb in need.verbs
    ]
    asked += [(namespace, need, verb) for namespace in namespaces for need in NEEDED for verb in need.verbs]
    asked += [(home, need, verb) for need in needed_at_home(service_account, lease) for verb in need.verbs]

    async def one(namespace: str | None, need: Need, verb: str) -> str | None:
        async with slots:
            return None if await _is_allowed(cluster, namespace, need, verb) else _line(namespace, need, verb)

    answers = await asyncio.gather(*(one(*question) for question in asked))
    return [answer for answer in answers if answer is not None]


async def _is_allowed(cluster: Cluster, namespace: str | None, need: Need, verb: str) -> bool:
    attributes = {
        "namespace": namespace or "",
        "group": need.resource.group,
        "resource": need.resource.plural,
        "subresource": need.subresource,
        "name": need.name,
        "verb": verb,
    }
    review = {
        "apiVersion": ACCESS_REVIEWS.api_version,
        "kind": ACCESS_REVIEWS.kind,
        "spec": {"resourceAttributes": {name: value for name, value in attributes.items() if value}},
    }
    answer = await cluster.create(ACCESS_REVIEWS, None, review)
    return bool((answer.get("status") or {}).get("allowed"))


def _line(namespace: str | None, need: Need, verb: str) -> str:
    what = need.resource.plural + (f"/{need.subresource}" if need.subresource else "")
    group = need.resource.group or "core"
    name = f" {need.name}" if need.name else ""
    return f"{verb} {what}{name} (group {group}) in {'namespace ' + namespace if namespace else 'all namespaces'}"
