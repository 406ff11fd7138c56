"""RolloutFleet: a trainer's hold on a fleet of rollout engines.

    fleet = RolloutFleet("rl/qwen")
    update = await fleet.update(policy.named_parameters(), step=step, pause="abort")
    ckpt = await fleet.publish(policy.state_dict(), step=step)
    async with fleet.rollouts(max_staleness=1, on_abort="continue", hold_s=60) as r: ...

The same without asyncio is `fleet.blocking.update(...)`. Both may be used where a loop runs already.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from rollfleet_protocol.senders import LONGEST_LEASE_S, SHORTEST_LEASE_S
from rollfleet_trainer.background import Background, Worker
from rollfleet_trainer.beginning import Beginning
from rollfleet_trainer.blocking import BlockingFleet
from rollfleet_trainer.checkpoints import Published
from rollfleet_trainer.control import Control
from rollfleet_trainer.driving import Driver
from rollfleet_trainer.ending import ENDINGS
from rollfleet_trainer.errors import NotPossible, PublishError, SenderLost
from rollfleet_trainer.leases import DURATION_S
from rollfleet_trainer.looks import Serving
from rollfleet_trainer.publishing import Progress as Written
from rollfleet_trainer.publishing import Tensors
from rollfleet_trainer.ranks import Alone, ProcessGroupRanks, Ranks, follow
from rollfleet_trainer.retention import Retained
from rollfleet_trainer.sampling import FleetRollouts, Versions
from rollfleet_trainer.stops import Stop
from rollfleet_trainer.storing import CHECKPOINTS_VARIABLE, Store
from rollfleet_trainer.updates import OnProgress, Update
from rollfleet_trainer.versions import Wish, label

if TYPE_CHECKING:
    from rollfleet_trainer.sources import Given

T = TypeVar("T")
CLOSE_S = 5.0


class RolloutFleet:
    """A fleet that this process trains for: `namespace/name` of its RolloutEngine.

    kubeconfig: else the pod's ServiceAccount, else $KUBECONFIG. service_account: as whom to send; else our own, or the
    fleet's only trainer. wait_s: how long a live other trainer is waited for. address: this process's, as engines reach
    it; else $POD_IP, or found by the way to them. process_group: of torch.distributed, with all ranks of a sharded
    trainer; then `update` and `publish` are called on all of them. part_bytes: of gathered tensors held at once.
    checkpoints: where the fleet's volumes.checkpoints is mounted here, for `publish` and `retain`; else
    $ROLLFLEET_CHECKPOINTS.

    The fleet's sender Lease is taken with the first update and kept until `close`, or until the main thread ends: one
    trainer at a time.
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
        checkpoints: str | Path | None = None,
    ) -> None:
        namespace, slash, name = fleet.partition("/")
        if not (namespace and slash and name) or "/" in name:
            raise NotPossible(f"{fleet!r}: a fleet is named namespace/name")
        if not SHORTEST_LEASE_S <= lease_duration_s <= LONGEST_LEASE_S:
            raise NotPossible(f"lease_duration_s is {lease_duration_s}: {SHORTEST_LEASE_S} to {LONGEST_LEASE_S}")
        self._ranks: Ranks = Alone() if process_group is None else ProcessGroupRanks(process_group)
        self._busy = threading.Lock()
        self._closed = False
        self._versions = Versions()
        self._driver: Driver | None = None
        self._store: Store | None = None
        self._worker = Worker("rollfleet-update")
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
            root = _path(checkpoints or os.environ.get(CHECKPOINTS_VARIABLE) or None)
            self._store = store = Store(background, control, self._ranks, root)
            told = (self._versions.tell, store.require_copy)
            self._driver = Driver(background, control, self._ranks, address, wait_s, part_bytes, *told)
        self.blocking = BlockingFleet(self)
        ENDINGS.add(self._close)

    async def update(
        self,
        named_parameters: Given,
        *,
        step: int | str = "",
        pause: str | None = None,
        drain_timeout_s: int | None = None,
        version: int | None = None,
        probe: Sequence[int] | None = None,
        probe_logprobs: Sequence[float] | None = None,
        recovery: str | None = None,
        spec: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Update:
        """Ask for the next version and send it; returns when the fleet serves it.

        named_parameters: a module, a mapping, a WeightSource, a callable that makes pairs, or an iterator of them;
        names, dtypes and shapes as the model's checkpoint has them. pause: abort, wait or keep (spec.pause.mode).
        version: a number higher than all before; else the next one. probe: token ids that all engines are asked
        (spec.verify.probe); probe_logprobs: what this trainer computes for those after the first, which engines must
        answer within maxAbsLogprobDiff. recovery: path of a stored copy below volumes.checkpoints. spec: further
        fields of WeightVersion.spec. on_progress is called in the thread that sends; what it raises ends the update.

        Raises UpdateFailed, FleetNeedsWeights, Superseded, SenderLost, AnotherSender, NotPossible, ApiServerError.
        NotPossible, before a version is asked for, where names, dtypes and shapes are known and are not those that the
        fleet took from this object last: make a new one for a fleet whose model is another one now.
        """
        wish = Wish(version, label(step), pause, drain_timeout_s, probe, probe_logprobs, recovery, spec or {})
        stop = Stop()
        call = partial(self._update, named_parameters, wish, on_progress, stop)
        return await self._in_thread(call, self._ending(stop))

    async def publish(
        self,
        tensors: Given | Tensors,
        root: str | Path | None = None,
        *,
        step: int | str,
        name: str = "",
        within: str = "",
        assets: str | Path | None = None,
        keep: int | None = None,
        collective: bool = False,
        on_progress: Written | None = None,
    ) -> Published:
        """Write a checkpoint while the fleet serves: a copy for late joiners, recovery and rollback.

        Where the fleet holds these very weights, by their digest, as the version that a trainer sent, the checkpoint
        becomes that version's spec.recovery, and `recovers` of the answer names the version. tensors: as `update` or
        publishing.publish takes them; step, name, within, assets, collective as there. root: in place of `checkpoints`.
        keep: so many of the newest stay, as `retain` has it. on_progress: of tensors and bytes, in the thread that
        writes; what it raises ends the publication.

        Raises PublishError, TensorError, NotPossible, ApiServerError (the checkpoint is there then: the same call again
        names it), and what the tensors raise. A caller that is cancelled ends it at the next tensor.
        """
        stop = threading.Event()
        how = {
            "step": label(step),
            "name": name,
            "within": within,
            "assets": assets,
            "keep": keep,
            "collective": collective,
        }
        apart = self._ranks.size == 1  # it may go along with an update; ranks gather one thing at a time
        return await self._in_thread(
            lambda: self._publish(tensors, root, stop, on_progress, how), stop.set, apart=apart
        )

    async def retain(
        self,
        keep: int,
        *,
        within: str = "",
        root: str | Path | None = None,
        also_in_use: Callable[[], Collection[str]] = tuple,
    ) -> Retained:
        """Delete old checkpoints: the `keep` newest stay, and what the namespace's fleets have committed, load or name.

        also_in_use: further paths that must stay, asked anew each time: of fleets of other namespaces on this storage.
        Else as retention.retain. On rank 0 only.
        """
        return await asyncio.to_thread(self._retain, keep, within, root, also_in_use)

    def rollouts(
        self, endpoints: str | Sequence[str] | None = None, *, model: str | None = None, **options: Any
    ) -> FleetRollouts:
        """`async with fleet.rollouts(max_staleness=1, on_abort="continue") as r`: a Rollouts of this fleet.

        endpoints, model: else status.endpoint, which resolves within the cluster, and spec.model.servedName; ranks
        other than 0 give both. options: as Rollouts has them; routed_experts as spec.features.routedExperts says,
        unless given, or both of the former are. Every update of this object tells it its version when it asks for it
        (note_version); one that fails has been asked for too.
        """
        return FleetRollouts(self._serves, self._versions, endpoints, model, options)

    def begin(
        self,
        version: int | None = None,
        *,
        step: int | str = "",
        pause: str | None = None,
        drain_timeout_s: int | None = None,
        probe: Sequence[int] | None = None,
        probe_logprobs: Sequence[float] | None = None,
        recovery: str | None = None,
        spec: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Beginning:
        """An update whose bytes you send yourself: `with fleet.begin() as u`, or `async with`.

        Inside, `u` keeps vLLM's VLLMWeightSyncClient, and all engines wait for it. Leaving the block waits for the
        fleet to serve the version. On rank 0 only. One attempt: after a failure begin the same version again, or a
        higher one. Errors are those of `update`.
        """
        wish = Wish(version, label(step), pause, drain_timeout_s, probe, probe_logprobs, recovery, spec or {})
        return Beginning(self, wish, on_progress)

    @property
    def ranks(self) -> int:
        """Processes that take part in an update."""
        return self._ranks.size

    async def spec(self) -> Mapping[str, Any]:
        """RolloutEngine.spec as it is now. NotPossible where this process may not send to the fleet; on rank 0 only."""
        return await asyncio.to_thread(self._spec)

    def stop(self, why: Exception) -> None:
        """End the update that runs: it raises `why`, and tells it to engines and operator. From any thread."""
        if self._driver is not None:
            self._driver.control.stop(why)

    async def aclose(self) -> None:
        """Give the Lease back, and let go of all connections."""
        await asyncio.to_thread(self._close)

    def __enter__(self) -> NoReturn:
        raise NotPossible("without asyncio it is `with RolloutFleet(...).blocking as fleet`; else `async with`")

    def __exit__(self, *_: object) -> None:
        """Python asks for it before it enters."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- what both faces share

    def _spec(self) -> Mapping[str, Any]:
        if self._driver is None:
            raise NotPossible("rank 0 alone looks at the cluster")
        return self._driver.spec()

    def _update(self, given: Given, wish: Wish, on_progress: OnProgress | None, stop: Stop | None = None) -> Update:
        from rollfleet_trainer.sources import Weights  # noqa: PLC0415 - needs torch

        weights = Weights(given)
        with self._alone():
            if self._driver is None:
                update: Update = follow(self._ranks, weights, self._versions.tell)
                return update
            self._heed(self._driver, stop or Stop())
            return self._driver.update(weights, wish, on_progress)

    def _publish(
        self,
        given: Given | Tensors,
        root: str | Path | None,
        stop: threading.Event,
        on_progress: Written | None,
        how: dict[str, Any],
    ) -> Published:
        def progress(tensors: int, nbytes: int) -> None:
            if stop.is_set():
                raise PublishError("the caller of publish was cancelled")
            if on_progress is not None:
                on_progress(tensors, nbytes)

        self._require_open()
        with self._alone() if self._ranks.size > 1 else nullcontext():
            if self._store is None:
                from rollfleet_trainer.sources import Weights  # noqa: PLC0415 - needs torch

                made: Published = follow(self._ranks, Weights(given), self._versions.tell)
                return made
            return self._store.publish(given, _path(root), progress=progress, **how)

    def _retain(
        self, keep: int, within: str, root: str | Path | None, also_in_use: Callable[[], Collection[str]]
    ) -> Retained:
        if self._store is None:
            raise NotPossible("retain is for rank 0")
        return self._store.retain(_path(root), keep=keep, within=within, also=also_in_use)

    def _serves(self) -> Serving:
        if self._driver is None:
            raise NotPossible("rank 0 alone looks at the cluster: give endpoints and model on the others")
        return self._driver.serves()

    def _require_open(self) -> None:
        if self._closed:
            raise NotPossible("this object was closed: make a new one")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._require_open()
        if not self._busy.acquire(blocking=False):
            raise NotPossible("this object is busy with an update or a publication: one at a time")
        try:
            yield
        finally:
            self._busy.release()

    async def _in_thread(self, call: Callable[[], T], stop: Callable[[], None], *, apart: bool = False) -> T:
        """In the thread that sends, on the caller's device, or apart. Who is cancelled ends the call first."""
        self._require_open()
        loop = asyncio.get_running_loop()
        if apart:
            running = loop.run_in_executor(None, call)
        else:
            running = loop.run_in_executor(self._worker, _on(_device(), call))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            stop()
            await asyncio.wait({running})
            running.exception()  # the caller hears of the cancellation only
            raise

    def _heed(self, driver: Driver, stop: Stop) -> None:
        """Of the call that has begun. Who closes this object from now on ends it too."""
        driver.control.heed(stop)
        self._require_open()

    def _ending(self, stop: Stop) -> Callable[[], None]:
        """How the call that heeds it is ended when its caller is cancelled, whether it has begun or not."""

        def end() -> None:
            stop.why = stop.why or SenderLost("the caller of update was cancelled")
            if self._driver is not None:
                self._driver.control.wake()

        return end

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        ENDINGS.remove(self._close)
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


def _device() -> int | None:
    """The caller's accelerator: which one is current is a thread's own."""
    import torch  # noqa: PLC0415

    return int(torch.accelerator.current_device_index()) if torch.accelerator.is_available() else None


def _on(device: int | None, call: Callable[[], T]) -> Callable[[], T]:
    def on_device() -> T:
        if device is not None:
            import torch  # noqa: PLC0415

            torch.accelerator.set_device_index(device)
        return call()

    return on_device


def _path(root: str | Path | None) -> Path | None:
    return None if root is None else Path(root)
