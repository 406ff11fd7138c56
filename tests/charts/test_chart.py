"""The chart: strict values, legal objects in every combination, exactly the rights that the operator uses."""

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rollfleet_operator.api.crd import KINDS, build_crd
from rollfleet_operator.ports import Resource
from rollfleet_operator.runtime.options import parse
from rollfleet_operator.runtime.permissions import NEEDED, NEEDED_IN_CLUSTER, Need, needed_at_home
from tests.support.helm import CHART, HelmError, helm, render

Object = dict[str, Any]
IMAGE = {"image": {"repository": "registry.example/rollfleet-operator"}}
KUBERNETES = "1.33"  # the oldest that the chart takes


def merged(*parts: Mapping[str, Any]) -> Object:
    whole: Object = {}
    for part in parts:
        for key, value in part.items():
            nested = isinstance(value, dict) and isinstance(whole.get(key), dict)
            whole[key] = merged(whole[key], value) if nested else value
    return whole


def one(objects: list[Object], kind: str, name: str | None = None) -> Object:
    found = [o for o in objects if o["kind"] == kind and name in {None, o["metadata"]["name"]}]
    assert len(found) == 1, [o["metadata"]["name"] for o in found]
    return found[0]


MATRIX: tuple[tuple[Object, ...], ...] = (
    ({}, {"watchNamespaces": ["rl", "rl-2", "rl"]}),
    ({}, {"crds": {"keep": False}}, {"crds": {"enabled": False}}),
    (
        {},
        {"rbac": {"create": False, "aggregateToUserRoles": False}, "replicaCount": 2},
        {"rbac": {"askEnginesRole": {"create": True}}},
    ),
    (
        {},
        {
            "fullnameOverride": "fleet-operator",
            "podDisruptionBudget": {"enabled": False},
            "image": {"digest": f"sha256:{'a' * 64}", "pullPolicy": "Never"},
            "imagePullSecrets": [{"name": "registry"}],
            "hostPathVolumes": {"allowed": True},
            "networkPolicy": {"enabled": False},
            "operatorName": "canary",
            "logLevel": "debug",
            "serviceAccount": {"keep": False, "annotations": {"a": "b"}},
            "metrics": {"service": {"port": 9000, "annotations": {"a": "b"}}},
            "resources": {"limits": {"cpu": 2}},
            "nodeSelector": {"kubernetes.io/arch": "arm64"},
            "tolerations": [{"key": "k", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "system-cluster-critical",
            "podAnnotations": {"a": "b"},
            "podLabels": {"a": "b"},
        },
    ),
)
COMBINATIONS = [merged(IMAGE, *parts) for parts in itertools.product(*MATRIX)]


def test_lint() -> None:
    helm("lint", "--strict", str(CHART), "--set", "image.repository=r")


@pytest.mark.parametrize("values", COMBINATIONS, ids=range(len(COMBINATIONS)))
def test_every_combination_renders_legal_objects(values: Object) -> None:
    objects = render(values)
    names = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(names) == len(set(names)), "an object is rendered twice"
    for document in objects:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_every_value_is_in_the_matrix_or_the_defaults() -> None:
    """A value that no test sets could be dead."""

    def leaves(value: Any, path: str = "") -> set[str]:
        if isinstance(value, dict) and value:
            return {leaf for key, child in value.items() for leaf in leaves(child, f"{path}.{key}")}
        return {path}

    set_somewhere = {leaf for row in MATRIX for option in row for leaf in leaves(option)}
    all_values = leaves(yaml.safe_load((CHART / "values.yaml").read_text()))
    tested_alone = {".image.repository", ".image.tag", ".router.image", ".metrics.service.enabled", ".nameOverride"}
    missing = {
        leaf
        for leaf in all_values - tested_alone
        if not any(leaf == given or given.startswith(f"{leaf}.") for given in set_somewhere)
    }
    assert missing - {".resources.requests.cpu", ".resources.requests.memory", ".resources.limits.memory"} == set()


def test_values_and_their_schema_name_the_same_keys() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values: Any, part: Object, path: str) -> None:
        if part.get("additionalProperties") is not False or path == ".resources":
            return
        assert set(values) | {"global"} == set(part["properties"]) | {"global"}, path
        for key, child in values.items():
            compare(child, part["properties"][key], f"{path}.{key}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"image": {"repositry": "x"}}, "repositry"),
        ({"watchNamespace": "rl"}, "watchNamespace"),
        ({"watchNamespaces": ["Not_A_Name"]}, "watchNamespaces"),
        ({"hostPathVolumes": {"allowed": "yes"}}, "hostPathVolumes/allowed"),
        ({"operatorName": "No Label"}, "operatorName"),
        ({"replicas": 2}, "replicas"),
        ({"replicaCount": 0}, "replicaCount"),
        ({"replicaCount": "2"}, "replicaCount"),
        ({"podDisruptionBudget": {"minAvailable": 1}}, "minAvailable"),
        ({"logLevel": "loud"}, "logLevel"),
        ({"image": {"digest": "sha256:short"}}, "image/digest"),
        ({"crds": None}, "crds"),
    ],
)
def test_unknown_or_illegal_value_is_refused_by_name(values: Object, words: str) -> None:
    with pytest.raises(HelmError, match=re.escape(words)):
        render(merged(IMAGE, values))


