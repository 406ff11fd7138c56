"""Which nodes an engine's NPUs may be on."""

from rollfleet_operator.core.objects.common import Manifest
from rollfleet_protocol.accelerators import AcceleratorProfile

# MindCluster's label of nodes, and its values by generation (docs/en/scheduling/api/k8s.md, tables 4 to 6).
NODE_LABEL = "accelerator-type"
BOARDS = {
    AcceleratorProfile.A2: ("module-910b-8", "module-910b-16"),
    AcceleratorProfile.A3: ("module-a3-16", "module-a3-16-super-pod", "module-a3-8-super-pod"),
    AcceleratorProfile.A5: ("850-Atlas-8p-8", "850-SuperPod-Atlas-8", "950-SuperPod-Atlas-8"),
}


def node_affinity(profile: AcceleratorProfile | None) -> Manifest | None:
    """Keeps engines off nodes that say to be of another generation: A2 and A3 go by one resource name.

    A node without the label is allowed: only MindCluster gives it.
    """
    if profile is None:
        return None
    others = [board for generation, boards in BOARDS.items() if generation is not profile for board in boards]
    term = {"matchExpressions": [{"key": NODE_LABEL, "operator": "NotIn", "values": others}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
