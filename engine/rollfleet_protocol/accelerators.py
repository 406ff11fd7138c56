"""Generations of NPUs: their names, the extended resources that tell them, and what not every one can do. Pure.

Sources: for resources mind-cluster (component/ascend-common/api/default_name.go) and HAMi's plug-in
(ascend-device-configmap.yaml), for generations vllm-ascend (vllm_ascend/device/hardware.py).
"""

from enum import StrEnum


class AcceleratorProfile(StrEnum):
    """A generation of NPUs, as vLLM-Ascend calls it: an image is built for one."""

    A2 = "A2"  # Atlas A2: 910B
    A3 = "A3"  # Atlas A3: 910C, two dies a module, each a device
    A5 = "A5"  # the 950 family
    I310P = "310P"  # Atlas 300I


# What MindCluster's device plugin calls their NPUs; of A2 and A3 the same, so that it does not tell them apart.
ASCEND910 = "huawei.com/Ascend910"
DEFAULT_RESOURCES = {
    AcceleratorProfile.A2: ASCEND910,
    AcceleratorProfile.A3: ASCEND910,
    AcceleratorProfile.A5: "huawei.com/npu",
    AcceleratorProfile.I310P: "huawei.com/Ascend310P",
}
# What a resource's name begins with -> generations that it may be of; the longest comes first. 910A is older than all.
RESOURCES: tuple[tuple[str, tuple[AcceleratorProfile, ...]], ...] = (
    ("huawei.com/npu", (AcceleratorProfile.A5,)),
    ("huawei.com/Ascend310P", (AcceleratorProfile.I310P,)),
    ("huawei.com/Ascend910A", ()),
    ("huawei.com/Ascend910B", (AcceleratorProfile.A2,)),
    ("huawei.com/Ascend910C", (AcceleratorProfile.A3,)),
    (ASCEND910, (AcceleratorProfile.A2, AcceleratorProfile.A3)),
)
# Batch invariance and FA3 (vllm-ascend, docs/source/user_guide/feature_guide: batch_invariance.md, flash_attention.md).
DETERMINISTIC = (AcceleratorProfile.A2, AcceleratorProfile.A3)
# Dies of an A3 module go together (mind-cluster, docs/en/scheduling/api/volcano.md): one, or an even number, of 16.
A3_MOST = 16


def profiles_of(resource_name: str) -> tuple[AcceleratorProfile, ...]:
    """The generations that a resource may be of: all where its name does not tell."""
    told = (profiles for prefix, profiles in RESOURCES if resource_name.startswith(prefix))
    return next(told, tuple(AcceleratorProfile))


def fits_a3(per_pod: int) -> bool:
    """Whether MindCluster gives a pod so many devices of A3."""
    return per_pod == 1 or (per_pod % 2 == 0 and per_pod <= A3_MOST)
