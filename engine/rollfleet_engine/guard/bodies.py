"""Bodies of requests: bounded in bytes and in the time that their sender takes."""

import asyncio
from collections.abc import Awaitable, Generator, Iterable
from typing import Any

from rollfleet_engine.guard.answers import Answer, Message, Receive, Send, refusal
from rollfleet_protocol.refusals import RefusalReason

_LONGEST_NUMBER = 18  # digits of a length that can be meant


class BodyError(Exception):
    """A body is too large or too slow. Whoever reads it gets this; its caller gets `answer`.

    The connection is not closed with it: bytes that are on their way would turn the answer into a reset. What still
    comes of the body is thrown away, for as long as a head may take (connections.py).
    """

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.answer: Answer = refusal(reason, message)


def declared_too_large(headers: Iterable[tuple[bytes, bytes]], largest: int) -> BodyError | None:
    """Where the head alone says that the body has more bytes than that."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and (len(value) > _LONGEST_NUMBER or int(value) > largest):
            return _too_large(largest)
    return None


class Bounded:
    """One request's body on its way to an application, which reads it by `receive` and answers by `send`.

    The time counts only while somebody waits for the sender: an application that reads late takes nothing from it.
    What an application says about a body that was refused here is not passed on: it takes it for a broken connection.
    """

    __slots__ = ("_complete", "_largest", "_left_s", "_receive", "_send", "_size", "_within_s", "error", "started")

    def __init__(self, receive: Receive, send: Send, largest: int, within_s: float) -> None:
        self.error: BodyError | None = None
        self.started = False  # the head of the application's answer was sent
        self._receive = receive
        self._send = send
        self._largest = largest
        self._within_s = self._left_s = within_s
        self._size = 0
        self._complete = False

    async def receive(self) -> Message:
        """The next message of the server. Raises BodyError."""
        if self._complete:  # what comes now is only that the client has gone, and that may take as long as the answer
            return await self._receive()
        if self.error is not None:
            raise self.error
        waited = self._receive().__await__()
        try:
            pending = next(waited)
        except StopIteration as here:  # what is here already needs no clock, which costs more than all else
            message: Message = here.value
        else:
            message = await self._in_time(_Begun(waited, pending))
        self._complete = not message.get("more_body", False)  # also where the client is gone
        self._size += len(message.get("body", b""))
        if self._size > self._largest:
            self.error = _too_large(self._largest)
            raise self.error
        return message

    async def _in_time(self, message_of: Awaitable[Message]) -> Message:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._left_s):
                message = await message_of
        except TimeoutError:
            text = f"the body did not arrive within {self._within_s:g} s"
            self.error = BodyError(RefusalReason.TOO_SLOW, text)
            raise self.error from None
        self._left_s = max(0.0, self._left_s - (loop.time() - began))
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Pass a message of the application on, unless its request was refused."""
        if self.error is None:
            self.started = True
            return self._send(message)
        return _to_nobody(message)

    async def answer(self) -> None:
        """The refusal, where there is one and the application had not begun to answer."""
        if self.error is not None and not self.started:
            await self.error.answer(self._send)


def _too_large(largest: int) -> BodyError:
    return BodyError(RefusalReason.TOO_LARGE, f"the body is over {largest} bytes, which are the most on this route")


class _Begun:
    """The rest of an awaitable that was begun by hand and has said what it waits for."""

    __slots__ = ("_pending", "_steps")

    def __init__(self, steps: Generator[Any, Any, Message], pending: Any) -> None:
        self._steps = steps
        self._pending = pending

    def __await__(self) -> Generator[Any, Any, Message]:
        pending = self._pending
        try:
            while True:
                try:
                    told = yield pending
                except BaseException as error:  # noqa: BLE001 - a cancellation too is for whoever waits below
                    pending = self._steps.throw(error)
                else:
                    pending = self._steps.send(told)
        except StopIteration as ended:
            message: Message = ended.value
            return message


class GoneError(Exception):
    """The client went away before its request was complete."""


async def read_body(receive: Receive, largest: int, within_s: float) -> bytes:
    """The whole body. Raises BodyError or GoneError."""
    bounded = Bounded(receive, _to_nobody, largest, within_s)
    body = bytearray()
    while True:
        message = await bounded.receive()
        if message["type"] == "http.disconnect":
            raise GoneError
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def _to_nobody(_: Message) -> None:
    """Nothing is answered by who only reads."""
