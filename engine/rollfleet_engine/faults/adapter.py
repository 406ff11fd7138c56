"""Faults inside of the engine: around the two ports by which the guard drives it."""

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from rollfleet_engine.faults.http import Hands
from rollfleet_engine.faults.injector import Injector
from rollfleet_engine.faults.plan import Call, FaultType, Rule, choose
from rollfleet_engine.guard.checkpoints import OnProgress, Stager
from rollfleet_engine.guard.ports import EngineAdapter, EngineError, Received
from rollfleet_engine.weights.coverage import Form, layer_of
from rollfleet_engine.weights.staging import StagedCheckpoint
from rollfleet_protocol.commands import CheckpointSource, PauseMode
from rollfleet_protocol.sleep import Tag
from rollfleet_protocol.state import Facts, FailureReason, Transferred

# How each call fails, as real adapters report it.
_REASONS = {
    Call.ENGINE_STAGE: FailureReason.CHECKPOINT_INVALID,
    Call.ENGINE_PAUSE: FailureReason.PAUSE_FAILED,
    Call.ENGINE_APPLY: FailureReason.TRANSFER_FAILED,
    Call.ENGINE_RECOVER: FailureReason.TRANSFER_FAILED,
    Call.ENGINE_RESET_CACHES: FailureReason.CACHE_RESET_FAILED,
    Call.ENGINE_RESUME: FailureReason.PAUSE_FAILED,
    Call.ENGINE_PROBE: FailureReason.PROBE_FAILED,
}
_TOUCHING = frozenset({Call.ENGINE_APPLY, Call.ENGINE_RECOVER})
_UNBOUNDED_S = float("inf")


class _Faults:
    """Strikes the calls of one port."""

    def __init__(self, injector: Injector, hands: Hands) -> None:
        self._injector = injector
        self._hands = hands

    async def before(self, call: Call, deadline_s: float) -> Rule | None:
        """What comes before the call; the rule, where it is for the caller to obey."""
        strike = self._injector.strike(call)
        if strike is None:
            return None
        rule = strike.rule
        match rule.fault:
            case FaultType.REFUSE:
                raise EngineError(_REASONS[call], f"{call}: {rule.words}", touched=call in _TOUCHING)
            case FaultType.DELAY:
                await asyncio.sleep(min(rule.duration_s, deadline_s))
                if rule.duration_s >= deadline_s:
                    message = f"{call}: not done within {deadline_s:g} s"
                    raise EngineError(FailureReason.DEADLINE_EXCEEDED, message, touched=call in _TOUCHING)
            case FaultType.HANG:
                await asyncio.sleep(rule.duration_s)  # past the deadline, as a collective that waits for a lost rank
            case FaultType.DIE:
                await self._hands.die()
            case FaultType.RESTART:
                await self._hands.restart()
        return rule

    def layer(self, rule: Rule, staged: StagedCheckpoint) -> str:
        """The layer to skip."""
        layers = list({layer_of(tensor.name) for tensor in staged.tensors})
        if rule.layer is not None and rule.layer not in layers:
            self._injector.not_done(rule.call, f"no {rule.layer!r} among {', '.join(sorted(layers)[:5])}, ...")
        return rule.layer or choose(layers, self._injector.plan.seed, "layer", staged.path)


