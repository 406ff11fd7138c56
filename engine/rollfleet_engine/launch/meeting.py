"""The launchers of one engine's pods meet before any of them starts its part of the engine.

The leading pod's launcher listens; the others look it up by DNS, again and again, and say which fleet, leader and node
they are of. Once all are there the leader says so, and every one starts its engine with addresses taken from these very
connections. They stay up as the engine's lifeline (lifeline.py). Whoever waits too long gives up with an exit code that
a restart may cure: the pods of an engine are scheduled, pulled and restarted one by one.
"""

import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rollfleet_engine.launch.lines import HEARTBEAT_S, SILENCE_S, Kind, Line, Message
from rollfleet_engine.launch.supervise import STOPPING, SignalPipe
from rollfleet_protocol.engine_config import EngineConfig, NodesConfig, Place
from rollfleet_protocol.termination import Problem

CONNECT_S = 5.0
AGAIN_S = 1.0  # between two tries
HELLO_S = 10.0  # that a connection may stay without having said who it is
MAX_STRANGERS = 64  # such connections; the oldest gives way to one more, as who belongs here says so at once


class StoppedError(Exception):
    """This pod was told to stop while it waited."""


class MeetingError(Exception):
    """Not all came in time."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause)
        self.problem = Problem(cause=cause, remedy=remedy, retry_may_cure=True)


@dataclass(frozen=True)
class Met:
    """All are there."""

    place: Place  # with the addresses
    lines: Mapping[int, Line]  # by node; of a pod that follows only the leader's


def meet(config: EngineConfig, nodes: NodesConfig, place: Place, release: str, signals: SignalPipe) -> Met:
    """Wait for the others. Raises MeetingError and StoppedError; the connections of Met are the caller's."""
    if place.leads:
        with _Leader(config, nodes, place, release, signals) as leader:
            return leader.gather()
    return _Follower(config, nodes, place, release, signals).join()


class _Waiting:
    """What both sides have in common: a deadline, and signals that end the wait."""

    def __init__(
        self, config: EngineConfig, nodes: NodesConfig, place: Place, release: str, signals: SignalPipe
    ) -> None:
        self._config = config
        self._nodes = nodes
        self._place = place
        self._release = release
        self._signals = signals
        self._wait_s = nodes.wait_seconds if place.leads else nodes.led_wait_seconds
        self._deadline = time.monotonic() + self._wait_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)

    def _look(self, seconds: float) -> list[selectors.SelectorKey]:
        """What can be read, after so long at most. Raises StoppedError."""
        ready = [key for key, _ in self._selector.select(max(0.0, min(seconds, self._left())))]
        if any(key.fileobj is self._signals for key in ready) and STOPPING & set(self._signals.wait(0)):
            raise StoppedError
        return [key for key in ready if key.fileobj is not self._signals]

    def _left(self) -> float:
        return self._deadline - time.monotonic()


