"""/healthz, /readyz and /metrics on a small port."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

CLOSE_S = 1.0


@asynccontextmanager
async def serving(
    host: str, port: int, registry: CollectorRegistry, problems: Callable[[], list[str]], is_ready: Callable[[], bool]
) -> AsyncIterator[None]:
    """Answer while the block runs. A port that is taken is an OSError with its own words."""

    async def healthz(_: web.Request) -> web.Response:
        found = problems()
        return web.Response(status=503 if found else 200, text="\n".join(found) or "ok")

    async def readyz(_: web.Request) -> web.Response:
        ready = is_ready()
        return web.Response(status=200 if ready else 503, text="ok" if ready else "the first lists are not read yet")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()
