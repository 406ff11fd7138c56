"""A way to a pod's port through the API server, as `kubectl port-forward` has it.

A listener on loopback takes the connections; each goes on as a WebSocket of its own (v4.channel.k8s.io: the first byte
of a message names the stream, 0 for data and 1 for the kubelet's errors; the first message of a stream is the port).
What goes through is TLS between us and the guard, so neither the API server nor others on this machine can read it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import aiohttp
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.stream import WsApiClient

from rollfleet_operator.clients.errors import Denied, NotFound, RollfleetError, Unreachable, clipped
from rollfleet_operator.clients.kubernetes import KubernetesCluster
from rollfleet_operator.ports import PODS

DATA, ERRORS = 0, 1  # streams of the first and only port
CHUNK = 16 * 1024  # bytes
PORT_HEADER = 2  # bytes of the first message of a stream


class Tunnel:
    """The way to one port of one pod."""

    def __init__(self, forwarder: "Forwarder", namespace: str, pod: str, port: int) -> None:
        self._forwarder = forwarder
        self._namespace = namespace
        self._pod = pod
        self._port = port
        self._connections: set[asyncio.Task[None]] = set()
        self.local_port = 0
        self.error: RollfleetError | None = None  # why a connection came to nothing

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.local_port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, and end what runs."""
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._relay(reader, writer), name=f"tunnel to {self._pod}")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with self._forwarder.connect(self._namespace, self._pod, self._port) as channel:
                ways = [
                    asyncio.create_task(self._outwards(reader, channel)),
                    asyncio.create_task(self._inwards(channel, writer)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
        except RollfleetError as error:
            self.error = error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.error = Unreachable(f"port-forward to {self._pod}: {clipped(str(error) or type(error).__name__)}")
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _outwards(self, reader: asyncio.StreamReader, channel: aiohttp.ClientWebSocketResponse) -> None:
        while data := await reader.read(CHUNK):
            await channel.send_bytes(bytes((DATA,)) + data)

    async def _inwards(self, channel: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
        headers = {DATA, ERRORS}
        async for message in channel:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            stream, data = message.data[0], message.data[1:]
            if stream in headers:
                headers.discard(stream)
                data = data[PORT_HEADER:]
            if stream == ERRORS and data:
                words = clipped(data.decode(errors="replace").strip())
                self.error = Unreachable(f"port-forward to {self._pod}: {words}")
                return
            if stream == DATA and data:
                writer.write(data)
                await writer.drain()


class Forwarder:
    """Makes tunnels, with the credentials of a kubeconfig."""

    def __init__(self, configuration: Configuration, cluster: KubernetesCluster) -> None:
        self._sockets = WsApiClient(configuration)
        self._cluster = cluster

    async def close(self) -> None:
        """Close the connections."""
        await self._sockets.close()

    @asynccontextmanager
    async def tunnel(self, namespace: str, pod: str, port: int) -> AsyncIterator[Tunnel]:
        """A listener on loopback, for as long as the context lasts."""
        made = Tunnel(self, namespace, pod, port)
        await made.open()
        try:
            yield made
        finally:
            await made.close()

    @asynccontextmanager
    async def connect(self, namespace: str, pod: str, port: int) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """One connection to the port, as a WebSocket."""
        path = PODS.path(namespace, pod, "portforward")
        _, url, headers, _, _ = await self._sockets.param_serialize("GET", path, auth_settings=["BearerToken"])
        request: Any = await self._sockets.request(
            "GET", url, headers=headers, query_params=[("ports", str(port))], _preload_content=False
        )
        async with AsyncExitStack() as stack:
            try:
                channel = await stack.enter_async_context(request)
            except aiohttp.WSServerHandshakeError as error:
                raise await self._refusal(namespace, pod, error) from error
            yield channel

    async def _refusal(self, namespace: str, pod: str, error: aiohttp.WSServerHandshakeError) -> RollfleetError:
        """Why there was no WebSocket, in the API server's own words: a handshake's answer carries none."""
        try:
            await self._cluster.get(PODS, namespace, f"{pod}/portforward")
        except (Denied, NotFound) as told:
            return told
        except RollfleetError:  # 400: it may be done, but not without a WebSocket
            pass
        return Unreachable(f"port-forward to {pod}: HTTP {error.status}: {clipped(error.message)}")
