"""Which routes of an engine are let through to whom. What is not in the table does not exist for anybody.

Read in vLLM 0.23.0, 0.27.1, 0.29.0 and 0.32.0. tests/parsers looks through the sources of each for what they register,
and the contract suite walks the route table of the engine that really runs (0.27.1; 0.23.0 by `make contract-023`,
0.32.0 by `make contract-032`), so that a new release cannot bring a route that nobody has thought about.
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any


class RouteClass(Enum):
    """What the guard does with a route."""

    INFERENCE = "Inference"  # answers come from the weights: needs an open gate, counts as in flight
    PROBE = "Probe"  # does not depend on the weights: always passed on
    CONTROL = "Control"  # changes or reveals the engine: 404 on the serving port, 409 with the cure on the control port
    REFUSED = "Refused"  # 404 on both ports


_INFERENCE = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v1/systemone",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v2/embed",
    "/v2/rerank",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/generative_scoring",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/invocations",
)
_PROBES_GET = ("/health", "/ping", "/metrics", "/version", "/load", "/v1/models", "/tokenizer_info")
# Text to tokens and back: they need the tokenizer, never the weights.
_PROBES_POST = (
    "/ping",
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/cohere/v2/chat/render",
)
_CONTROL_GET = (
    "/is_paused",
    "/is_sleeping",
    "/weight_info",
    "/get_world_size",
    "/server_info",
    "/kv_event_sources",
    "/fault_tolerance/status",
)
_CONTROL_POST = (
    "/pause",
    "/resume",
    "/abort_requests",
    "/inference/v1/abort_requests",
    "/sleep",
    "/wake_up",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/shutdown_weight_transfer_engine",
    "/weight_checker",
    "/release_kv_cache_memory",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/fault_tolerance/apply",
    "/start_profile",
    "/stop_profile",
)
# By path, whatever the method. A stored response may be of another version than the one that is served when it is read.
_REFUSED = frozenset(
    {
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
        "/openapi.json",
        "/static",
        "/adapters",  # of the SageMaker container standards, where vLLM finds them installed
        "/adapters/{adapter_name}",
        "/v1/realtime",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
    }
)

ROUTES: dict[tuple[str, str], RouteClass] = (
    {("POST", path): RouteClass.INFERENCE for path in _INFERENCE}
    | {("GET", path): RouteClass.PROBE for path in _PROBES_GET}
    | {("POST", path): RouteClass.PROBE for path in _PROBES_POST}
    | {("GET", path): RouteClass.CONTROL for path in _CONTROL_GET}
    | {("POST", path): RouteClass.CONTROL for path in _CONTROL_POST}
)

# Why a native control route answers 409 to somebody who may control the engine, and what to do instead.
_BY_WEIGHTS = "weights change by an update of the fleet: set WeightVersion.spec.version"
_BY_GUARD = "the guard pauses and resumes by itself: use POST /rollfleet/v1/close, verify and open"
_CURES = {
    "/pause": _BY_GUARD,
    "/resume": _BY_GUARD,
    "/abort_requests": _BY_GUARD,
    "/inference/v1/abort_requests": _BY_GUARD,
    "/is_paused": "read GET /rollfleet/v1/state",
    "/is_sleeping": "read GET /rollfleet/v1/state",
    "/weight_info": "read GET /rollfleet/v1/state",
    "/get_world_size": "read facts.worldSize in GET /rollfleet/v1/state",
    "/sleep": "use POST /rollfleet/v1/sleep, which keeps the order",
    "/wake_up": "use POST /rollfleet/v1/wake, which keeps the order",
    "/reset_prefix_cache": "caches are dropped by every Verify",
    "/reset_mm_cache": "caches are dropped by every Verify",
    "/reset_encoder_cache": "caches are dropped by every Verify",
    "/v1/load_lora_adapter": "adapters are not supported: publish merged weights as a WeightVersion",
    "/v1/unload_lora_adapter": "adapters are not supported: publish merged weights as a WeightVersion",
}
_CURE_OF_OTHERS = "the fleet's engines are controlled by RolloutEngine and WeightVersion only"


def classify(method: str, path: str) -> RouteClass | None:
    """Class of a request; None for what nobody knows."""
    return ROUTES.get((method, path))


def is_control(path: str) -> bool:
    """Whether the engine has a control route of this path, whatever the method."""
    return any(classify(method, path) is RouteClass.CONTROL for method in ("GET", "POST"))


def cure_of(path: str) -> str:
    """What to do instead of calling this control route of the engine."""
    if "weight" in path:
        return _CURES.get(path, _BY_WEIGHTS)
    return _CURES.get(path, _CURE_OF_OTHERS)


def unclassified(app: Any) -> tuple[str, ...]:
    """Routes of a Starlette or FastAPI application that the table does not know, as "METHOD /path"; none is good."""
    return tuple(
        f"{method} {path}" for method, path in sorted(set(_walk(app.routes, ""))) if not is_known(method, path)
    )


def is_known(method: str, path: str) -> bool:
    """Whether the table says what becomes of a route of an engine."""
    asked = "GET" if method == "HEAD" else method
    return path in _REFUSED or (asked, path) in ROUTES


def _walk(routes: Iterable[Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Every (method, path); a mounted application that has no routes of its own is one path that takes anything."""
    for route in routes:
        included = getattr(route, "effective_candidates", None)  # FastAPI 0.16x keeps included routers as branches
        if included is not None:
            yield from _walk(included(), prefix)
            continue
        path = prefix + getattr(route, "path", "")
        inner = getattr(route, "routes", None)
        methods = getattr(route, "methods", None)
        if methods:
            yield from ((method, path) for method in methods)
        elif inner:
            yield from _walk(inner, path)
        else:
            yield ("WEBSOCKET" if "WebSocket" in type(route).__name__ else "GET"), path