class FaultyAdapter:
    """Keeps EngineAdapter, badly."""

    def __init__(self, inner: EngineAdapter, injector: Injector, hands: Hands) -> None:
        self._inner = inner
        self._faults = _Faults(injector, hands)

    async def look(self, deadline_s: float) -> Mapping[str, str]:
        """Never struck: without it there is no guard yet."""
        return await self._inner.look(deadline_s)

    def facts(self) -> Facts:
        """The engine's."""
        return self._inner.facts()

    def alive(self) -> bool:
        """Whether the engine is."""
        return self._inner.alive()

    def tokens(self) -> Mapping[str, int]:
        """The engine's."""
        return self._inner.tokens()

    async def pause(self, mode: PauseMode, deadline_s: float) -> None:
        """Struck as engine.pause."""
        await self._faults.before(Call.ENGINE_PAUSE, deadline_s)
        await self._inner.pause(mode, deadline_s)

    async def abort_all(self, deadline_s: float) -> None:
        """Never struck: the guard calls it as often as it takes."""
        await self._inner.abort_all(deadline_s)

    async def abort(self, requests: tuple[str, ...], deadline_s: float) -> None:
        """Never struck, as abort_all."""
        await self._inner.abort(requests, deadline_s)

    async def resume(self, deadline_s: float) -> None:
        """Struck as engine.resume."""
        await self._faults.before(Call.ENGINE_RESUME, deadline_s)
        await self._inner.resume(deadline_s)

    async def share(self, staged: StagedCheckpoint, deadline_s: float) -> None:
        """Never struck: staging is, as a whole."""
        await self._inner.share(staged, deadline_s)

    async def apply(self, staged: StagedCheckpoint, epoch: int, version: int, deadline_s: float) -> Transferred:
        """Struck as engine.apply. A skipped layer never comes."""
        rule = await self._faults.before(Call.ENGINE_APPLY, deadline_s)
        if rule is not None and rule.fault is FaultType.SKIP:
            skipped = self._faults.layer(rule, staged)
            left = tuple(tensor for tensor in staged.tensors if layer_of(tensor.name) != skipped)
            staged = dataclasses.replace(staged, tensors=left, open_fds=staged.open_fds)
        return await self._inner.apply(staged, epoch, version, deadline_s)

    async def push_init(self, backend: str, info: Mapping[str, Any], deadline_s: float) -> None:
        """Never struck: faults of pushes come from their trainer."""
        await self._inner.push_init(backend, info, deadline_s)

    async def push_start(self, deadline_s: float) -> None:
        """Never struck."""
        await self._inner.push_start(deadline_s)

    async def push_update(self, info: Mapping[str, Any], deadline_s: float) -> None:
        """Struck as engine.apply; layers cannot be skipped, since it is the trainer that sends them."""
        await self._faults.before(Call.ENGINE_APPLY, deadline_s)
        await self._inner.push_update(info, deadline_s)

    async def push_finish(self, digest: str | None, version: int, deadline_s: float) -> Received:
        """Never struck."""
        return await self._inner.push_finish(digest, version, deadline_s)

    async def sleep(self, level: int, deadline_s: float) -> None:
        """Never struck."""
        await self._inner.sleep(level, deadline_s)

    async def wake(self, tags: tuple[Tag, ...], deadline_s: float) -> None:
        """Never struck."""
        await self._inner.wake(tags, deadline_s)

    async def recover(self, deadline_s: float) -> None:
        """Struck as engine.recover."""
        await self._faults.before(Call.ENGINE_RECOVER, deadline_s)
        await self._inner.recover(deadline_s)

    async def reset_caches(self, deadline_s: float, *, kept: bool = False) -> None:
        """Struck as engine.resetCaches."""
        await self._faults.before(Call.ENGINE_RESET_CACHES, deadline_s)
        await self._inner.reset_caches(deadline_s, kept=kept)

    async def probe(self, tokens: tuple[int, ...], deadline_s: float) -> tuple[tuple[float, ...], ...]:
        """Struck as engine.probe."""
        await self._faults.before(Call.ENGINE_PROBE, deadline_s)
        return await self._inner.probe(tokens, deadline_s)


class FaultyStager:
    """Keeps Stager, badly: struck as engine.stage."""

    def __init__(self, inner: Stager, injector: Injector, hands: Hands) -> None:
        self._inner = inner
        self._faults = _Faults(injector, hands)

    async def stage(self, source: CheckpointSource, on_progress: OnProgress) -> StagedCheckpoint:
        """As Stager says."""
        await self._faults.before(Call.ENGINE_STAGE, _UNBOUNDED_S)
        return await self._inner.stage(source, on_progress)

    async def judge(self, tensors: Mapping[str, Form], *, whole: bool) -> None:
        """Never struck: it asks nothing of the engine."""
        await self._inner.judge(tensors, whole=whole)
