"""RolloutEngine: a fleet of equal engines (design section 2), with the fields that are built."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from rollfleet_operator.api.meta import ApiModel, Conditions, ObjectMeta

Quantity = Annotated[str, Field(json_schema_extra={"x-kubernetes-int-or-string": True})]
AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4096)]
Opaque = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]


class FleetMode(StrEnum):
    """Where trainer and engines run."""

    DISAGGREGATED = "Disaggregated"  # on different NPUs


class Model(ApiModel):
    """The model that engines load at start: version 0 of a fleet."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]  # relative to volumes.model
    served_name: Annotated[str, Field(min_length=1, max_length=253)]


class VolumeSource(ApiModel):
    """Where a volume comes from; exactly one member. Always mounted read-only."""

    persistent_volume_claim: dict[str, str] | None = None  # {claimName}
    host_path: dict[str, str] | None = None  # {path}; only where the operator was started with it allowed
    csi: Opaque | None = None


class ExtraVolume(ApiModel):
    """A further read-only volume."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=50)]
    mount_path: AbsolutePath
    source: VolumeSource


class Volumes(ApiModel):
    """Read-only data of the engines."""

    model: VolumeSource
    checkpoints: VolumeSource | None = None
    extra: Annotated[tuple[ExtraVolume, ...], Field(max_length=16)] = ()


class Accelerator(ApiModel):
    """Devices of one pod, by extended resource."""

    resource_name: Annotated[str, Field(min_length=1, max_length=253)] = "huawei.com/Ascend910"
    per_pod: Annotated[int, Field(ge=0, le=64)] = 8


class EnvVar(ApiModel):
    """A plain environment variable."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=253)]
    value: Annotated[str, Field(max_length=32768)] = ""


class EngineOptions(ApiModel):
    """What goes to vLLM as it is."""

    args: Annotated[tuple[str, ...], Field(max_length=128)] = ()


class RouterMode(StrEnum):
    """Whether the operator runs a router for the fleet."""

    ENABLED = "Enabled"
    DISABLED = "Disabled"


class Router(ApiModel):
    """vllm-router in front of the fleet."""

    mode: RouterMode = RouterMode.ENABLED
    image: Annotated[str, Field(max_length=1024)] | None = None  # default: the operator's
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    policy: Annotated[str, Field(pattern=r"^(random|round_robin|cache_aware|power_of_two|consistent_hash)$")] = (
        "cache_aware"
    )


class Startup(ApiModel):
    """How long an engine may take to load before it counts as not starting."""

    timeout_seconds: Annotated[int, Field(ge=10, le=86400)] = 1800


class RolloutEngineSpec(ApiModel):
    """Desired fleet."""

    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    mode: FleetMode = FleetMode.DISAGGREGATED
    image: Annotated[str, Field(min_length=1, max_length=1024)]
    image_pull_policy: Annotated[str, Field(pattern="^(Always|IfNotPresent|Never)$")] | None = None
    image_pull_secrets: Annotated[tuple[dict[str, str], ...], Field(max_length=8)] = ()
    resources: Opaque | None = None  # v1.ResourceRequirements, without the accelerator
    node_selector: dict[str, str] | None = None
    tolerations: Annotated[tuple[Opaque, ...], Field(max_length=32)] = ()
    service_account_name: Annotated[str, Field(max_length=253)] | None = None
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = ()
    model: Model
    volumes: Volumes
    accelerator: Accelerator = Accelerator()
    engine: EngineOptions = EngineOptions()
    router: Router = Router()
    startup: Startup = Startup()
    drain_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 60


class Committed(ApiModel):
    """THE commit record: which weights the fleet serves. Outlives the WeightVersion."""

    version: int
    digest: str | None = None  # None for version 0 as loaded from model.path
    checkpoint: str | None = None  # path below volumes.checkpoints; None for version 0
    weight_version_uid: str | None = Field(default=None, alias="weightVersionUID")
    time: datetime


class Outcome(StrEnum):
    """How an update ended."""

    ACTIVE = "Active"
    FAILED = "Failed"
    SUPERSEDED = "Superseded"


class LastFinished(ApiModel):
    """The newest update that ended."""

    version: int
    generation: int  # of the WeightVersion
    outcome: Outcome
    message: str = ""


class EngineDetail(ApiModel):
    """An engine that is not well: what it does, since when, in its own words."""

    name: str  # pod
    ordinal: int
    state: str
    since: datetime
    message: str = ""


class EnginesSummary(ApiModel):
    """Counts by state, and the details of those not well."""

    counts: dict[str, int] = Field(default_factory=dict)
    details: Annotated[tuple[EngineDetail, ...], Field(max_length=10)] = ()


class RolloutEngineStatus(ApiModel):
    """Observed fleet."""

    observed_generation: int = 0
    replicas: int = 0  # pods
    ready_replicas: int = 0  # engines alive and under control
    serving_replicas: int = 0  # engines verified at the committed version, gate open
    selector: str = ""
    endpoint: str = ""
    epoch: int = 0
    ca_bundle: str = ""  # PEM, base64 as in webhook configurations
    committed: Committed | None = None
    last_finished: LastFinished | None = None
    engines: EnginesSummary = EnginesSummary()
    conditions: Conditions = ()


class RolloutEngine(ApiModel):
    """A fleet."""

    metadata: ObjectMeta
    spec: RolloutEngineSpec
    status: RolloutEngineStatus = RolloutEngineStatus()
