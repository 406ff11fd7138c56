"""The route table, and the walk that finds what it does not know."""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router, WebSocketRoute
from starlette.websockets import WebSocket

from rollfleet_engine.guard.routes import ROUTES, RouteClass, classify, cure_of, is_control, unclassified


async def endpoint(_: Request) -> Response:
    return Response()


async def socket(_: WebSocket) -> None: ...


def test_the_walk_finds_what_nobody_has_thought_about() -> None:
    app = Starlette(
        routes=[
            Route("/v1/completions", endpoint, methods=["POST"]),
            Route("/pause", endpoint, methods=["POST", "PUT"]),
            Route("/health", endpoint),
            Mount("/v9", app=Router([Route("/completions", endpoint, methods=["POST"])])),
            Mount("/static", app=Starlette()),
            Mount("/metrics", app=Starlette()),
            WebSocketRoute("/v1/realtime", socket),
            WebSocketRoute("/v2/realtime", socket),
        ]
    )
    assert unclassified(app) == ("POST /v9/completions", "PUT /pause", "WEBSOCKET /v2/realtime")


def test_a_mount_without_routes_counts_as_a_route() -> None:
    async def opaque(*_: object) -> None: ...

    assert unclassified(Starlette(routes=[Mount("/opaque", app=opaque)])) == ("GET /opaque",)


def test_unknown_is_unknown() -> None:
    assert classify("GET", "/v1/completions") is None
    assert classify("POST", "/new") is None


def test_every_control_route_has_a_cure() -> None:
    paths = {path for (_, path), kind in ROUTES.items() if kind is RouteClass.CONTROL}
    assert all(is_control(path) and cure_of(path) for path in paths)
    assert "WeightVersion.spec.version" in cure_of("/update_weights")
    assert not is_control("/v1/completions")


# What 0.27.1, 0.29.0 and 0.32.0 register (vllm/entrypoints; without the DP supervisor, which is another process):
# tests/parsers/test_routes.py reads it in their sources.
VLLM_GET = (
    "/docs",
    "/docs/oauth2-redirect",
    "/fault_tolerance/status",
    "/get_world_size",
    "/health",
    "/is_paused",
    "/is_sleeping",
    "/kv_event_sources",
    "/load",
    "/metrics",
    "/openapi.json",
    "/ping",
    "/redoc",
    "/server_info",
    "/tokenizer_info",
    "/v1/models",
    "/v1/responses/{response_id}",
    "/version",
    "/weight_info",
)
VLLM_POST = (
    "/abort_requests",
    "/classify",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
    "/collective_rpc",
    "/detokenize",
    "/fault_tolerance/apply",
    "/finish_weight_update",
    "/generative_scoring",
    "/inference/v1/abort_requests",
    "/inference/v1/generate",
    "/init_weight_transfer_engine",
    "/invocations",
    "/is_scaling_elastic_ep",
    "/pause",
    "/ping",
    "/pooling",
    "/release_kv_cache_memory",
    "/rerank",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/score",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/start_draft_weight_update",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/tokenize",
    "/update_weight_version",
    "/update_weights",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/embeddings",
    "/v1/load_lora_adapter",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/rerank",
    "/v1/responses",
    "/v1/responses/render",
    "/v1/responses/{response_id}/cancel",
    "/v1/score",
    "/v1/systemone",
    "/v1/unload_lora_adapter",
    "/v2/embed",
    "/v2/rerank",
    "/wake_up",
    "/weight_checker",
)


def test_every_route_of_the_releases_is_classified() -> None:
    routes = [Route(path, endpoint, methods=["GET"]) for path in VLLM_GET]
    routes += [Route(path, endpoint, methods=["POST"]) for path in VLLM_POST]
    assert unclassified(Starlette(routes=[*routes, WebSocketRoute("/v1/realtime", socket)])) == ()
