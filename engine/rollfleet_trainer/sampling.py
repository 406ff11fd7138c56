"""Rollouts of the fleet that one trains for: found by its status, paced by the versions that its updates ask for."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from rollfleet_trainer.apiserver import IN_A_POD
from rollfleet_trainer.background import Background
from rollfleet_trainer.errors import NotPossible
from rollfleet_trainer.looks import Serving
from rollfleet_trainer.rollouts import Rollouts
from rollfleet_trainer.samples import Sample

Where = Callable[[], Serving]


class Versions:
    """The newest version that was asked for, told to whoever paces by it. Of any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: int | None = None
        self._listeners: list[Callable[[int], None]] = []

    def tell(self, version: int) -> None:
        """It is this one now."""
        with self._lock:
            self._newest = version
            for listener in self._listeners:
                listener(version)

    def listen(self, listener: Callable[[int], None]) -> None:
        """Hear of the newest one, if there is one, and of those to come."""
        with self._lock:
            self._listeners.append(listener)
            if self._newest is not None:
                listener(self._newest)

    def forget(self, listener: Callable[[int], None]) -> None:
        """It hears no more."""
        with self._lock:
            self._listeners.remove(listener)


class FleetRollouts:
    """An async context manager that gives a Rollouts, which every update of the fleet's object tells its version."""

    def __init__(
        self,
        where: Where,
        versions: Versions,
        endpoints: str | Sequence[str] | None,
        model: str | None,
        options: dict[str, Any],
    ) -> None:
        self._where, self._versions = where, versions
        self._endpoints, self._model, self._options = endpoints, model, options
        self._rollouts: Rollouts | None = None

    async def __aenter__(self) -> Rollouts:
        endpoints, model, options = self._endpoints, self._model, self._options
        if endpoints is None or model is None:
            found = await asyncio.to_thread(self._where)
            endpoints, model = endpoints or found.endpoint, model or found.model
            options = {"routed_experts": found.routed_experts} | options
            if not endpoints:
                raise NotPossible("status.endpoint of the fleet is empty: no operator has looked at it; or give one")
            if self._endpoints is None and "transport" not in options and IN_A_POD not in os.environ:
                await _require_known(found.endpoint)
        self._rollouts = Rollouts(endpoints, model=model, **options)
        self._versions.listen(self._rollouts.note_version)
        return self._rollouts

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._rollouts is not None:
            self._versions.forget(self._rollouts.note_version)
            await self._rollouts.aclose()
            self._rollouts = None


async def _require_known(endpoint: str) -> None:
    """NotPossible where this machine knows no such host: a Service's name is one within its cluster only."""
    parts = urlsplit(endpoint)
    try:
        await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port)
    except socket.gaierror as error:
        raise NotPossible(
            f"status.endpoint of the fleet is {endpoint}, which is a name within its cluster, and this is no pod: "
            f"{error}; give endpoints=, the way from here to the fleet's router or engines"
        ) from error


class BlockingRollouts:
    """The blocking face of Rollouts, as a context manager. Calls of several threads run at once.

        with fleet.blocking.rollouts(max_staleness=1) as r, ThreadPoolExecutor(64) as pool:
            samples = list(pool.map(lambda prompt: r.complete(prompt, 1024), prompts))

    Leaving the block ends what still runs: whoever waits for it gets ClosedError.
    """

    def __init__(self, made: FleetRollouts) -> None:
        self._made = made
        self._background: Background | None = None
        self._rollouts: Rollouts | None = None

    def __enter__(self) -> Self:
        background = Background("rollfleet rollouts")
        try:
            self._rollouts = background.run(self._made.__aenter__())
        except BaseException:
            background.close()
            raise
        self._background = background
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        background, self._background = self._background, None
        if background is None:
            return
        try:
            background.run(self._made.__aexit__(kind, error, None))
        finally:
            background.close()

    def complete(self, prompt: str | Sequence[int], max_tokens: int, **how: Any) -> Sample:
        """As Rollouts.complete."""
        return self._run(lambda rollouts: rollouts.complete(prompt, max_tokens, **how))

    def chat(self, messages: Sequence[Any], max_tokens: int, **how: Any) -> Sample:
        """As Rollouts.chat."""
        return self._run(lambda rollouts: rollouts.chat(messages, max_tokens, **how))

    def generate(self, token_ids: Sequence[int], max_tokens: int, **how: Any) -> Sample:
        """As Rollouts.generate."""
        return self._run(lambda rollouts: rollouts.generate(token_ids, max_tokens, **how))

    def replay(self, token_ids: Sequence[int], trace: Sequence[int], **how: Any) -> Sample:
        """As Rollouts.replay."""
        return self._run(lambda rollouts: rollouts.replay(token_ids, trace, **how))

    def note_version(self, version: int) -> None:
        """As Rollouts.note_version; updates of this fleet's object tell theirs by themselves."""
        self._opened()[1].note_version(version)

    @property
    def served_version(self) -> int | None:
        """As Rollouts.served_version."""
        return self._opened()[1].served_version

    def _run(self, call: Callable[[Rollouts], Any]) -> Sample:
        background, rollouts = self._opened()
        sample: Sample = background.run(call(rollouts))
        return sample

    def _opened(self) -> tuple[Background, Rollouts]:
        if self._background is None or self._rollouts is None:
            raise NotPossible("rollouts is a context manager: `with fleet.blocking.rollouts(...) as r`")
        return self._background, self._rollouts