class _Leader(_Waiting):
    """Listens until every node has come."""

    def __enter__(self) -> "_Leader":
        family = socket.AF_INET6 if ":" in self._config.bind_address else socket.AF_INET
        address = (self._config.bind_address, self._nodes.meeting_port)
        self._listener = socket.create_server(address, family=family, backlog=MAX_STRANGERS)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: list[Line] = []
        self._there: dict[int, Line] = {}
        self._alive_by = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        self._listener.close()
        for line in self._strangers:
            line.close()

    def gather(self) -> Met:
        """Raises MeetingError and StoppedError."""
        try:
            while len(self._there) < self._nodes.count - 1:
                self._require_time()
                self._step()
        except BaseException:
            for line in self._there.values():
                line.close()
            raise
        for line in self._there.values():
            line.send(Message(kind=Kind.GO, address=line.own_address))
        own = next(iter(self._there.values())).own_address
        place = self._place.model_copy(update={"leader_address": own, "own_address": own})
        return Met(place, dict(sorted(self._there.items())))

    def _step(self) -> None:
        for key in self._look(AGAIN_S):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, Line):
                self._hear(key.fileobj)
        now = time.monotonic()
        if now >= self._alive_by:
            self._alive_by = now + HEARTBEAT_S
            for line in self._there.values():
                line.send(Message(kind=Kind.ALIVE))
        for line in [line for line in self._strangers if line.ended or now >= line.since + HELLO_S]:
            self._strangers.remove(line)
            self._drop(line)
        for node in [node for node, line in self._there.items() if line.ended or now >= line.heard + SILENCE_S]:
            self._drop(self._there.pop(node))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it left before it was taken
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._drop(self._strangers.pop(0))
        line = Line(connection)
        self._strangers.append(line)
        self._selector.register(line, selectors.EVENT_READ)

    def _hear(self, line: Line) -> None:
        for message in line.receive(time.monotonic()):
            if line not in self._strangers:
                continue
            self._strangers.remove(line)
            if why := self._refusal(message):
                line.send(Message(kind=Kind.REFUSED, text=why))
                self._drop(line)
                return
            before = self._there.pop(message.node, None)
            if before is not None:  # its process was started anew, and the end of the one before is still on its way
                self._drop(before)
            self._there[message.node] = line

    def _refusal(self, message: Message) -> str:
        if message.kind is not Kind.HELLO or message.fleet != self._config.fleet.uid:
            return "this is another fleet's engine"
        if message.leader != self._place.leader:
            return f"this is {self._place.leader}, not {message.leader}"
        if not 0 < message.node < self._nodes.count:
            return f"node {message.node} is none of {self._nodes.count} that follow node 0"
        if message.release != self._release:
            return f"this pod has vLLM {self._release}, not {message.release}"
        return ""

    def _drop(self, line: Line) -> None:
        self._selector.unregister(line)
        line.close()

    def _require_time(self) -> None:
        if self._left() > 0:
            return
        missing = sorted(set(range(1, self._nodes.count)) - set(self._there))
        which = f"node {missing[0]}" if len(missing) == 1 else f"nodes {', '.join(map(str, missing))}"
        cause = f"{which} of {self._nodes.count} did not come within {self._wait_s} s"
        raise MeetingError(cause, "look at their pods; the kubelet tries again")


class _Follower(_Waiting):
    """Looks for the leader until it is told to start."""

    def join(self) -> Met:
        """Raises MeetingError and StoppedError."""
        why = "it was not looked for"
        try:
            while self._left() > 0:
                for address in self._addresses():
                    line, why = self._try(address)
                    if line is not None:
                        return self._met(line)
                why = why if self._found else f"{self._place.leader_host} is no name of a host yet"
                self._look(AGAIN_S)
        finally:
            self._selector.close()
        where = f"{self._place.leader} ({self._place.leader_host}:{self._nodes.meeting_port})"
        cause = f"the pod that leads, {where}, did not let this one start within {self._wait_s} s: {why}"
        raise MeetingError(cause, "look at that pod; the kubelet tries again")

    def _addresses(self) -> list[str]:
        try:
            found = socket.getaddrinfo(self._place.leader_host, self._nodes.meeting_port, type=socket.SOCK_STREAM)
        except OSError:
            found = []
        self._found = bool(found)
        return list(dict.fromkeys(str(each[4][0]) for each in found))

    def _try(self, address: str) -> tuple[Line | None, str]:
        """The line to the leader once it says go, or why it did not."""
        try:
            line = Line(socket.create_connection((address, self._nodes.meeting_port), CONNECT_S))
        except OSError as error:
            return None, f"{address}: {error.strerror or error}"
        self._selector.register(line, selectors.EVENT_READ)
        line.send(self._hello())
        try:
            answer = self._answer(line)
        except BaseException:
            line.close()
            raise
        finally:
            self._selector.unregister(line)
        if answer is not None and answer.kind is Kind.GO:
            self._leader_address = answer.address
            return line, ""
        line.close()
        return None, f"{address}: {answer.text if answer is not None else line.ended or 'it says nothing any more'}"

    def _hello(self) -> Message:
        uid, place = self._config.fleet.uid, self._place
        return Message(kind=Kind.HELLO, fleet=uid, leader=place.leader, node=place.node, release=self._release)

    def _answer(self, line: Line) -> Message | None:
        """GO or REFUSED; None where the line ended or the time is over."""
        alive_by = time.monotonic() + HEARTBEAT_S
        while self._left() > 0 and not line.ended:
            self._look(AGAIN_S)
            now = time.monotonic()
            for message in line.receive(now):
                if message.kind in (Kind.GO, Kind.REFUSED):
                    return message
            if now >= line.heard + SILENCE_S:
                return None
            if now >= alive_by:
                alive_by = now + HEARTBEAT_S
                line.send(Message(kind=Kind.ALIVE))
        return None

    def _met(self, line: Line) -> Met:
        addresses = {"leader_address": self._leader_address or line.other_address, "own_address": line.own_address}
        return Met(self._place.model_copy(update=addresses), {0: line})
