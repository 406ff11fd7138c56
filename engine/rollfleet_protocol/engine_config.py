"""What the operator tells a launcher: the engine's part of a RolloutEngine, as JSON in ROLLFLEET_ENGINE_CONFIG."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, JsonValue, SerializerFunctionWrapHandler, ValidationError, model_serializer

from rollfleet_protocol.accelerators import AcceleratorProfile
from rollfleet_protocol.base import Request
from rollfleet_protocol.launch_settings import Features, FleetMode, RlConfig, WeightTransfer

ENGINE_CONFIG_ENV = "ROLLFLEET_ENGINE_CONFIG"
DEVICES_VARIABLE = "ROLLFLEET_DEVICES"  # the pod's annotation named after the accelerator's resource, downward API
POD_UID_ENV = "ROLLFLEET_POD_UID"  # by the downward API: the configuration is the same for all pods of a fleet
HOST_ENV = "ROLLFLEET_HOST"  # state.Host as JSON: the launcher tells the guard what it saw
CONTROL_SERVER_NAME_SUFFIX = "engine.rollfleet.io"


class FleetIdentity(Request):
    """Whose engine this is."""

    namespace: str
    name: str
    uid: str

    def audience(self, pod_uid: str) -> str:
        """Audience of tokens for one pod of this fleet: what is shown to one engine is worthless at every other.

        Without a pod, as engines that are started by hand, that of the fleet.
        """
        fleet = f"rollfleet.io/{self.namespace}/{self.name}/{self.uid}"
        return f"{fleet}/{pod_uid}" if pod_uid else fleet

    @property
    def control_server_name(self) -> str:
        """The name in the fleet's certificate (subjectAltName), which callers demand whatever address they dial."""
        return f"{self.name}.{self.namespace}.{CONTROL_SERVER_NAME_SUFFIX}"


class OperatorIdentity(Request):
    """The one ServiceAccount that may control this engine, by name and uid."""

    subject: str  # system:serviceaccount:<namespace>:<name>
    uid: str


class TokenVerification(Request):
    """Where the guard gets the keys that sign ServiceAccount tokens. Defaults fit a pod."""

    issuer: str | None = None  # None: taken from the API server's discovery document
    api_server: str = "https://kubernetes.default.svc"
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 - a path


class ModelConfig(Request):
    """The model that is loaded at start."""

    path: str  # absolute, inside the container
    served_name: str


class AcceleratorConfig(Request):
    """What the pod asks the device plugin for."""

    resource_name: str  # extended resource; schedulers and plug-ins write the chips chosen under this name
    per_pod: Annotated[int, Field(ge=1, le=64)]
    profile: AcceleratorProfile | None = None  # the generation; None: not said

    @model_serializer(mode="wrap")
    def _without_what_is_not_said(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A fleet that names no generation keeps the pods that it had before there was one to name."""
        made: dict[str, Any] = serialize(self)
        return {key: value for key, value in made.items() if key != "profile" or value is not None}


class Hold(Request):
    """Requests that find the gate closed by an update wait at this engine instead of being refused at once."""

    seconds: Annotated[int, Field(ge=1, le=3600)]  # of one request; then the 503
    max_requests: Annotated[int, Field(ge=1, le=65536)]  # at once; more get the 503 at once


class EngineConfig(Request):
    """All that a launcher needs to start one engine."""

    fleet: FleetIdentity
    pod_uid: Annotated[str, Field(max_length=128)] = ""  # empty outside of a pod
    operator: OperatorIdentity
    model: ModelConfig
    checkpoints_path: str | None = None  # absolute folder that checkpoint paths are relative to
    engine_args: tuple[str, ...] = ()
    accelerator: AcceleratorConfig | None = None  # None: the pod asks for no device
    additional_config: dict[str, JsonValue] = Field(default_factory=dict)  # of --additional-config
    compilation_config: dict[str, JsonValue] = Field(default_factory=dict)  # of --compilation-config
    mode: FleetMode = FleetMode.DISAGGREGATED
    rl_config: RlConfig = RlConfig()
    sleep_mode: bool = False
    weight_transfer: WeightTransfer | None = None  # None: checkpoints only
    features: Features = Features()
    data_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1  # ranks, each with a core of its own, behind one guard
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1  # devices that share each layer of a rank
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1  # stages of a rank
    expert_parallel: bool = False  # experts of a MoE model spread over the devices instead of being split
    serving_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    control_port: Annotated[int, Field(ge=1, le=65535)] = 8001
    bind_address: str = "0.0.0.0"  # noqa: S104 - a pod's address is not known beforehand
    tls_dir: str = "/etc/rollfleet/tls"  # tls.crt, tls.key
    run_dir: str = "/run/rollfleet"  # Unix socket of the preStop hook
    drain_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 60
    hold: Hold | None = None  # None: a closed gate refuses
    tokens: TokenVerification = TokenVerification()

    @property
    def audience(self) -> str:
        """Of the tokens that this engine takes."""
        return self.fleet.audience(self.pod_uid)


class EngineConfigError(ValueError):
    """ROLLFLEET_ENGINE_CONFIG is missing or wrong; the message names the variable and the first wrong field."""


def config_of(environ: Mapping[str, str]) -> EngineConfig:
    """The configuration in a process's environment."""
    if not environ.get(ENGINE_CONFIG_ENV):
        raise EngineConfigError(f"{ENGINE_CONFIG_ENV} is not set")
    try:
        config = EngineConfig.model_validate_json(environ[ENGINE_CONFIG_ENV])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EngineConfigError(f"{ENGINE_CONFIG_ENV}{f' at {where}' if where else ''}: {first['msg']}") from error
    pod_uid = environ.get(POD_UID_ENV, "")
    return config.model_copy(update={"pod_uid": pod_uid}) if pod_uid else config
