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