def test_a_missing_image_is_named_with_its_cure() -> None:
    with pytest.raises(HelmError, match=r"image\.repository must be set.*Dockerfile\.operator"):
        render({})


def verbs(role: Object) -> set[tuple[str, str, str, str]]:
    """(group, resource, name, verb) of all rules."""
    return {
        (group, resource, name, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }


def wanted(needs: tuple[Need, ...]) -> set[tuple[str, str, str, str]]:
    def resource(need: Need) -> str:
        kind: Resource = need.resource
        return f"{kind.plural}/{need.subresource}" if need.subresource else kind.plural

    return {(need.resource.group, resource(need), need.name, verb) for need in needs for verb in need.verbs}


def test_rights_are_exactly_those_that_the_operator_asks_for() -> None:
    objects = render(IMAGE)
    assert verbs(one(objects, "ClusterRole", "rollfleet-operator")) == wanted(NEEDED)
    assert verbs(one(objects, "ClusterRole", "rollfleet-operator-nodes-system")) == wanted(NEEDED_IN_CLUSTER)
    own = one(objects, "Role", "rollfleet-operator-own")
    assert own["metadata"]["namespace"] == "system"
    assert verbs(own) == wanted(needed_at_home("rollfleet-operator", "rollfleet-operator"))


def test_watched_namespaces_get_a_role_each_and_the_cluster_one_for_nodes() -> None:
    objects = render(merged(IMAGE, {"watchNamespaces": ["rl", "rl-2"]}))
    roles = {o["metadata"]["namespace"]: o for o in objects if o["kind"] == "Role"}
    assert set(roles) == {"rl", "rl-2", "system"}
    assert verbs(roles["rl"]) == verbs(roles["rl-2"]) == wanted(NEEDED)
    assert render(merged(IMAGE, {"watchNamespaces": None})) == render(IMAGE), "null is no namespace in particular"
    names = {o["metadata"]["name"] for o in objects if o["kind"] in {"ClusterRole", "ClusterRoleBinding"}}
    assert names == {"rollfleet-view", "rollfleet-edit", "rollfleet-operator-nodes-system"}
    assert verbs(one(objects, "ClusterRole", "rollfleet-operator-nodes-system")) == wanted(NEEDED_IN_CLUSTER)


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["rl"]}], ids=["cluster", "namespaced"])
def test_bindings_lead_from_the_pods_account_to_the_roles(values: Object) -> None:
    objects = render(merged(IMAGE, values))
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    assert one(objects, "ServiceAccount")["metadata"]["name"] == pod["serviceAccountName"]
    roles = {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects if "rules" in o}
    bindings = [o for o in objects if o["kind"].endswith("Binding")]
    assert len(bindings) == 3
    for binding in bindings:
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": "system"}
        ]
        reference = binding["roleRef"]
        namespace = binding["metadata"].get("namespace") if reference["kind"] == "Role" else None
        assert (reference["kind"], namespace, reference["name"]) in roles


