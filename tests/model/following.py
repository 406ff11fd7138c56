"""How an operator of the model follows the guards: the real follower's memory, driven by modelled messages."""

from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any

from rollfleet_engine.guard.states import Heard, Rejection, to_wire
from rollfleet_operator.clients.errors import Disowned, Refused, RollfleetError, StaleAttempt, Unreachable
from rollfleet_operator.clients.follower import BACKOFF_MAX_S, BACKOFF_MIN_S, Follower
from rollfleet_operator.clients.guards import COMMAND_S, POLL_GRACE_S, POLL_S, Endpoint
from rollfleet_operator.core.observed import GuardView
from rollfleet_protocol.commands import Command
from rollfleet_protocol.engine_config import FleetIdentity
from rollfleet_protocol.refusals import RefusalReason
from rollfleet_protocol.state import EngineState
from tests.model.clock import Clock
from tests.model.network import Network
from tests.model.nodes import Host, Nodes
from tests.support.builders import FACTS, FLEET, FLEET_UID, NAMESPACE

STALE = (RefusalReason.WRONG_INCARNATION, RefusalReason.STALE_EPOCH)
IDENTITY = FleetIdentity(namespace=NAMESPACE, name=FLEET, uid=FLEET_UID)


class Way:
    """An answer that is awaited."""

    def __await__(self) -> Generator["Way", EngineState, EngineState]:
        return (yield self)


class Transport:
    """What a follower sends commands through: the answer comes when the model brings it."""

    async def state(self, endpoint: Endpoint, after: int | None) -> EngineState:
        """Polls are modelled apart, see `Following`."""
        raise AssertionError(f"nobody polls {endpoint.pod} from {after}")

    async def canary(self, endpoint: Endpoint) -> None:
        """Every engine of the model is guarded."""

    async def look(self, endpoint: Endpoint) -> EngineState:
        """Nor does anybody only look."""
        raise AssertionError(f"nobody looks at {endpoint.pod}")

    async def command(self, endpoint: Endpoint, command: Command) -> EngineState:
        """On its way."""
        return await Way()


@dataclass
class Followed:
    """A follower and its long poll."""

    follower: Follower
    asked_host: Host  # at its address, when it was asked last
    after: int | None = None
    asked: int = 0  # polls so far: an answer to an older one comes to nobody
    waiting: bool = False  # the guard holds the poll until something changes
    failures: int = 0
    giving: set[Command] = field(default_factory=set)


