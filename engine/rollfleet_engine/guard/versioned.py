"""What the guard puts on an answer: its version, and its spans where it was kept over a change of weights."""

import json
from collections.abc import Awaitable

from rollfleet_engine.guard.answers import Message, Send
from rollfleet_engine.guard.turnstile import Header, Passage
from rollfleet_protocol.refusals import SPANS_HEADER

_SPANS = SPANS_HEADER.lower().encode()
_DONE = b"data: [DONE]"
_EVENTS = b"text/event-stream"


class Versioned:
    """Puts the version at admission, and who answers, on an answer's head; the rest passes without being looked at.

    A request that is kept waits here with what it has to say. What was kept carries its spans: in the head where that
    is still to be sent, else as a comment of the event stream, before the end of it.
    """

    __slots__ = ("_engine", "_headers", "_passage", "_send", "_told")

    def __init__(self, send: Send, passage: Passage, engine: Header | None = None) -> None:
        self._engine = engine
        self._send = send
        self._passage = passage
        self._headers: list[Header] = []
        self._told = False

    def send(self, message: Message) -> Awaitable[None]:
        """ASGI's send."""
        passage = self._passage
        if passage.cut:
            return _say_nothing()
        if passage.released is not None:
            return self._wait_and_send(message)
        if not passage.started and message["type"] == "http.response.start":
            passage.started = True
            message = self._head(message)
        elif passage.spans and not self._told and message["type"] == "http.response.body":
            message = self._with_comment(message)
        return self._send(message)

    async def _wait_and_send(self, message: Message) -> None:
        while (released := self._passage.released) is not None and not self._passage.cut:
            await released.wait()
        await self.send(message)

    def _head(self, message: Message) -> Message:
        self._headers = headers = [*message.get("headers", ()), self._passage.header]
        if self._engine is not None:
            headers.append(self._engine)
        if self._passage.spans:
            headers.append((_SPANS, self._spans()))
            self._told = not self._is_stream()
        return {**message, "headers": headers}

    def _is_stream(self) -> bool:
        return any(name.lower() == b"content-type" and value.startswith(_EVENTS) for name, value in self._headers)

    def _spans(self) -> bytes:
        return json.dumps([span.model_dump(by_alias=True) for span in self._passage.spans]).encode()

    def _with_comment(self, message: Message) -> Message:
        """Before the stream's last event; where it has no such event, before its last bytes."""
        body = message.get("body", b"")
        place = body.find(_DONE)
        if not self._is_stream() or (place < 0 and message.get("more_body", False)):
            return message
        self._told = True
        place = max(place, 0)
        comment = b": " + _SPANS + b" " + self._spans() + b"\n\n"
        return {**message, "body": body[:place] + comment + body[place:]}


async def _say_nothing() -> None:
    """Some applications answer a cancellation by an error of their own; the guard says what there is to say."""
