"""The devices of an engine's pod, and the nodes that may have them."""

import json

import kubernetes_validate
import pytest

from rollfleet_operator.api.rolloutengine import Accelerator
from rollfleet_protocol.accelerators import AcceleratorProfile
from rollfleet_protocol.engine_config import DEVICES_VARIABLE, ENGINE_CONFIG_ENV, AcceleratorConfig, EngineConfig
from tests.unit.core.test_objects import container, plain, pod


def test_the_launcher_is_told_of_the_devices_that_were_asked_for_and_chosen() -> None:
    given = container(accelerator=Accelerator(resource_name="huawei.com/npu", per_pod=4))
    chosen = [each for each in given["env"] if each["name"] == DEVICES_VARIABLE]
    field = {"apiVersion": "v1", "fieldPath": "metadata.annotations['huawei.com/npu']"}
    assert chosen == [{"name": DEVICES_VARIABLE, "valueFrom": {"fieldRef": field}}]
    config = EngineConfig.model_validate_json(plain(given["env"])[ENGINE_CONFIG_ENV])
    assert config.accelerator == AcceleratorConfig(resource_name="huawei.com/npu", per_pod=4)


def test_a_fleet_that_names_no_generation_keeps_its_pods() -> None:
    """Its template is what it was before there was a generation to name: nothing is replaced for an upgrade."""
    found = pod()["spec"]
    assert "affinity" not in found
    config = json.loads(plain(found["containers"][0]["env"])[ENGINE_CONFIG_ENV])
    assert config["accelerator"] == {"resourceName": "huawei.com/Ascend910", "perPod": 1}


@pytest.mark.parametrize(
    ("profile", "resource", "kept_off", "allowed"),
    [
        ("A2", "huawei.com/Ascend910", "module-a3-16", "module-910b-8"),
        ("A3", "huawei.com/Ascend910", "module-910b-8", "module-a3-16-super-pod"),
        ("A5", "huawei.com/npu", "module-910b-16", "950-SuperPod-Atlas-8"),
        ("310P", "huawei.com/Ascend310P", "850-Atlas-8p-8", "card"),
    ],
)
def test_a_generation_chooses_resource_and_nodes(profile: str, resource: str, kept_off: str, allowed: str) -> None:
    found = pod(accelerator=Accelerator(profile=AcceleratorProfile(profile), per_pod=8))["spec"]
    assert found["containers"][0]["resources"]["limits"] == {resource: "8"}
    required = found["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    ((expression,),) = (term["matchExpressions"] for term in required["nodeSelectorTerms"])
    assert (expression["key"], expression["operator"]) == ("accelerator-type", "NotIn")
    assert kept_off in expression["values"]
    assert allowed not in expression["values"]
    config = EngineConfig.model_validate_json(plain(found["containers"][0]["env"])[ENGINE_CONFIG_ENV])
    assert config.accelerator is not None
    assert (config.accelerator.resource_name, config.accelerator.profile) == (resource, profile)
    kubernetes_validate.validate(pod(accelerator=Accelerator(profile=AcceleratorProfile(profile))), "1.33", strict=True)


def test_a_fleet_without_devices_is_told_of_none() -> None:
    env = container(accelerator=Accelerator(per_pod=0))["env"]
    assert DEVICES_VARIABLE not in [each["name"] for each in env]
    assert EngineConfig.model_validate_json(plain(env)[ENGINE_CONFIG_ENV]).accelerator is None


def test_devices_are_in_limits_and_requests_beside_what_was_asked_for() -> None:
    given = {"limits": {"memory": "5Gi"}, "requests": {"cpu": "1"}}
    resources = container(resources=given, accelerator=Accelerator(resource_name="huawei.com/npu", per_pod=8))[
        "resources"
    ]
    assert resources == {
        "limits": {"memory": "5Gi", "huawei.com/npu": "8"},
        "requests": {"cpu": "1", "huawei.com/npu": "8"},
    }
    assert container(accelerator=Accelerator(per_pod=0))["resources"] == {}
