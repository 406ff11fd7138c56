"""What the operator tells a launcher: the engine's part of a RolloutEngine, as JSON in ROLLFLEET_ENGINE_CONFIG."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, JsonValue, SerializerFunctionWrapHandler, ValidationError, model_serializer

from rollfleet_protocol.accelerators import AcceleratorProfile
from rollfleet_protocol.base import Request
from rollfleet_protocol.launch_settings import Features, FleetMode, RlConfig, WeightTransfer

ENGINE_CONFIG_ENV = "ROLLFLEET_ENGINE_CONFIG"
DEVICES_VARIABLE = "ROLLFLEET_DEVICES"  # the pod's annotation named after the accelerator's resource, downward API
POD_UID_ENV = "ROLLFLEET_POD_UID"  # by the downward API: the configuration is the same for all pods of a fleet
HOST_ENV = "ROLLFLEET_HOST"  # state.Host as JSON: the launcher tells the guard what it saw
PLACE_ENV = "ROLLFLEET_PLACE"  # JSON of a Place, in pods of engines that have several
CONTROL_SERVER_NAME_SUFFIX = "engine.rollfleet.io"
M = TypeVar("M", bound=Request)


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


class NodesConfig(Request):
    """An engine of several pods, each on a node of its own. The same for all pods of a fleet."""

    count: Annotated[int, Field(ge=2, le=64)]
    meeting_port: Annotated[int, Field(ge=1, le=65535)] = 8002  # where the leading pod's launcher awaits the others'
    master_port: Annotated[int, Field(ge=1, le=65535)] = 29501  # of torch's store in the leading pod; vLLM's default
    wait_seconds: Annotated[int, Field(ge=1, le=86400)] = 1800  # that the leading launcher waits for the others
    led_wait_seconds: Annotated[int, Field(ge=1, le=86400)] = 1800  # that the others wait for it


class Place(Request):
    """Which of its engine's pods this one is, and who leads them."""

    node: Annotated[int, Field(ge=0, le=63)]  # 0 leads: it has the API server and the guard
    leader: Annotated[str, Field(min_length=1, max_length=253)]  # name of the pod that leads: the group's name
    leader_host: Annotated[str, Field(min_length=1, max_length=253)]  # where it is found, by DNS
    # What the launchers found out when they met; empty before.
    leader_address: Annotated[str, Field(max_length=64)] = ""  # as the others reach it
    own_address: Annotated[str, Field(max_length=64)] = ""

    @property
    def leads(self) -> bool:
        """Whether this pod answers clients and operator."""
        return self.node == 0


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
    nodes: NodesConfig | None = None  # None: one pod holds the whole engine
    place: Place | None = None  # of this pod, where there are several
    serving_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    control_port: Annotated[int, Field(ge=1, le=65535)] = 8001
    bind_address: str = "0.0.0.0"  # noqa: S104 - a pod's address is not known beforehand
    tls_dir: str = "/etc/rollfleet/tls"  # tls.crt, tls.key
    run_dir: str = "/run/rollfleet"  # Unix socket of the preStop hook
    drain_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 60
    hold: Hold | None = None  # None: a closed gate refuses
    tokens: TokenVerification = TokenVerification()

    @model_serializer(mode="wrap")
    def _without_what_is_not_said(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Pods of engines of one node stay as they were before there could be more."""
        made: dict[str, Any] = serialize(self)
        return {key: value for key, value in made.items() if key not in ("nodes", "place") or value is not None}

    @property
    def audience(self) -> str:
        """Of the tokens that this engine takes."""
        return self.fleet.audience(self.pod_uid)

    @property
    def leads(self) -> bool:
        """Whether this pod has the API server and the guard: of an engine of one pod always."""
        return self.place is None or self.place.leads

    @property
    def node_count(self) -> int:
        """Pods of this engine."""
        return 1 if self.nodes is None else self.nodes.count


class EngineConfigError(ValueError):
    """A variable of the configuration is missing or wrong; the message names it and the first wrong field."""


def config_of(environ: Mapping[str, str]) -> EngineConfig:
    """The configuration in a process's environment."""
    if not environ.get(ENGINE_CONFIG_ENV):
        raise EngineConfigError(f"{ENGINE_CONFIG_ENV} is not set")
    config = _read(EngineConfig, ENGINE_CONFIG_ENV, environ)
    of_pod: dict[str, object] = {}
    if environ.get(POD_UID_ENV):
        of_pod["pod_uid"] = environ[POD_UID_ENV]
    if environ.get(PLACE_ENV):
        of_pod["place"] = _read(Place, PLACE_ENV, environ)
    config = config.model_copy(update=of_pod) if of_pod else config
    _require_place(config)
    return config


def _read(model: type[M], name: str, environ: Mapping[str, str]) -> M:
    try:
        return model.model_validate_json(environ[name])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EngineConfigError(f"{name}{f' at {where}' if where else ''}: {first['msg']}") from error


def _require_place(config: EngineConfig) -> None:
    """A pod of several knows which one it is, and only such a pod."""
    if (config.nodes is None) is not (config.place is None):
        missing = PLACE_ENV if config.place is None else f"{ENGINE_CONFIG_ENV} at nodes"
        raise EngineConfigError(
            f"{missing} is not set: an engine of several pods has both, one of a single pod neither"
        )
    if config.nodes is not None and config.place is not None and config.place.node >= config.nodes.count:
        raise EngineConfigError(f"{PLACE_ENV} at node: {config.place.node} is no node of {config.nodes.count}")
