"""RolloutEngine: a fleet of equal engines (design section 2), with the fields that are built."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from rollfleet_operator.api.accelerators import accelerator_rules, resource_of
from rollfleet_operator.api.launch import (
    EngineOptions,
    Features,
    Parallelism,
    RlConfig,
    SleepMode,
    TrainerRef,
    WeightTransfer,
    launch_rules,
)
from rollfleet_operator.api.members import MAX_MEMBERS, Member
from rollfleet_operator.api.meta import ApiModel, Conditions, ObjectMeta
from rollfleet_operator.api.records import Aftermath, Committed, LastFinished, Outcome, Previous
from rollfleet_operator.api.rules import NAME_REF_SCHEMA, QUANTITY, Schema, rule, rules
from rollfleet_operator.api.volumes import ExtraVolume, ModelPath, Volumes, VolumeSource
from rollfleet_protocol.accelerators import ASCEND910, DEFAULT_RESOURCES, AcceleratorProfile
from rollfleet_protocol.launch_settings import FleetMode

__all__ = [
    "Aftermath",
    "Committed",
    "ExtraVolume",
    "LastFinished",
    "Outcome",
    "Previous",
    "RolloutEngine",
    "RolloutEngineSpec",
    "RolloutEngineStatus",
    "VolumeSource",
    "Volumes",
]

# Pods are called <fleet>-<ordinal>-<node>-<suffix> and <fleet>-router-<hash>-<suffix>: DNS labels of at most 63.
MAX_FLEET_NAME = 40

_QUANTITIES: Schema = {"type": "object", "maxProperties": 32, "additionalProperties": QUANTITY}
_RESOURCES: Schema = {
    "type": "object",
    "properties": {
        "requests": {**_QUANTITIES, "description": "What the scheduler reserves."},
        "limits": {**_QUANTITIES, "description": "What the container may use."},
    },
}
_TOLERATION: Schema = {
    "type": "object",
    "description": "v1.Toleration.",
    "properties": {
        "key": {
            "type": "string",
            "maxLength": 316,
            "description": "Key of the taint; empty with Exists is every taint.",
        },
        "operator": {"type": "string", "enum": ["Exists", "Equal"], "description": "Equal where absent."},
        "value": {"type": "string", "maxLength": 63, "description": "Value of the taint, for Equal."},
        "effect": {
            "type": "string",
            "enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"],
            "description": "Every effect where absent.",
        },
        "tolerationSeconds": {
            "type": "integer",
            "format": "int64",
            "description": "For NoExecute; for ever where absent.",
        },
    },
}

Resources = Annotated[dict[str, Any], WithJsonSchema(_RESOURCES)]
Toleration = Annotated[dict[str, Any], WithJsonSchema(_TOLERATION)]
SecretRef = Annotated[dict[str, str], WithJsonSchema(NAME_REF_SCHEMA)]
LabelValue = Annotated[str, Field(max_length=63)]


class Model(ApiModel):
    """The model that engines load at start: version 0 of a fleet."""

    path: ModelPath
    """Directory of the model, relative to volumes.model; "." is the volume itself."""
    served_name: Annotated[str, Field(min_length=1, max_length=253)]
    """The `model` that clients name in their requests."""


class Accelerator(ApiModel, json_schema_extra=rules(*accelerator_rules())):
    """Devices of one pod, by extended resource. An engine has spec.parallelism.nodes pods."""

    profile: AcceleratorProfile | None = None
    """Generation of the NPUs: A2 (910B), A3 (910C), A5 (950) or 310P. Engines are kept off nodes whose label
    accelerator-type names another one, an image built for another one is refused, and so is what it cannot do."""
    resource_name: (
        Annotated[
            str,
            Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"),
        ]
        | None
    ) = None
    """Extended resource that the device plugin advertises; where absent MindCluster's name of the profile's NPUs,
    huawei.com/npu for A5, huawei.com/Ascend310P for 310P, else huawei.com/Ascend910."""
    per_pod: Annotated[int, Field(ge=0, le=64)] = 8
    """Devices of each pod; 0 asks for none (the CPU)."""

    @property
    def resource(self) -> str:
        """The extended resource, said or not."""
        return self.resource_name or (ASCEND910 if self.profile is None else DEFAULT_RESOURCES[self.profile])


class EnvVar(ApiModel):
    """A plain environment variable."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
            max_length=253,
            json_schema_extra=rules(
                rule(
                    "!(self in ['ROLLFLEET_ENGINE_CONFIG', 'ROLLFLEET_DEVICES', 'ROLLFLEET_POD_UID', "
                    "'ROLLFLEET_PLACE', 'PYTHONPATH', 'PYTHONHOME'])",
                    "spec.env must not set ROLLFLEET_ENGINE_CONFIG, ROLLFLEET_DEVICES, ROLLFLEET_POD_UID, "
                    "ROLLFLEET_PLACE, PYTHONPATH or PYTHONHOME: operator and image do",
                ),
                rule(
                    "!(self in ['ASCEND_VISIBLE_DEVICES', 'ASCEND_RT_VISIBLE_DEVICES'])",
                    "spec.env must not set ASCEND_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES: the device plugin "
                    "chooses each pod's NPUs",
                ),
            ),
        ),
    ]
    """Name, unique in the list."""
    value: Annotated[str, Field(max_length=32768)] = ""
    """Value."""