def test_users_may_work_on_our_kinds_but_never_on_status() -> None:
    objects = render(IMAGE)
    edit = one(objects, "ClusterRole", "rollfleet-edit")
    view = one(objects, "ClusterRole", "rollfleet-view")
    assert {verb for _, _, _, verb in verbs(view)} == {"get", "list", "watch"}
    assert not {resource for _, resource, _, _ in verbs(edit)} & {"rolloutengines/status", "weightversions/status"}
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]


def test_people_may_get_a_role_for_the_operators_tokens_and_nothing_else() -> None:
    name = "rollfleet-ask-engines"
    assert not [each for each in render(IMAGE) if each["metadata"]["name"] == name]
    objects = render(merged(IMAGE, {"rbac": {"askEnginesRole": {"create": True}}}))
    account = one(objects, "ServiceAccount")["metadata"]["name"]
    (rule,) = one(objects, "Role", name)["rules"]
    assert rule == {
        "apiGroups": [""],
        "resources": ["serviceaccounts/token"],
        "resourceNames": [account],
        "verbs": ["create"],
    }
    bound = [each["roleRef"]["name"] for each in objects if each["kind"] == "RoleBinding"]
    assert name not in bound


@pytest.mark.parametrize(
    ("values", "namespaces", "host_path", "name"),
    [
        ({}, (), False, ""),
        (
            {"watchNamespaces": ["rl"], "hostPathVolumes": {"allowed": True}, "operatorName": "canary"},
            ("rl",),
            True,
            "canary",
        ),
    ],
)
def test_the_operator_understands_its_arguments(
    monkeypatch: pytest.MonkeyPatch, values: Object, namespaces: tuple[str, ...], host_path: bool, name: str
) -> None:
    container = one(render(merged(IMAGE, {"router": {"image": "r:1"}}, values)), "Deployment")["spec"]["template"][
        "spec"
    ]["containers"][0]
    paths = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"]}
    assert paths == {
        "POD_NAMESPACE": "metadata.namespace",
        "POD_UID": "metadata.uid",
        "SERVICE_ACCOUNT_NAME": "spec.serviceAccountName",
    }
    monkeypatch.setenv("POD_NAMESPACE", "system")
    monkeypatch.setenv("POD_UID", "7e1c")
    monkeypatch.setenv("SERVICE_ACCOUNT_NAME", "rollfleet-operator")
    options = parse(container["args"])
    assert options.namespaces == namespaces
    assert options.allow_host_path == host_path
    assert options.name == name
    assert options.router_image == "r:1"
    assert (options.lease, options.identity) == ("rollfleet-operator", "7e1c")
    assert options.listen_port == container["ports"][0]["containerPort"]
    assert options.kubeconfig is None


@pytest.mark.parametrize("values", [{}, {"nameOverride": "fleets"}, {"podLabels": {"a": "b"}}])
def test_network_policies_let_in_the_operators_own_pods(values: Object) -> None:
    template = one(render(merged(IMAGE, values)), "Deployment")["spec"]["template"]
    told = parse([*template["spec"]["containers"][0]["args"], "--operator-namespace=system", "--service-account=x"])
    assert len(told.operator_pods) == 2
    assert dict(told.operator_pods).items() <= template["metadata"]["labels"].items()
    off = one(render(merged(IMAGE, values, {"networkPolicy": {"enabled": False}})), "Deployment")
    arguments = off["spec"]["template"]["spec"]["containers"][0]["args"]
    assert not [each for each in arguments if "operator-pod" in each]


