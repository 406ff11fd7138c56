"""One follower per engine of every fleet."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from typing import Protocol

from rollfleet_operator.clients.follower import BACKOFF_MAX_S, Follower, Guards
from rollfleet_operator.clients.guards import Endpoint, command_name
from rollfleet_operator.core.observed import GuardView
from rollfleet_protocol.commands import Command
from rollfleet_protocol.engine_config import FleetIdentity

logger = logging.getLogger(__name__)


class Followed(Protocol):
    """A pod, or what is remembered of one."""

    @property
    def name(self) -> str:
        """The pod's."""
        ...

    @property
    def uid(self) -> str:
        """The pod's."""
        ...

    @property
    def ip(self) -> str:
        """Its address; empty where it has none yet."""
        ...


class Followers:
    """The followers of all fleets. A key is "namespace/fleet"."""

    def __init__(self, guards: Guards, on_change: Callable[[str], None], clock: Callable[[], datetime]) -> None:
        self._guards = guards
        self._on_change = on_change
        self._clock = clock
        self._followers: dict[str, dict[str, tuple[Follower, asyncio.Task[None]]]] = {}  # key -> pod uid
        self._giving: dict[tuple[str, Command], asyncio.Task[str]] = {}

    def ensure(self, key: str, fleet: FleetIdentity, pods: Iterable[Followed]) -> None:
        """Follow exactly these pods: those with an address. A pod whose address changed is followed anew."""
        wanted = {pod.uid: Endpoint(fleet, pod.name, pod.uid, pod.ip) for pod in pods if pod.ip}
        running = self._followers.setdefault(key, {})
        for uid in [uid for uid, (follower, _) in running.items() if wanted.get(uid) != follower.endpoint]:
            self._stop(key, uid)
        for uid, endpoint in wanted.items():
            if uid not in running or running[uid][1].done():
                self._start(key, uid, endpoint)
        if not running:
            del self._followers[key]

    def vouch(self, key: str, epoch: int) -> None:
        """The fleet's record has come to this epoch, and so may its guards."""
        for follower, _ in self._followers.get(key, {}).values():
            follower.vouch(epoch)

    def be_silent(self, key: str, silent: bool) -> None:
        """Whether the guards of this fleet are only looked at."""
        for follower, _ in self._followers.get(key, {}).values():
            follower.be_silent(silent)

    def views(self, key: str) -> dict[str, GuardView]:
        """What is known, by pod uid."""
        return {uid: follower.view for uid, (follower, _) in self._followers.get(key, {}).items()}

    async def first_words(self, key: str, within_s: float) -> None:
        """Wait until every guard of the fleet has been heard of, at most so long."""
        waits = [follower.heard.wait() for follower, _ in self._followers.get(key, {}).values()]
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*waits)

    def hurry(self, key: str, pod_uid: str) -> None:
        """Ask this guard now: its pod changed."""
        followed = self._followers.get(key, {}).get(pod_uid)
        if followed is not None and not followed[0].view.reachable:
            followed[0].hurry()

    def give(self, key: str, pod_uid: str, command: Command) -> "asyncio.Task[str] | None":
        """Send a command, unless the same one is still on its way. None where nobody follows the pod."""
        followed = self._followers.get(key, {}).get(pod_uid)
        if followed is None:
            return None
        way = (pod_uid, command)
        task = self._giving.get(way)
        if task is None:
            task = asyncio.create_task(
                followed[0].give_in_turn(command), name=f"{command_name(command)} to {followed[0].endpoint.pod}"
            )
            self._giving[way] = task
            task.add_done_callback(lambda _: self._giving.pop(way, None))
        return task

    def forget(self, key: str) -> None:
        """The fleet is gone."""
        for uid in list(self._followers.get(key, {})):
            self._stop(key, uid)
        self._followers.pop(key, None)

    def count(self) -> int:
        """Guards that are followed."""
        return sum(len(followers) for followers in self._followers.values())

    async def close(self) -> None:
        """Stop all, and wait for them."""
        tasks: list[asyncio.Task[None] | asyncio.Task[str]] = [*self._giving.values()]
        tasks += [task for followers in self._followers.values() for _, task in followers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._followers.clear()

    def _start(self, key: str, uid: str, endpoint: Endpoint) -> None:
        follower = Follower(endpoint, self._guards, lambda: self._on_change(key), self._clock)
        task = asyncio.create_task(follower.run(), name=f"follower of {endpoint.pod}")
        task.add_done_callback(lambda done: self._ended(key, endpoint, done))
        self._followers[key][uid] = (follower, task)

    def _stop(self, key: str, uid: str) -> None:
        _, task = self._followers[key].pop(uid)
        task.cancel()

    def _ended(self, key: str, endpoint: Endpoint, task: "asyncio.Task[None]") -> None:
        """A follower ends by cancellation only; anything else is a bug, told and cured by the next pass."""
        if task.cancelled():
            return
        logger.error("the follower of %s died", endpoint.pod, exc_info=task.exception())
        asyncio.get_running_loop().call_later(BACKOFF_MAX_S, self._on_change, key)