class RouterMode(StrEnum):
    """Whether the operator runs a router for the fleet."""

    ENABLED = "Enabled"
    DISABLED = "Disabled"


class RouterPolicy(StrEnum):
    """vllm-router's own names of its load balancing policies."""

    RANDOM = "random"
    ROUND_ROBIN = "round_robin"
    CACHE_AWARE = "cache_aware"
    POWER_OF_TWO = "power_of_two"
    CONSISTENT_HASH = "consistent_hash"


class WhenClosedType(StrEnum):
    """What becomes of a request that finds the gate closed."""

    REJECT = "Reject"
    HOLD = "Hold"


class Hold(ApiModel):
    """Bounds of what waits at each engine."""

    seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """Seconds that one request waits at most."""
    max_requests: Annotated[int, Field(ge=1, le=65536)] = 256
    """Requests that wait at one engine at once; up to 1 MiB of each is read ahead."""


class WhenClosed(
    ApiModel,
    json_schema_extra=rules(
        rule(
            # The default {} of the field is judged before its own defaults are filled in.
            "(has(self.type) && self.type == 'Hold') == has(self.hold)",
            "spec.router.whenClosed.hold must be set if, and only if, spec.router.whenClosed.type is Hold",
            field=".hold",
        )
    ),
):
    """Discriminated union: what becomes of requests while an update has closed the gate."""

    type: WhenClosedType = WhenClosedType.REJECT
    """Reject: 503 at once, with Retry-After. Hold: they wait at the engine for the version that comes, then 503."""
    hold: Hold | None = None
    """For type Hold."""


class Router(ApiModel):
    """vllm-router in front of the fleet, and how the way to the engines behaves."""

    mode: RouterMode = RouterMode.ENABLED
    """Enabled: Service <fleet> leads to the router. Disabled: straight to the serving engines."""
    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Image with vllm-router; the operator's default where absent."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Router pods."""
    policy: RouterPolicy = RouterPolicy.CACHE_AWARE
    """How requests are spread."""
    when_closed: WhenClosed = WhenClosed()
    """What becomes of requests while an update has closed the gate; holds without a router too."""


class Startup(ApiModel):
    """How long an engine may take to load before it counts as not starting."""

    timeout_seconds: Annotated[int, Field(ge=10, le=86400)] = 1800
    """Seconds from the container's start until its engine must be alive."""
    restart_budget: Annotated[int, Field(ge=0, le=1000)] = 5
    """How often an engine may be restarted without serving in between; then its pod is stopped, and kept to be read.
    Not counted against an engine whose template has served, unless another engine of it was up when it failed: the
    only replica of a fleet that has served is started again for ever."""


class UpdateStrategy(ApiModel):
    """How pods are replaced when image, arguments or other parts of their template change."""

    max_unavailable: Annotated[int, Field(ge=1, le=1000)] = 1
    """Engines that may be out of service at once while pods are replaced, those that do not serve anyway among them."""


