"""A weight update's four phases, as releases of vLLM share them between their workers and a transfer engine.

Seen in 0.27.1 and later: the transfer engine is asked for all four. In 0.23.0 (v1/worker/gpu_worker.py, and
worker/worker.py of vLLM-Ascend 0.23.0.post1) only for the first and the third. The worker itself prepares the layers
before and processes them after, whatever the engine has found in between; told that weights come in the kernels' own
format, it does neither. So there it is told that, and our worker extension is asked for both by name. Which it is,
vLLM's base class says: no release is asked for its number.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

ENGINE_DOES_ALL = hasattr(WeightTransferEngine, "start_weight_update")

if ENGINE_DOES_ALL:
    TransferEngineBase = WeightTransferEngine
else:

    class TransferEngineBase(WeightTransferEngine):  # type: ignore[misc,no-redef]
        """With what is not there yet."""

        def reset_weight_update_target(self) -> None:
            """There is no target but the model: none of a draft model is taken."""


Call = Callable[[str], Awaitable[list[dict[str, Any]]]]  # of a method of our worker extension, in every worker


async def start(engine: Any, on_workers: Call) -> None:
    """Phase 2, of an AsyncLLM."""
    if ENGINE_DOES_ALL:
        await engine.start_weight_update()
        return
    await engine.start_weight_update(is_checkpoint_format=False)
    await on_workers("rollfleet_start")


async def finish(engine: Any, on_workers: Call) -> None:
    """Phase 4."""
    if not ENGINE_DOES_ALL:
        await on_workers("rollfleet_finish")
    await engine.finish_weight_update()


async def tell_version(engine: Any, version: int) -> None:
    """Where vLLM keeps a label (not 0.23) it gets the right one. Answers carry the guard's."""
    if hasattr(engine, "update_weight_version"):
        await engine.update_weight_version(str(version))
