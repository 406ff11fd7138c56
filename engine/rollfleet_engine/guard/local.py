"""The way in for the preStop hook: a Unix socket in the pod. Loopback is not trusted, a file of mode 0600 is."""

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rollfleet_protocol.engine_config import EngineConfig

SOCKET_NAME = "guard.sock"
DRAIN = "drain"
LONGEST_LINE = 1024  # bytes
READ_TIMEOUT_S = 5.0
# What the guard takes at most beyond drainTimeoutSeconds: aborting what still runs, cutting who is slow.
BEYOND_DRAIN_S = 10.0


class Drainable(Protocol):
    """What can be drained."""

    async def drain(self, timeout_s: float) -> int:
        """How many requests did not end by themselves."""
        ...


class DrainSocket:
    """Answers `{"command": "drain"}` with `{"cut": n}` when nothing is in flight any more."""

    def __init__(self, service: Drainable, config: EngineConfig) -> None:
        self._service = service
        self._path = Path(config.run_dir) / SOCKET_NAME
        self._drain_timeout_s = float(config.drain_timeout_seconds)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)  # of a process before, in the same pod
        mask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._answer, self._path, limit=LONGEST_LINE)
        finally:
            os.umask(mask)

    async def stop(self) -> None:
        """Close the listener."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self._path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            try:
                answer = await self._obey(reader)
            except (ValueError, RecursionError, TimeoutError) as error:
                answer = {"error": f"send one line of JSON: {error}"}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def _obey(self, reader: asyncio.StreamReader) -> dict[str, object]:
        async with asyncio.timeout(READ_TIMEOUT_S):
            asked = json.loads(await reader.readline())
        if not isinstance(asked, dict) or asked.get("command") != DRAIN:
            raise ValueError(f"the only command is {DRAIN}")
        return {"cut": await self._service.drain(self._drain_timeout_s)}
