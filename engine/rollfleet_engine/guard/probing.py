"""A probe on demand, of an engine that may be serving: reads, and gives way to whatever is about to change it."""

import asyncio
from collections.abc import Callable
from math import isfinite

from rollfleet_engine.guard.ports import EngineAdapter, EngineError
from rollfleet_engine.guard.states import GuardState, Rejection
from rollfleet_protocol.commands import Probe
from rollfleet_protocol.refusals import RefusalReason
from rollfleet_protocol.state import OperationName, ProbeReport, WeightsState

_PROBED = (WeightsState.INITIAL, WeightsState.LOADED, WeightsState.VERIFIED)


def obstacle(state: GuardState, command: Probe) -> Rejection | None:
    """Why this probe cannot be answered now."""
    if command.incarnation != state.incarnation:
        message = f"this is incarnation {state.incarnation}, not {command.incarnation}: read the state again"
        return Rejection(RefusalReason.WRONG_INCARNATION, message)
    if not state.alive:
        return Rejection(RefusalReason.ORDER_VIOLATION, "the engine core is dead")
    running = state.running
    if running is not None and running.name is not OperationName.PREPARE:
        message = f"{running.name} of epoch {running.epoch} is running: probe again after the update"
        return Rejection(RefusalReason.ORDER_VIOLATION, message)
    if state.paused:
        return Rejection(RefusalReason.ORDER_VIOLATION, "the scheduler is paused: probe again after the update")
    if state.weights.state not in _PROBED:
        message = f"the weights are {state.weights.state}: there is nothing to compare"
        return Rejection(RefusalReason.ORDER_VIOLATION, message)
    return None


class Probing:
    """At most one probe at once."""

    def __init__(self, adapter: EngineAdapter, state: Callable[[], GuardState]) -> None:
        self._adapter = adapter
        self._state = state
        self._task: asyncio.Task[tuple[tuple[float, ...], ...]] | None = None

    async def probe(self, command: Probe) -> ProbeReport | Rejection:
        """The report, or why there is none."""
        if self._task is not None and self._task.cancelling():  # its asker is gone, and it leaves the engine
            await asyncio.wait({self._task}, timeout=command.deadline_seconds)
        state = self._state()
        rejection = obstacle(state, command)
        if rejection is None and self._task is not None:
            rejection = Rejection(RefusalReason.BUSY, "another probe is running: ask again")
        if rejection is not None:
            return rejection
        loop = asyncio.get_running_loop()
        began = loop.time()
        task = asyncio.create_task(self._ask(command), name="rollfleet-probe")
        self._task = task
        task.add_done_callback(self._forget)  # not before: an update that begins must wait until it has left the engine
        try:
            await asyncio.wait({task})
        finally:  # whoever asked may be gone
            if not task.cancelling():
                task.cancel()
        if task.cancelled():
            return Rejection(RefusalReason.ORDER_VIOLATION, "an update began: probe again after it")
        error = task.exception()
        if isinstance(error, EngineError):
            return Rejection(RefusalReason.PROBE_FAILED, error.message)
        if not all(isfinite(value) for each in task.result() for value in each):
            return Rejection(RefusalReason.PROBE_FAILED, f"the engine answered no numbers: {task.result()}")
        return ProbeReport(
            incarnation=state.incarnation,
            epoch=self._state().epoch,
            gate=self._state().gate,
            weights=state.weights,
            tokens=command.tokens,
            by_rank=task.result(),
            seconds=loop.time() - began,
        )

    def _forget(self, task: asyncio.Task[tuple[tuple[float, ...], ...]]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # seen, also where whoever asked is gone

    async def _ask(self, command: Probe) -> tuple[tuple[float, ...], ...]:
        return await self._adapter.probe(command.tokens, command.deadline_seconds)

    def give_way(self) -> asyncio.Task[tuple[tuple[float, ...], ...]] | None:
        """Something is about to change the engine: end the probe that runs; None if there is none."""
        if self._task is not None and not self._task.cancelling():  # a second time would cut its leaving short
            self._task.cancel()
        return self._task
