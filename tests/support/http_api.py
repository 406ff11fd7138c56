"""memory_api's objects behind HTTP, for trainers in processes of their own.

It closes every connection after one answer: a request finds no open connection, as after an API server's restart. Its
name is looked up, and a new one made.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from rollfleet_protocol.senders import OFFERS_ANNOTATION
from rollfleet_trainer.errors import ApiServerError, ConflictError, DeniedError, NotFoundError
from tests.support.memory_api import LEASE_PATH, MemoryApi
from tests.support.ports import free_port

CODES = {NotFoundError: 404, ConflictError: 409, DeniedError: 403}


class HttpApi:
    """Plain HTTP on a name of the loopback."""

    def __init__(self, api: MemoryApi) -> None:
        self.api = api
        self.port = free_port()
        self._offered = threading.Event()

    def kubeconfig(self, path: Path) -> Path:
        """One that leads here."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "one", "cluster": {"server": f"http://localhost:{self.port}"}}],
            "users": [{"name": "me", "user": {"token": "mine"}}],
            "contexts": [{"name": "one", "context": {"cluster": "one", "user": "me"}}],
            "current-context": "one",
        }
        path.write_text(json.dumps(document), encoding="utf-8")
        return path

    @property
    def holder(self) -> str:
        """Of the Lease; empty where it was given back."""
        return str(self.api.objects[LEASE_PATH]["spec"].get("holderIdentity") or "")

    @property
    def annotations(self) -> dict[str, str]:
        """Of the Lease."""
        found: dict[str, str] = self.api.objects[LEASE_PATH]["metadata"].get("annotations") or {}
        return found

    def wait_offered(self, timeout_s: float) -> bool:
        """Until a trainer offers a version; False where none has by then."""
        return self._offered.wait(timeout_s)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """By the method of the same name."""
        path = request.path
        try:
            if "watch" in request.query:
                return await self._watch(request)
            if request.method == "GET":
                found = await self.api.get(path)
            else:
                call = self.api.create if request.method == "POST" else self.api.patch
                found = await call(path, await request.json())
                if OFFERS_ANNOTATION in self.annotations:
                    self._offered.set()
        except ApiServerError as error:
            status = {"kind": "Status", "message": str(error)}
            return _last(web.json_response(status, status=CODES.get(type(error), 500)))
        return _last(web.json_response(found))

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = _last(web.StreamResponse())
        await response.prepare(request)
        name = request.query["fieldSelector"].removeprefix("metadata.name=")
        async for news in self.api.watch(request.path, name, request.query["resourceVersion"]):
            event = {"type": "MODIFIED", "object": news}
            await response.write(json.dumps(event).encode() + b"\n")
        return response

    async def serve(self, ready: threading.Event, ended: asyncio.Event) -> None:
        """Until it is told to end."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "localhost", self.port).start()
        ready.set()
        await ended.wait()
        await runner.cleanup()


def _last(response: Any) -> Any:
    response.force_close()
    return response


@contextmanager
def served(api: MemoryApi) -> Iterator[HttpApi]:
    """In a thread of its own."""
    server, ready, loop = HttpApi(api), threading.Event(), asyncio.new_event_loop()
    ended = asyncio.Event()

    def run() -> None:
        loop.run_until_complete(server.serve(ready, ended))
        loop.close()

    thread = threading.Thread(target=run, name="api server", daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
