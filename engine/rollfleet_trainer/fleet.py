"""RolloutFleet: a trainer's hold on a fleet of rollout engines.

    fleet = RolloutFleet("rl/qwen")
    update = await fleet.update(policy.named_parameters(), step=step, pause="abort")

The same without asyncio is `fleet.blocking.update(...)`. Both may be used where a loop runs already.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rollfleet_protocol.senders import LONGEST_LEASE_S, SHORTEST_LEASE_S
from rollfleet_trainer.background import Background
from rollfleet_trainer.control import Control
from rollfleet_trainer.driving import Driver
from rollfleet_trainer.errors import NotPossible, SenderLost
from rollfleet_trainer.leases import DURATION_S
from rollfleet_trainer.push import Push
from rollfleet_trainer.ranks import Alone, ProcessGroupRanks, Ranks
from rollfleet_trainer.updates import OnProgress, Update
from rollfleet_trainer.versions import Wish

if TYPE_CHECKING:
    from rollfleet_trainer.sources import Given

T = TypeVar("T")
CLOSE_S = 5.0


class RolloutFleet:
    """A fleet that this process trains for: `namespace/name` of its RolloutEngine.

    kubeconfig: else the pod's ServiceAccount, else $KUBECONFIG. service_account: as whom to send; else our own, or the
    fleet's only trainer. wait_s: how long a live other trainer is waited for. address: this process's, as engines reach
    it; else $POD_IP, or found by the way to them. process_group: of torch.distributed, with all ranks of a sharded
    trainer; then `update` is called on all of them. part_bytes: of gathered tensors that are held at once.

    The fleet's sender Lease is taken with the first update and kept until `close`: one trainer at a time.
    """

    def __init__(
        self,
        fleet: str,
        kubeconfig: str | Path | None = None,
        *,
        service_account: str | None = None,
        wait_s: float = 0.0,
        lease_duration_s: int = DURATION_S,
        address: str | None = None,
        process_group: Any = None,
        part_bytes: int = 1 << 30,
    ) -> None:
        namespace, slash, name = fleet.partition("/")
        if not (namespace and slash and name) or "/" in name:
            raise NotPossible(f"{fleet!r}: a fleet is named namespace/name")
        if not SHORTEST_LEASE_S <= lease_duration_s <= LONGEST_LEASE_S:
            raise NotPossible(f"lease_duration_s is {lease_duration_s}: {SHORTEST_LEASE_S} to {LONGEST_LEASE_S}")
        self._ranks: Ranks = Alone() if process_group is None else ProcessGroupRanks(process_group)
        self._busy = threading.Lock()
        self._driver: Driver | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rollfleet-update")
        if self._ranks.rank == 0:
            background = Background(f"rollfleet {fleet}")
            control = Control(
                background,
                namespace,
                name,
                kubeconfig=kubeconfig,
                service_account=service_account,
                lease_duration_s=lease_duration_s,
            )
            self._driver = Driver(background, control, self._ranks, address, wait_s, part_bytes)
        self.blocking = BlockingFleet(self)
        atexit.register(self._close)

    async def update(
        self,
        named_parameters: Given,
        *,
        step: int | str = "",
        pause: str | None = None,
        drain_timeout_s: int | None = None,
        version: int | None = None,
        probe: Sequence[int] | None = None,
        recovery: str | None = None,
        spec: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Update:
        """Ask for the next version and send it; returns when the fleet serves it.

        named_parameters: a module, a mapping, a WeightSource, a callable that makes pairs, or an iterator of them;
        names, dtypes and shapes as the model's checkpoint has them. pause: abort, wait or keep (spec.pause.mode).
        version: a number higher than all before; else the next one. probe: token ids that all engines are asked
        (spec.verify.probe). recovery: path of a stored copy below volumes.checkpoints. spec: further fields of
        WeightVersion.spec. on_progress is called in the thread that sends; what it raises ends the update.

        Raises UpdateFailed, FleetNeedsWeights, Superseded, SenderLost, AnotherSender, NotPossible, ApiServerError.
        """
        wish = Wish(version, str(step), pause, drain_timeout_s, probe, recovery, spec or {})
        return await self._in_thread(lambda: self._update(named_parameters, wish, on_progress))

    def begin(
        self,
        version: int | None = None,
        *,
        step: int | str = "",
        pause: str | None = None,
        drain_timeout_s: int | None = None,
        probe: Sequence[int] | None = None,
        recovery: str | None = None,
        spec: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Beginning:
        """An update whose bytes you send yourself: `with fleet.begin() as u`, or `async with`.

        Inside, `u` keeps vLLM's VLLMWeightSyncClient, and all engines wait for it. Leaving the block waits for the
        fleet to serve the version. On rank 0 only. One attempt: after a failure begin the same version again, or a
        higher one. Errors are those of `update`.
        """
        wish = Wish(version, str(step), pause, drain_timeout_s, probe, recovery, spec or {})
        return Beginning(self, wish, on_progress)

    async def aclose(self) -> None:
        """Give the Lease back, and let go of all connections."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- what both faces share

    def _update(self, given: Given, wish: Wish, on_progress: OnProgress | None) -> Update:
        from rollfleet_trainer.ranks import follow  # noqa: PLC0415
        from rollfleet_trainer.sources import Weights  # noqa: PLC0415 - needs torch

        weights = Weights(given)
        with self._alone():
            if self._driver is None:
                return follow(self._ranks, weights)
            return self._driver.update(weights, wish, on_progress)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise NotPossible("this object is in an update already: one at a time")
        try:
            yield
        finally:
            self._busy.release()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """In the thread that sends, on the caller's device. A caller that is cancelled ends the update first."""
        device = _device()

        def on_device() -> T:
            _use(device)
            return call()

        running = asyncio.get_running_loop().run_in_executor(self._worker, on_device)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if self._driver is not None:
                self._driver.control.stop(SenderLost("the caller of update was cancelled"))
            await asyncio.wait({running})
            raise

    def _close(self) -> None:
        atexit.unregister(self._close)
        self._worker.shutdown(wait=False)
        if self._driver is None:
            return
        self._driver.control.stop(NotPossible("this object was closed"))
        idle = self._busy.acquire(timeout=CLOSE_S)  # an update that runs has ended by then, and told its last word
        try:
            self._driver.close()
        finally:
            if idle:
                self._busy.release()


