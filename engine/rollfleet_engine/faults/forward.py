"""Passes requests on to the engine behind, and its answers back as they come. Nothing is added, identity least."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx

from rollfleet_engine.faults.plan import LONGEST_S
from rollfleet_engine.guard.answers import Answer, Receive, Scope, Send
from rollfleet_engine.guard.doors import welcome
from rollfleet_protocol.commands import PREFIX

CONNECT_S = 5.0
# Of RFC 9110 7.6.1: they belong to one connection. The date is the proxy's server's.
_OF_ONE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"upgrade")
)
_NOT_BACK = _OF_ONE_CONNECTION | {b"transfer-encoding", b"date"}
_STRANGERS = (401, 403)


class Forward:
    """An ASGI application that is another server's."""

    def __init__(self, url: str, verify: Any = True, server_name: str = "") -> None:
        self._url = httpx.URL(url)
        self._extensions = {"sni_hostname": server_name} if server_name else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        # As patient as the longest fault: deadlines are the caller's, who goes away when his is over.
        timeout = httpx.Timeout(LONGEST_S, connect=CONNECT_S)
        self._client = httpx.AsyncClient(verify=verify, trust_env=False, limits=limits, timeout=timeout)

    async def close(self) -> None:
        """Let go of connections."""
        await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        read = asyncio.Event()
        passing = asyncio.create_task(self._pass(scope, _body(receive, read), read, send))
        gone = asyncio.create_task(_disconnected(receive, read))
        try:
            await asyncio.wait({passing, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            passing.cancel()  # nobody reads any more: the engine hears of it
            ended, _ = await asyncio.gather(passing, gone, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended

    async def _pass(self, scope: Scope, body: AsyncIterator[bytes], read: asyncio.Event, send: Send) -> None:
        request = self._request(scope, body, read)
        begun = False
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code not in _STRANGERS:
                    welcome(scope, as_guest=not scope["path"].startswith(PREFIX))  # there only the operator is let in
                headers = [pair for pair in response.headers.raw if pair[0].lower() not in _NOT_BACK]
                lower = [(name.lower(), value) for name, value in headers]
                await send({"type": "http.response.start", "status": response.status_code, "headers": lower})
                begun = True
                async for piece in response.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            if not begun:  # else the server closes the connection within the answer, as the engine did
                text = f"no engine behind the fault proxy: {type(error).__name__}: {error}\n"
                await Answer(502, text.encode(), media=b"text/plain")(send)

    def _request(self, scope: Scope, body: AsyncIterator[bytes], read: asyncio.Event) -> httpx.Request:
        headers = [pair for pair in scope["headers"] if pair[0] not in _OF_ONE_CONNECTION]
        names = {name for name, _ in headers}
        has_body = bool(names & {b"content-length", b"transfer-encoding"})
        if not has_body:
            read.set()
        query = scope["query_string"]
        raw_path = scope["raw_path"] + (b"?" + query if query else b"")
        return httpx.Request(
            scope["method"],
            self._url.copy_with(raw_path=raw_path),
            headers=headers,
            content=body if has_body else None,
            extensions=self._extensions,
        )


class _GoneError(httpx.TransportError):
    """The caller went away within its own request."""


async def _body(receive: Receive, read: asyncio.Event) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _GoneError("the caller went away")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            read.set()
            return


async def _disconnected(receive: Receive, read: asyncio.Event) -> None:
    await read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