class PullPolicy(StrEnum):
    """When the kubelet pulls the engine's image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class RolloutEngineSpec(
    ApiModel,
    json_schema_extra=rules(
        rule(
            f"!has(self.resources) || "
            f"((!has(self.resources.limits) || !({resource_of('self.accelerator')} in self.resources.limits)) && "
            f"(!has(self.resources.requests) || !({resource_of('self.accelerator')} in self.resources.requests)))",
            "spec.resources must not name spec.accelerator.resourceName: set spec.accelerator.perPod",
            field=".resources",
        ),
        *launch_rules(),
        rule(
            "!has(self.trainers) || self.trainers.size() == 0 || has(self.weightTransfer)",
            "spec.trainers needs spec.weightTransfer: it says by which backend they push",
            field=".trainers",
        ),
    ),
):
    """Desired fleet."""

    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Engines of the fleet. The scale subresource sets it."""
    mode: FleetMode = FleetMode.DISAGGREGATED
    """Where trainer and engines run. Disaggregated: on different NPUs. Colocated: on the same; engines start with sleep
    mode and may take handles (ipc, shm). The trainer beside them is not the operator's work yet."""
    image: Annotated[str, Field(min_length=1, max_length=1024)]
    """Image of the engine, made by Dockerfile.engine."""
    image_pull_policy: PullPolicy | None = None
    """Kubernetes' default where absent."""
    image_pull_secrets: Annotated[tuple[SecretRef, ...], Field(max_length=8)] = ()
    """Secrets for pulling images."""
    resources: Resources | None = None
    """Resources of the engine's container, without the accelerator."""
    node_selector: Annotated[dict[str, LabelValue], Field(max_length=32)] | None = None
    """Labels that a node must have."""
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32)] = ()
    """Taints that do not keep the engines away."""
    service_account_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """ServiceAccount of the engines' pods; "default" where absent."""
    env: Annotated[
        tuple[EnvVar, ...],
        Field(
            max_length=64, json_schema_extra=rules(x_kubernetes_list_type="map", x_kubernetes_list_map_keys=["name"])
        ),
    ] = ()
    """Environment of the engine's container."""
    model: Model
    """The model that engines load at start: version 0."""
    volumes: Volumes
    """Read-only data of the engines."""
    parallelism: Parallelism = Parallelism()
    """How one engine spreads over its devices."""
    accelerator: Accelerator = Accelerator()
    """Devices of each engine."""
    rl_config: RlConfig = RlConfig()
    """vLLM-Ascend's switch for reinforcement learning, and what it may switch on besides."""
    sleep_mode: SleepMode = SleepMode.DISABLED
    """Enabled: engines can give their memory to a trainer on the same NPUs."""
    weight_transfer: WeightTransfer | None = None
    """How a trainer pushes weights; absent where they come from checkpoints only."""
    trainers: Annotated[
        tuple[TrainerRef, ...],
        Field(
            max_length=16,
            json_schema_extra=rules(x_kubernetes_list_type="map", x_kubernetes_list_map_keys=["serviceAccountName"]),
        ),
    ] = ()
    """Who may push weights, over spec.weightTransfer.backend; one at a time, the holder of Lease <fleet>-sender. Who is
    taken off the list loses the right at once."""
    features: Features = Features()
    """What engines can do beyond completing prompts."""
    engine: EngineOptions = EngineOptions()
    """What goes to vLLM as it is."""
    router: Router = Router()
    """vllm-router in front of the fleet."""
    startup: Startup = Startup()
    """Limits on the start of an engine."""
    update_strategy: UpdateStrategy = UpdateStrategy()
    """How pods are replaced when their template changes: never in the middle of an update of the weights."""
    drain_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 60
    """Seconds that a stopping engine waits for requests in flight."""


class EngineDetail(ApiModel):
    """An engine that is not well: what it does, since when, in its own words."""

    name: str
    """Its pod."""
    ordinal: int
    """Its place in the fleet."""
    state: str
    """What it is doing."""
    since: datetime
    """Since when."""
    message: str = ""
    """The engine's, kubelet's or scheduler's own text."""


class EnginesSummary(ApiModel):
    """Counts by state, and the details of those not well."""

    counts: dict[str, int] = Field(default_factory=dict)
    """Engines by state."""
    details: Annotated[tuple[EngineDetail, ...], Field(max_length=10)] = ()
    """Those not well, ten at most."""
    time: datetime | None = None
    """When counts or details changed last; at most once a second."""


class RolloutEngineStatus(ApiModel):
    """Observed fleet."""

    observed_generation: int = 0
    """metadata.generation that this status speaks of."""
    replicas: int = 0
    """Pods of engines."""
    ready_replicas: int = 0
    """Engines alive and under control."""
    serving_replicas: int = 0
    """Engines verified at the committed version, gate open."""
    selector: str = ""
    """Label selector of the engines' pods, for the scale subresource."""
    endpoint: str = ""
    """URL for clients inside the cluster."""
    epoch: int = 0
    """Epoch of the newest commands. The write that raises it is the fence between two operators."""
    ca_bundle: str = ""
    """CA of the control ports' certificate: PEM in base64, as in webhook configurations."""
    committed: Committed | None = None
    """Which weights the fleet serves."""
    last_finished: LastFinished | None = None
    """The newest update that ended."""
    engines: EnginesSummary = EnginesSummary()
    """Engines by state."""
    members: Annotated[tuple[Member, ...], Field(max_length=MAX_MEMBERS)] = ()
    """Pods that may answer clients, whether the API server still has them or not."""
    proven_template: str = ""
    """Hash of the newest pod template of which an engine has served."""
    conditions: Conditions = ()
    """Accepted, Available, Progressing, WeightsCurrent, Degraded, SettingsIgnored."""


class RolloutEngine(
    ApiModel,
    json_schema_extra=rules(
        rule(
            f"self.metadata.name.size() <= {MAX_FLEET_NAME} && "
            "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            f"metadata.name must start with a letter, hold only a-z, 0-9 and -, and have at most {MAX_FLEET_NAME} "
            "characters: pods and Services are named after the fleet",
        )
    ),
):
    """A fleet of equal rollout engines that serves one version of the policy's weights."""

    metadata: ObjectMeta
    spec: RolloutEngineSpec
    """Desired fleet."""
    status: RolloutEngineStatus = RolloutEngineStatus()
    """Observed fleet."""