class BlockingFleet:
    """The blocking face of a RolloutFleet. Weights are gone through in the calling thread."""

    def __init__(self, fleet: RolloutFleet) -> None:
        self._fleet = fleet

    def update(
        self,
        named_parameters: Given,
        *,
        step: int | str = "",
        pause: str | None = None,
        drain_timeout_s: int | None = None,
        version: int | None = None,
        probe: Sequence[int] | None = None,
        recovery: str | None = None,
        spec: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Update:
        """As RolloutFleet.update."""
        wish = Wish(version, str(step), pause, drain_timeout_s, probe, recovery, spec or {})
        return self._fleet._update(named_parameters, wish, on_progress)

    @property
    def begin(self) -> Callable[..., Beginning]:
        """As RolloutFleet.begin."""
        return self._fleet.begin

    def close(self) -> None:
        """As RolloutFleet.aclose."""
        self._fleet._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


class Beginning:
    """An update that was begun by `begin`: a context manager of either kind. `update` is set once it has ended well."""

    def __init__(self, fleet: RolloutFleet, wish: Wish, on_progress: OnProgress | None) -> None:
        self._fleet, self._wish, self._on_progress = fleet, wish, on_progress
        self._push: Push | None = None
        self.update: Update | None = None

    def __enter__(self) -> Push:
        driver = self._fleet._driver
        if driver is None:
            raise NotPossible("begin is for rank 0; the others only go through the weights with it")
        if not self._fleet._busy.acquire(blocking=False):
            raise NotPossible("this object is in an update already: one at a time")
        try:
            self._push = driver.begin(self._wish, self._on_progress)
        except BaseException:
            self._fleet._busy.release()
            raise
        return self._push

    def __exit__(self, _type: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        driver, push = self._fleet._driver, self._push
        if driver is None or push is None:
            return
        try:
            self.update = driver.finish(push, error)
        finally:
            self._fleet._busy.release()

    async def __aenter__(self) -> Push:
        return await self._fleet._in_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._fleet._in_thread(lambda: self.__exit__(kind, error, trace))


def _device() -> int | None:
    """The caller's accelerator: which one is current is a thread's own."""
    import torch  # noqa: PLC0415

    return int(torch.accelerator.current_device_index()) if torch.accelerator.is_available() else None


def _use(device: int | None) -> None:
    if device is not None:
        import torch  # noqa: PLC0415

        torch.accelerator.set_device_index(device)
