"""Who may stand at the control port, and for how long, before it is known who they are.

The port is open to the whole pod network. A connection that has not brought a valid identity yet is a stranger's: it
has a few seconds for its handshake and for each request's head, and where the room is full the stranger who came first
has to go. The operator, which proves itself with its first request, can so never be kept out by who only stands there.
The sender of a push is a guest: also known, but half of the room at most, and an idle guest goes as a stranger does.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from rollfleet_engine.guard.connections import Patient

MOST_CONNECTIONS = 128
HANDSHAKE_S = 10.0  # as long as the operator itself waits for an answer; on a busy node a handshake takes seconds
HEAD_S = 10.0  # from the connection, or from the first byte of a further request, to the end of its head
SHUTDOWN_S = 1.0  # of TLS; a peer that does not answer the farewell is cut
ACCEPT_RETRY_S = 0.5  # where the process has no file to spare
_WELCOME = "rollfleet.welcome"

ProtocolOf = Callable[["Visit", dict[str, Any]], "Http"]


class Doors:
    """The listener, and all its connections: the operator's, and guests and strangers, the oldest first."""

    def __init__(
        self, listener: socket.socket, context_of: Callable[[], ssl.SSLContext], protocol_of: ProtocolOf
    ) -> None:
        self._listener = listener
        self._context_of = context_of  # asked for each connection: certificates are renewed
        self._protocol_of = protocol_of
        self._known: set[Visit] = set()
        self._guests: dict[Visit, None] = {}
        self._strangers: dict[Visit, None] = {}
        self._accepting: asyncio.Task[None] | None = None

    def open(self, on_crash: Callable[[], None]) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(), name="rollfleet-doors")
        self._accepting.add_done_callback(lambda _: on_crash())

    async def close(self) -> None:
        """Accept nobody more, and send the strangers away; to the others the server says farewell."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        self._listener.close()
        for visit in list(self._strangers):
            visit.leave()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            if self._has_room():
                visit = Visit(self, connection, self._context_of(), self._protocol_of)
                self._strangers[visit] = None
            else:
                connection.close()

    def _has_room(self) -> bool:
        """Make room if need be. False where the operator, and guests whose calls run, have taken all of it."""
        while len(self._known) + len(self._guests) + len(self._strangers) >= MOST_CONNECTIONS:
            first = next(iter(self._strangers), None) or self._idle_guest()
            if first is None:
                return False
            first.leave()
        return True

    def _idle_guest(self) -> "Visit | None":
        return next((guest for guest in self._guests if not guest.is_busy), None)

    def welcome(self, visit: "Visit", *, as_guest: bool) -> bool:
        """It is known who this is. Whether it may stay: the calls of too many guests run."""
        if visit in self._known or (as_guest and visit in self._guests):
            return True
        if visit not in self._strangers and visit not in self._guests:
            return True  # it is gone already
        if as_guest and len(self._guests) >= MOST_CONNECTIONS // 2:
            oldest = self._idle_guest()
            if oldest is None:
                return False
            oldest.leave()
        self.left(visit)
        if as_guest:
            self._guests[visit] = None
        else:
            self._known.add(visit)
        return True

    def left(self, visit: "Visit") -> None:
        """The connection is gone."""
        self._strangers.pop(visit, None)
        self._guests.pop(visit, None)
        self._known.discard(visit)


class Visit:
    """One connection: counted from its first moment, then TLS, then HTTP."""

    def __init__(
        self, doors: Doors, connection: socket.socket, context: ssl.SSLContext, protocol_of: ProtocolOf
    ) -> None:
        self._doors = doors
        self._http = protocol_of(self, {_WELCOME: lambda as_guest: doors.welcome(self, as_guest=as_guest)})
        self._connection = connection
        self._handshake = asyncio.create_task(self._speak_tls(connection, context), name="rollfleet-handshake")

    @property
    def is_busy(self) -> bool:
        """Whether a call of it runs."""
        cycle = self._http.cycle
        return cycle is not None and not cycle.response_complete

    def leave(self) -> None:
        """Cut the connection. Its transport, whoever holds that now, closes the socket by itself."""
        self._doors.left(self)
        if self._http.transport is not None:
            self._http.transport.abort()
            return
        with contextlib.suppress(OSError):  # it is gone already
            self._connection.shutdown(socket.SHUT_RDWR)

    def lost(self) -> None:
        """The connection is gone."""
        self._doors.left(self)

    async def _speak_tls(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._http,
                connection,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError:  # too slow, gone, or not TLS at all: a stranger's affair
            self._doors.left(self)


class Http(Patient, H11Protocol):
    """HTTP of a visit: bounded as on the serving port, but who is too slow goes without a word."""

    def __init__(self, visit: Visit, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._visit = visit

    @property
    def head_s(self) -> float:  # type: ignore[override]
        """As the module says."""
        return HEAD_S

    def connection_lost(self, exc: Exception | None) -> None:
        self._visit.lost()
        super().connection_lost(exc)

    def too_late(self) -> None:
        self._visit.leave()


def welcome(scope: MutableMapping[str, Any], *, as_guest: bool) -> bool:
    """Tell the connection of this request that its caller is known, for good or as a guest. Whether there is room."""
    told = scope.get("state", {}).get(_WELCOME)
    return told is None or bool(told(as_guest))
