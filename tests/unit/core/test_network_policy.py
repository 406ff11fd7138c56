"""Who reaches which port of an engine, where the network honours it."""

from typing import Any

from rollfleet_operator.api.launch import TrainerRef
from rollfleet_operator.core.actions import ApplyObject, DeleteObject
from rollfleet_operator.core.objects.common import key_of
from rollfleet_operator.core.objects.network_policy import build_network_policy
from rollfleet_operator.core.plan_children import plan_children
from tests.support.builders import make_fleet, make_observed
from tests.unit.core.test_objects import LOCKED, pod


def admits(policy: dict[str, Any], port: int, protocol: str, namespace: str, of: dict[str, str]) -> bool:
    """As a network that honours it reads an Ingress policy."""

    def is_from(peer: dict[str, Any]) -> bool:
        own = {"matchLabels": {"kubernetes.io/metadata.name": policy["metadata"]["namespace"]}}
        spaces, pods = peer.get("namespaceSelector", own)["matchLabels"], peer["podSelector"]["matchLabels"]
        return spaces.items() <= {"kubernetes.io/metadata.name": namespace}.items() and pods.items() <= of.items()

    return any(
        any(p["protocol"] == protocol and p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"])
        and ("from" not in rule or any(is_from(peer) for peer in rule["from"]))
        for rule in policy["spec"]["ingress"]
    )


def test_c14_anybody_reaches_8000_the_operators_pods_the_control_port_and_engines_of_the_fleet_the_rest() -> None:
    policy = build_network_policy(make_fleet(), LOCKED)
    labels = {"rollfleet.io/fleet": "qwen", "rollfleet.io/component": "engine"}
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert pod()["metadata"]["labels"].items() >= policy["spec"]["podSelector"]["matchLabels"].items()
    operator = {"app.kubernetes.io/name": "rollfleet", "app.kubernetes.io/instance": "rollfleet"}
    assert admits(policy, 8001, "TCP", "rollfleet-system", operator)
    others = ("rl", operator), ("rollfleet-system", {"app": "x"}), ("rl", labels | {"rollfleet.io/fleet": "llama"})
    router = "rl", labels | {"rollfleet.io/component": "router"}
    for namespace, of in (*others, router, ("elsewhere", labels), ("rollfleet-system", operator)):
        assert admits(policy, 8000, "TCP", namespace, of)
        assert admits(policy, 8001, "TCP", namespace, of) == ((namespace, of) == ("rollfleet-system", operator))
        for port in (1, 7999, 8002, 29500, 65535):  # torch chooses any: no identity, and pickled objects
            assert not admits(policy, port, "TCP", namespace, of)
            assert not admits(policy, port, "UDP", namespace, of)
    for port in (1, 7999, 8000, 8002, 29500, 65535):
        assert admits(policy, port, "TCP", "rl", labels)
    assert not admits(policy, 8001, "TCP", "rl", labels)


def test_pods_that_are_labelled_as_trainers_of_a_fleet_with_trainers_are_ranks_too() -> None:
    fleet = make_fleet(trainers=(TrainerRef(service_account_name="grpo"),))
    trainer = {"rollfleet.io/trainer": "qwen"}
    for port in (8001, 8000, 1, 7999, 29500, 65535):
        assert admits(build_network_policy(fleet, LOCKED), port, "TCP", "rl", trainer)
        assert admits(build_network_policy(make_fleet(), LOCKED), port, "TCP", "rl", trainer) == (port == 8000)
    for namespace, of in (("elsewhere", trainer), ("rl", {"rollfleet.io/trainer": "llama"})):
        assert not admits(build_network_policy(fleet, LOCKED), 8001, "TCP", namespace, of)


def test_the_network_policy_is_there_while_the_operator_is_told_its_own_pods() -> None:
    key = "NetworkPolicy/qwen-engines"
    given = plan_children(make_observed(settings=LOCKED))
    applied = [each for each in given if isinstance(each, ApplyObject) and key_of(each.manifest) == key]
    assert len(applied) == 1
    assert not [each for each in plan_children(make_observed()) if "NetworkPolicy" in str(each)]
    gone = plan_children(make_observed(children={key: applied[0].content_hash}))
    assert [each for each in gone if isinstance(each, DeleteObject)] == [
        DeleteObject("networking.k8s.io/v1", "NetworkPolicy", "qwen-engines")
    ]
