"""What launchers of one engine's pods say to each other: short JSON lines over one TCP connection for each pair.

Nothing is believed but who is there, where its workers find the leader, and why it ended. Nobody proves who it is, as
nobody does to torch's store and vLLM's queues beside it: the NetworkPolicy is what keeps strangers away from all three.
"""

import ipaddress
import os
import socket
import time
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, ValidationError

from rollfleet_protocol.base import Answer
from rollfleet_protocol.words import Words

HEARTBEAT_S = 5.0
SILENCE_S = 30.0  # a node that is gone closes no connection
LONGEST_LINE = 16384
LONGEST_TEXT = 1024  # characters
_READ_BYTES = 65536


class Kind(StrEnum):
    """What a line is about."""

    HELLO = "hello"  # of a pod that follows, to the one that leads
    REFUSED = "refused"  # the answer where it is none of the leader's pods
    GO = "go"  # all are there: start the engine
    ALIVE = "alive"
    LEAVING = "leaving"  # this pod was told to stop: drain
    END = "end"  # this pod's engine is over


def _address(text: str) -> str:
    """It becomes a word of the engine's command line."""
    if text:
        ipaddress.ip_address(text)
    return text


class Message(Answer):
    """One line."""

    kind: Kind
    fleet: str = ""  # uid
    leader: str = ""  # name of the pod that leads
    node: int = 0
    release: str = ""
    address: Annotated[str, AfterValidator(_address)] = ""  # the leader's, as this follower reaches it
    text: Words = ""


class Line:
    """One connection. `ended` says why nothing comes any more."""

    def __init__(self, connection: socket.socket, heard: float | None = None) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._rest = b""
        self.since = self.heard = time.monotonic() if heard is None else heard
        self.ended = ""

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    @property
    def own_address(self) -> str:
        """Of this end."""
        return str(self._socket.getsockname()[0])

    @property
    def other_address(self) -> str:
        """Of the other end."""
        return str(self._socket.getpeername()[0])

    def send(self, message: Message) -> None:
        """Lines are short and read at once: one that does not fit has nobody at its other end."""
        try:
            self._socket.sendall(message.model_dump_json(by_alias=True, exclude_defaults=True).encode() + b"\n")
        except OSError as error:
            self.ended = self.ended or f"cannot be reached any more: {_words(error)}"

    def receive(self, now: float) -> list[Message]:
        """What has come since the last call, oldest first."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            self.ended = self.ended or f"cannot be reached any more: {_words(error)}"
            return []
        if not data:
            self.ended = self.ended or "closed the connection"
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.heard = now
        try:
            found = [Message.model_validate_json(line) for line in lines]
        except ValidationError:
            self.ended = self.ended or "says what no launcher of this release says"
            return []
        if len(self._rest) > LONGEST_LINE:
            self.ended = self.ended or f"sends lines of more than {LONGEST_LINE} bytes"
        return found

    def close(self) -> None:
        """The other side hears of it at once."""
        self._socket.close()


def _words(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
