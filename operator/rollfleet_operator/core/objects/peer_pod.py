"""The pods of an engine of several nodes that do not lead it: workers without an API server.

They have no ports, probes, certificate, ServiceAccount token or preStop hook: nobody asks them anything, their
launcher ends with their engine (rollfleet_engine.launch), and drains by letting the leading pod drain. What they hold
is the same: devices, model, checkpoints, shared memory.
"""

from rollfleet_operator.api.meta import ANNOTATION_LEADER, ANNOTATION_TEMPLATE, LABEL_NODE
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.core.objects.common import Manifest
from rollfleet_operator.core.objects.pod import leader_host, place_in, pod_template, template_hash
from rollfleet_operator.core.observed import Settings
from rollfleet_protocol.engine_config import Place

OF_A_SERVER = ("ports", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle")


def build_peer(fleet: RolloutEngine, settings: Settings, ordinal: int, node: int, leader: str, name: str) -> Manifest:
    """The complete manifest of the pod called `name`, led by the pod `leader`."""
    pod = pod_template(fleet, settings, ordinal)
    pod["metadata"]["name"] = name
    pod["metadata"]["labels"][LABEL_NODE] = str(node)
    pod["metadata"]["annotations"] = {
        ANNOTATION_TEMPLATE: template_hash(fleet, settings),
        ANNOTATION_LEADER: leader,
    }
    spec = pod["spec"]
    spec["automountServiceAccountToken"] = False
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "tls"]
    (container,) = spec["containers"]
    for part in OF_A_SERVER:
        del container[part]
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "tls"]
    place_in(pod, fleet, ordinal, Place(node=node, leader=leader, leader_host=leader_host(fleet, ordinal)))
    return pod
