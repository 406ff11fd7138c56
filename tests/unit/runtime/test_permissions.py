"""What is missing is named precisely."""

from collections.abc import Mapping

from rollfleet_operator.clients.errors import NotFound
from rollfleet_operator.ports import Manifest, Resource
from rollfleet_operator.runtime.permissions import NEEDED, NEEDED_IN_CLUSTER, SERVED, missing_kinds, missing_permissions
from tests.support.cluster import MemoryCluster


class Judge(MemoryCluster):
    """Answers reviews, and says what is served."""

    def __init__(self, denied: tuple[tuple[str, str], ...] = (), served: tuple[str, ...] | None = SERVED) -> None:
        super().__init__()
        self.denied, self.kinds = denied, served
        self.asked: list[Manifest] = []

    async def create(
        self, resource: Resource, namespace: str | None, manifest: Manifest, subresource: tuple[str, str] | None = None
    ) -> Manifest:
        attributes = manifest["spec"]["resourceAttributes"]
        self.asked.append(attributes)
        return {"status": {"allowed": (attributes["verb"], attributes["resource"]) not in self.denied}}

    async def served(self, api_version: str) -> Mapping[str, frozenset[str]]:
        if self.kinds is None:
            raise NotFound(f"discovery of {api_version}: the server could not find the requested resource (HTTP 404)")
        return dict.fromkeys(self.kinds, frozenset({"get"}))


async def test_nothing_is_missing() -> None:
    judge = Judge()
    assert await missing_permissions(judge, ("rl",), "rollfleet", "operator") == []
    assert await missing_kinds(judge) == []


async def test_each_missing_verb_is_a_line_for_each_namespace() -> None:
    judge = Judge(denied=(("delete", "pods"),))
    assert await missing_permissions(judge, ("rl", "rl-2"), "rollfleet", "operator") == [
        "delete pods (group core) in namespace rl",
        "delete pods (group core) in namespace rl-2",
    ]


async def test_all_namespaces_are_asked_for_as_such() -> None:
    judge = Judge(denied=(("update", "rolloutengines"),))
    assert await missing_permissions(judge, (None,), "rollfleet", "operator") == [
        "update rolloutengines/status (group rollfleet.io) in all namespaces"
    ]
    in_fleets = sum(len(need.verbs) for need in (*NEEDED, *NEEDED_IN_CLUSTER))
    assert [review.get("namespace") for review in judge.asked].count(None) == in_fleets


async def test_what_is_needed_at_home_is_narrowed_by_name() -> None:
    judge = Judge(denied=(("create", "serviceaccounts"), ("get", "secrets"), ("patch", "secrets")))
    lines = await missing_permissions(judge, (), "rollfleet", "operator")
    assert lines == [
        "get secrets rollfleet-ca (group core) in namespace rollfleet",
        "patch secrets rollfleet-ca (group core) in namespace rollfleet",
        "create serviceaccounts/token operator (group core) in namespace rollfleet",
    ]


async def test_crds_that_are_missing_are_named_with_the_cure() -> None:
    (line,) = await missing_kinds(Judge(served=SERVED[:-1]))
    assert "weightversions/status is not served: install the chart's CRDs" in line
    (line,) = await missing_kinds(Judge(served=None))
    assert "rollfleet.io/v1alpha1 is not served" in line