def test_the_operators_pod_is_locked_down() -> None:
    """What the Pod Security Standard "restricted" asks for, and a read-only root."""
    deployment = one(render(IMAGE), "Deployment")["spec"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}
    pod = deployment["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


def test_one_replica_is_replaced_and_several_roll() -> None:
    single = render(IMAGE)
    assert one(single, "Deployment")["spec"]["replicas"] == 1
    assert "affinity" not in one(single, "Deployment")["spec"]["template"]["spec"]
    assert not [o for o in single if o["kind"] == "PodDisruptionBudget"]
    several = render(merged(IMAGE, {"replicaCount": 2}))
    deployment, budget = one(several, "Deployment")["spec"], one(several, "PodDisruptionBudget")["spec"]
    assert (deployment["replicas"], deployment["strategy"]["type"]) == (2, "RollingUpdate")
    (preferred,) = deployment["template"]["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert preferred["podAffinityTerm"]["labelSelector"] == budget["selector"] == deployment["selector"]
    assert budget["maxUnavailable"] == 1
    theirs = {"nodeAffinity": {}}
    placed = render(merged(IMAGE, {"replicaCount": 2, "affinity": theirs, "podDisruptionBudget": {"enabled": False}}))
    assert one(placed, "Deployment")["spec"]["template"]["spec"]["affinity"] == theirs
    assert not [o for o in placed if o["kind"] == "PodDisruptionBudget"]


def test_crds_come_and_stay_as_the_values_say() -> None:
    def crds(**values: bool) -> dict[str, Object]:
        objects = render(merged(IMAGE, {"crds": values}))
        return {o["metadata"]["name"]: o for o in objects if o["kind"] == "CustomResourceDefinition"}

    kept = crds(enabled=True, keep=True)
    assert {name: crd["spec"] for name, crd in kept.items()} == {k.crd_name: build_crd(k)["spec"] for k in KINDS}
    assert all(c["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"} for c in kept.values())
    assert all("annotations" not in c["metadata"] for c in crds(enabled=True, keep=False).values())
    assert crds(enabled=False) == {}


def test_the_account_that_running_engines_obey_stays() -> None:
    def annotations(**values: Any) -> Object | None:
        account = one(render(merged(IMAGE, {"serviceAccount": values})), "ServiceAccount")
        return account["metadata"].get("annotations")

    assert annotations() == {"helm.sh/resource-policy": "keep"}
    assert annotations(annotations={"a": "b"}) == {"helm.sh/resource-policy": "keep", "a": "b"}
    assert annotations(keep=False) is None


def test_service_leads_to_the_pod() -> None:
    objects = render(merged(IMAGE, {"metrics": {"service": {"port": 9000}}}))
    service, deployment = one(objects, "Service"), one(objects, "Deployment")
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert service["spec"]["ports"] == [{"name": "metrics", "port": 9000, "targetPort": "http"}]
    assert not [
        o for o in render(merged(IMAGE, {"metrics": {"service": {"enabled": False}}})) if o["kind"] == "Service"
    ]


def test_image_by_tag_digest_or_release() -> None:
    def image(**values: str) -> str:
        pod = one(render(merged(IMAGE, {"image": values})), "Deployment")["spec"]["template"]["spec"]
        return str(pod["containers"][0]["image"])

    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert image() == f"registry.example/rollfleet-operator:{version}"
    assert image(tag="dev") == "registry.example/rollfleet-operator:dev"
    assert image(tag="dev", digest=f"sha256:{'b' * 64}") == f"registry.example/rollfleet-operator@sha256:{'b' * 64}"
    assert one(render(merged(IMAGE, {"nameOverride": "fleets"})), "Deployment")["metadata"]["name"] == (
        "rollfleet-fleets-operator"
    )


def test_notes_name_what_to_do_next() -> None:
    arguments = ("install", "rollfleet", str(CHART), "--dry-run=client", "--namespace", "system", "--values", "-")
    notes = helm(*arguments, values=merged(IMAGE, {"hostPathVolumes": {"allowed": True}, "crds": {"keep": False}}))
    for words in (
        "kubectl apply -f examples/rolloutengine.yaml",
        "can read directories of the nodes",
        "crds.keep is false",
        "kubectl delete rolloutengines --all-namespaces --all`",
    ):
        assert words in notes
    assert "rollfleet.io/operator" not in notes
    beside = helm(*arguments, values=merged(IMAGE, {"operatorName": "canary"}))
    assert "only fleets with the label rollfleet.io/operator=canary" in beside
    assert "kubectl delete rolloutengines --all-namespaces --selector rollfleet.io/operator=canary`" in beside
