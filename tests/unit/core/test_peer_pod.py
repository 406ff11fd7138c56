"""The pods of an engine of several nodes: one leads, the others have nothing of a server."""

import json
from typing import Any

import kubernetes_validate
import pytest

from rollfleet_operator.api.launch import (
    Parallelism,
)
from rollfleet_operator.api.rolloutengine import (
    Accelerator,
    Startup,
)
from rollfleet_operator.core.objects.network_policy import build_network_policy
from rollfleet_operator.core.objects.peer_pod import build_peer
from rollfleet_operator.core.objects.pod import engine_config, template_hash
from rollfleet_protocol.engine_config import (
    ENGINE_CONFIG_ENV,
    PLACE_ENV,
    config_of,
)
from tests.support.builders import make_fleet
from tests.unit.core.test_objects import LOCKED, SETTINGS, plain, pod

WIDE: dict[str, Any] = {"parallelism": Parallelism(tensor=4, nodes=2), "accelerator": Accelerator(per_pod=2)}
OF_RELEASES_BEFORE = {"0621b9b5ffa9f678": {}, "c47cf80e9610b79d": {"parallelism": Parallelism(tensor=2, data=2)}}


def follower(**spec: Any) -> dict[str, Any]:
    return build_peer(make_fleet(**(WIDE | spec)), SETTINGS, 1, 1, "qwen-1-0-abcdef", "qwen-1-1-ghijkl")


@pytest.mark.parametrize("before", OF_RELEASES_BEFORE)
def test_engines_of_one_node_have_the_pods_that_they_had_before_there_could_be_more(before: str) -> None:
    """An upgrade of the operator must not replace a fleet's pods: these hashes are of the release before."""
    spec = OF_RELEASES_BEFORE[before]
    assert template_hash(make_fleet(**spec), SETTINGS) == before
    made = pod(**spec)
    assert PLACE_ENV not in plain(made["spec"]["containers"][0]["env"])
    told = json.loads(plain(made["spec"]["containers"][0]["env"])[ENGINE_CONFIG_ENV])
    assert not {"nodes", "place"} & set(told)
    assert "rollfleet.io/node" not in made["metadata"]["labels"]


@pytest.mark.parametrize("manifest", [pod(**WIDE), follower()], ids=["leads", "follows"])
def test_both_pods_of_an_engine_of_two_are_valid_and_know_their_place(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.33", strict=True)
    (container,) = manifest["spec"]["containers"]
    config = config_of(plain(container["env"]))
    assert (config.nodes is not None, config.node_count, config.tensor_parallel_size) == (True, 2, 4)
    assert config.place is not None
    node = int(manifest["metadata"]["labels"].get("rollfleet.io/node", "0"))
    assert (config.place.node, config.place.leads, config.leads) == (node, node == 0, node == 0)
    assert config.place.leader == "qwen-1-0-abcdef"
    assert config.place.leader_host == "qwen-1-0.qwen-engines.rl.svc"
    assert (manifest["spec"]["hostname"], manifest["spec"]["subdomain"]) == (f"qwen-1-{node}", "qwen-engines")
    assert container["resources"]["limits"]["huawei.com/Ascend910"] == "2"
    assert manifest["metadata"]["annotations"]["rollfleet.io/template-hash"] == template_hash(
        make_fleet(**WIDE), SETTINGS
    )


def test_a_pod_that_follows_has_nothing_of_a_server() -> None:
    made = follower()
    (container,) = made["spec"]["containers"]
    assert not {"ports", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle"} & set(container)
    assert made["spec"]["automountServiceAccountToken"] is False
    assert "tls" not in {each["name"] for each in (*made["spec"]["volumes"], *container["volumeMounts"])}
    led = pod(**WIDE)["spec"]["containers"][0]
    assert {each["name"] for each in led["volumeMounts"]} - {each["name"] for each in container["volumeMounts"]} == {
        "tls"
    }
    assert container["image"] == led["image"]
    assert made["metadata"]["annotations"]["rollfleet.io/leader"] == "qwen-1-0-abcdef"
    (owner,) = made["metadata"]["ownerReferences"]
    assert owner["controller"] is True
    policy = build_network_policy(make_fleet(**WIDE), LOCKED)
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    assert wanted.items() <= made["metadata"]["labels"].items(), "the policy holds for it too"


def test_launchers_give_up_waiting_before_the_kubelet_does() -> None:
    config = engine_config(make_fleet(**WIDE, startup=Startup(timeout_seconds=100)), SETTINGS)
    assert config.nodes is not None
    assert (config.nodes.wait_seconds, config.nodes.led_wait_seconds) == (90, 660)
