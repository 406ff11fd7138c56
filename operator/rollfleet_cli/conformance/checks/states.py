"""What an engine tells of itself, on both ports, and whether that fits together and the spec."""

from collections.abc import Iterator

from rollfleet_cli.conformance.checks.check import Check, Fault, Promise, Steps, Subject
from rollfleet_cli.conformance.checks.judging import has_status, state_of
from rollfleet_cli.conformance.checks.wire import Exchange, Identity, Port, get
from rollfleet_protocol.commands import LOOK_PATH, PauseMode
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.sleep import ALL_TAGS
from rollfleet_protocol.state import EngineState, Gate, WeightsState

# What every update needs of an engine.
ALWAYS_ABLE = (
    "source/Checkpoint",
    "verify/Digest",
    "verify/Coverage",
    "verify/Logprobs",
    *(f"pause/{mode.value}" for mode in PauseMode),
)
OF_SLEEP = ("sleep/1", "sleep/2")
OPEN, VERSION = "rollfleet_guard_gate_open", "rollfleet_guard_weight_version"
ENGINE_SERIES = "vllm:num_requests_running"
DIAGNOSE = "`rollfleet diagnose NAME` tells what the operator thinks of this engine"


def consistent(state: EngineState, pod_uid: str) -> Iterator[Fault]:
    """What must hold of every engine that serves."""
    if state.pod_uid != pod_uid:
        yield Fault(f"it says that it runs in pod {state.pod_uid or 'none'}, and was asked in pod {pod_uid or 'none'}")
    if not state.alive:
        yield Fault("its core is dead")
    if (state.gate is Gate.OPEN) != (not state.closed_reason):
        yield Fault(f"its gate is {state.gate.value}, for the reason {state.closed_reason or 'none'}")
    if state.gate is not Gate.OPEN:
        yield Fault(f"its gate is closed: {state.closed_reason}")
        return
    if state.weights.state is not WeightsState.VERIFIED or state.weights.version is None:
        yield Fault(f"its gate is open over weights that are {state.weights.state.value}")
    wrong = {
        "paused": state.paused,
        "armed": state.armed,
        "asleep": state.sleep.level > 0 or set(state.sleep.awake) != set(ALL_TAGS),
        "not ready": not state.ready,
        "without an epoch": state.epoch < 1,
    }
    for words in (words for words, holds in wrong.items() if holds):
        yield Fault(f"its gate is open while it is {words}")
    probe = state.probe
    if probe is not None and len(probe.by_rank) != state.facts.data_parallel_size:
        yield Fault(f"its last probe was answered by {len(probe.by_rank)} of {state.facts.data_parallel_size} ranks")


def _state(subject: Subject) -> Steps:
    answers = yield (get(LOOK_PATH, port=Port.CONTROL, identity=Identity.OPERATOR),)
    state = state_of(answers[0])
    if state is None:
        return (Fault("GET /rollfleet/v1/state must answer the operator a state", answers[0].told),)
    found = list(consistent(state, subject.pod_uid))
    if state.incarnation != subject.state.incarnation:
        found.append(Fault(f"its process changed from {subject.state.incarnation} to {state.incarnation} meanwhile"))
    return tuple(found)


def as_asked_for(state: EngineState, config: EngineConfig) -> Iterator[Fault]:
    """What the engine says that it is, against its spec."""
    facts = state.facts
    workers = config.data_parallel_size * config.tensor_parallel_size * config.pipeline_parallel_size
    if (facts.data_parallel_size, facts.world_size) != (config.data_parallel_size, workers):
        told = f"{facts.world_size} workers in {facts.data_parallel_size} data-parallel ranks"
        yield Fault(f"the spec asks for {workers} workers in {config.data_parallel_size} ranks, it has {told}")
    wanted = [*ALWAYS_ABLE, *(OF_SLEEP if config.sleep_mode else ())]
    if config.weight_transfer is not None:
        wanted += ["source/Trainer", f"backend/{config.weight_transfer.backend.value}"]
    lacking = [each for each in wanted if each not in facts.capabilities]
    if lacking:
        yield Fault(f"it lacks {', '.join(lacking)}: its log says why (engine.lacks)")
    if not facts.engine_version or not facts.guard_version:
        yield Fault("it does not tell its releases")


def _facts(subject: Subject) -> Steps:
    answers = yield (get("/version"),)
    found = list(as_asked_for(subject.state, subject.config))
    document = answers[0].json
    told = document.get("version") if isinstance(document, dict) else None
    if not isinstance(told, str) or told != subject.state.facts.engine_version.partition(" ")[0]:
        of_guard = subject.state.facts.engine_version
        found.append(Fault(f"GET /version must tell the release that the guard tells: {of_guard}", answers[0].told))
    return tuple(found)


def _probes(subject: Subject) -> Steps:
    answers = yield tuple(get(path) for path in ("/health", "/livez", "/readyz", "/v1/models"))
    found = [fault for answer in answers for fault in has_status(answer, 200)]
    name, models = subject.config.model.served_name, answers[3]
    if models.status == 200 and name not in served_names(models):
        found.append(Fault(f"GET /v1/models does not name {name}, as spec.model.servedName does", models.told))
    return tuple(found)


def served_names(exchange: Exchange) -> list[str]:
    """Models of GET /v1/models."""
    document = exchange.json
    cards = document.get("data") if isinstance(document, dict) else None
    return [str(card.get("id")) for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []


def _metrics(subject: Subject) -> Steps:
    (answer,) = yield (get("/metrics"),)
    found = list(has_status(answer, 200))
    if not found:
        found += measured(answer.text, subject)
    return tuple(found)


def measured(text: str, subject: Subject) -> Iterator[Fault]:
    """The guard's series beside the engine's."""
    if ENGINE_SERIES not in text:
        yield Fault(f"/metrics has no {ENGINE_SERIES}: the engine's own series are missing")
    for name, wanted in ((OPEN, 1.0), (VERSION, float(subject.version))):
        values = series(text, name)
        if values != [wanted]:
            yield Fault(f"/metrics must tell {name} {wanted:g}, it tells {values or 'nothing'}")


def series(text: str, name: str, label: str = "") -> list[float]:
    """Values of a metric, of those of its series that carry the label."""
    found = []
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] == name and label in head:
            try:
                found.append(float(value))
            except ValueError:
                continue
    return found


CHECKS = (
    Check(
        "state",
        "the guard's state of an engine that serves fits together: open, verified, awake, not paused, its own pod",
        Promise.NOTHING_HIDDEN,
        DIAGNOSE,
        _state,
    ),
    Check(
        "facts",
        "workers, ranks, release and capabilities are those that the spec asks for",
        Promise.NOTHING_HIDDEN,
        "compare spec.parallelism, sleepMode and weightTransfer with the first lines of the engine's log",
        _facts,
    ),
    Check(
        "probes",
        "/health, /livez, /readyz and /v1/models say that it serves",
        Promise.NOTHING_HIDDEN,
        DIAGNOSE,
        _probes,
    ),
    Check(
        "metrics",
        "/metrics has the engine's series, and the guard's with gate and version",
        Promise.NOTHING_HIDDEN,
        "docs/metrics.md tells the series; an older image has none of the guard's",
        _metrics,
    ),
)