class Following:
    """All guards that one life of an operator follows."""

    def __init__(
        self, name: str, uid: str, clock: Clock, network: Network, nodes: Nodes, on_news: Callable[[], None]
    ) -> None:
        self.name = name
        self.uid = uid  # of the operator's ServiceAccount
        self.alive = True
        self.followed: dict[str, Followed] = {}
        self.on_news = on_news
        self.known_addresses: Callable[[], set[str]] = set  # of pods that the operator has heard of
        self.commands: dict[str, int] = {}
        self._clock = clock
        self._network = network
        self._nodes = nodes

    def ensure(self, wanted: dict[str, str]) -> None:
        """Follow exactly these pods, at these addresses."""
        for uid, each in list(self.followed.items()):
            if wanted.get(uid) != each.follower.endpoint.ip:
                del self.followed[uid]
        for uid in sorted(wanted.keys() - self.followed.keys()):
            host = self._nodes.at(wanted[uid])
            if host is None:
                continue
            endpoint = Endpoint(IDENTITY, uid, uid, wanted[uid])
            follower = Follower(endpoint, Transport(), self.on_news, self._clock.now)
            self.followed[uid] = Followed(follower, host)
            self._poll(uid)

    def vouch(self, epoch: int) -> None:
        """The record has come so far."""
        for each in self.followed.values():
            each.follower.vouch(epoch)

    def views(self) -> dict[str, GuardView]:
        """What is known, by pod uid."""
        return {uid: each.follower.view for uid, each in self.followed.items()}

    # long polls ---------------------------------------------------------------------------------------------------

    def _current(self, uid: str, ask: int) -> Followed | None:
        each = self.followed.get(uid)
        return each if self.alive and each is not None and each.asked == ask else None

    def _poll(self, uid: str) -> None:
        each = self.followed.get(uid)
        if each is None or not self.alive:
            return
        each.asked += 1
        each.waiting = False
        ask, host = each.asked, self._at(uid, each)
        each.asked_host = host

        def arrive() -> None:
            each = self._current(uid, ask)
            if each is None:
                return
            if host.process is None:
                self._clock.later(0.005, lambda: self._failed(uid, ask, Unreachable("connection refused")))
            elif host.obeys != self.uid:
                text = f"uid {self.uid} does not control this engine"
                self._network.answer(self.name, host, lambda: self._failed(uid, ask, Disowned(text)))
            else:
                host.process.apply(Heard(), self._clock.time)
                self._nodes.on_change(host)
                if each.after == host.process.state.sequence:
                    each.waiting = True
                    self._clock.later(POLL_S, lambda: self._release(uid, ask))
                else:
                    self._tell(uid, ask)

        self._network.request(self.name, host, arrive, may_lose=False)
        self._clock.later(
            POLL_S + POLL_GRACE_S, lambda: self._failed(uid, ask, Unreachable("no answer within the deadline"))
        )

    def _at(self, uid: str, each: Followed) -> Host:
        """Who answers at its address.

        Where another pod has it and the operator has not heard so, nobody does: here the model is kinder than the
        world, in which a guard does not say which pod it is.
        """
        ip = each.follower.endpoint.ip
        host = self._nodes.at(ip) or each.asked_host
        if host.uid == uid or ip in self.known_addresses():
            return host
        return self._nodes.hosts.get(uid) or self._nodes.graves[uid]

    def changed(self, host: Host) -> None:
        """The guard has news, or its process is gone: whoever waits is answered."""
        for uid, each in list(self.followed.items()):
            if self.alive and each.waiting and each.asked_host is host:
                self._answer(uid, each, host)

    def _answer(self, uid: str, each: Followed, host: Host) -> None:
        ask = each.asked
        if host.process is None:
            each.waiting = False
            self._network.answer(
                self.name, host, lambda: self._failed(uid, ask, Unreachable("connection reset")), may_lose=False
            )
        elif host.process.state.sequence != each.after:
            self._tell(uid, ask)

    def _release(self, uid: str, ask: int) -> None:
        each = self._current(uid, ask)
        if each is not None and each.waiting:
            self._tell(uid, ask)

    def _tell(self, uid: str, ask: int) -> None:
        each = self._current(uid, ask)
        if each is None or each.asked_host.process is None:
            return
        each.waiting = False
        state = wire(each.asked_host, self._clock.time)

        def arrive() -> None:
            each = self._current(uid, ask)
            if each is not None:
                each.failures, each.after = 0, state.sequence
                each.follower.told(state)
                self._poll(uid)

        self._network.answer(self.name, each.asked_host, arrive, may_lose=False)

    def _failed(self, uid: str, ask: int, error: RollfleetError) -> None:
        each = self._current(uid, ask)
        if each is None:
            return
        each.asked += 1
        each.after = None
        each.failures += 1
        each.follower.failed(error)
        self._clock.later(self._back_off_s(each), lambda: self._poll(uid) if self._is(uid, each) else None)

    def _is(self, uid: str, each: Followed) -> bool:
        return self.followed.get(uid) is each

    def _back_off_s(self, each: Followed) -> float:
        return float(min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(each.failures - 1, 10)))

    # commands -------------------------------------------------------------------------------------------------------

    def give(self, uid: str, command: Command) -> None:
        """Send a command, unless the same one is still on its way."""
        each = self.followed.get(uid)
        if each is None or command in each.giving:
            return
        name = type(command).__name__
        self.commands[name] = self.commands.get(name, 0) + 1
        each.giving.add(command)
        work = each.follower.give(command)
        work.send(None)
        host, done = self._at(uid, each), [False]

        def settle(outcome: EngineState | RollfleetError) -> None:
            if done[0]:
                return
            done[0] = True
            each.giving.discard(command)
            if self.alive and self._is(uid, each):
                _go_on(work, outcome)
                if isinstance(outcome, StaleAttempt | Unreachable):
                    each.failures, each.after = 0, None
                    self._poll(uid)
            else:
                work.close()

        def arrive() -> None:
            if host.process is None:
                settle(Unreachable("connection refused"))
                return
            if host.obeys != self.uid:
                refusal = Disowned(f"uid {self.uid} does not control this engine")
                self._network.answer(self.name, host, lambda: settle(refusal))
                return
            rejection = host.process.obey(command, self._clock.time)
            self._nodes.on_change(host)
            outcome = wire(host, self._clock.time) if rejection is None else _error(rejection)
            self._network.answer(self.name, host, lambda: settle(outcome))

        self._network.request(self.name, host, arrive)
        self._clock.later(COMMAND_S, lambda: settle(Unreachable("no answer within the deadline")))

    def stop(self) -> None:
        """The operator's process is gone; what it sent is on its way all the same."""
        self.alive = False
        self.followed.clear()


def wire(host: Host, now: float) -> EngineState:
    """What GET state answers."""
    process = host.process
    if process is None:
        raise AssertionError("no process answers")
    turnstile = process.crowd.turnstile
    return to_wire(process.state, FACTS, turnstile.in_flight, now).model_copy(update={"kept": turnstile.kept})


def _go_on(work: Coroutine[Any, Any, str], outcome: EngineState | RollfleetError) -> None:
    try:
        if isinstance(outcome, RollfleetError):
            work.throw(outcome)
        else:
            work.send(outcome)
    except StopIteration:
        return
    raise AssertionError("the follower waits for something else")


def _error(rejection: Rejection) -> RollfleetError:
    if rejection.reason in STALE:
        return StaleAttempt(rejection.message)
    return Refused(rejection.message, rejection.reason)
