"""Methods that every vLLM worker gets (--worker-extension-cls), for the adapter to call by collective_rpc."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from vllm.platforms import current_platform

from rollfleet_engine.vllm.plugin import register
from rollfleet_engine.vllm.transfer_engine import RollfleetWeightTransferEngine

register()
if current_platform.is_cpu():
    import_module("rollfleet_engine.vllm.cpu_sleep").install()


class RollfleetWorkerExtension:
    """Mixed into vLLM's worker class; the attributes are the worker's own."""

    rank: int
    local_rank: int
    device: torch.device
    model_config: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def rollfleet_report(self) -> dict[str, Any]:
        """What this worker's transfer engine did since the last start, and whether vLLM thinks an update is active."""
        return self._rollfleet_engine().report() | {"rank": self.rank, "active": self._weight_update_active}

    def rollfleet_start(self) -> dict[str, Any]:
        """Phase 2, where vLLM does not ask the transfer engine for it (phases.py)."""
        with torch.device(self.device):
            self._rollfleet_engine().start_weight_update()
        return self.rollfleet_report()

    def rollfleet_finish(self) -> dict[str, Any]:
        """Phase 4, likewise."""
        with torch.device(self.device):
            self._rollfleet_engine().finish_weight_update()
        return self.rollfleet_report()

    def rollfleet_reset(self) -> dict[str, Any]:
        """Back to where an update can start; vLLM itself clears its flag only on ranks that raised."""
        self._rollfleet_engine().reset()
        self._weight_update_active = False
        return self.rollfleet_report()

    def rollfleet_share(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Let a worker on another node than the guard's stage its own copy; one of each node reads all bytes."""
        self._rollfleet_engine().share(wire, hashes=self.local_rank == 0)
        return self.rollfleet_shared()

    def rollfleet_shared(self) -> dict[str, Any]:
        """How far that is."""
        return self._rollfleet_engine().shared()

    def _rollfleet_engine(self) -> RollfleetWeightTransferEngine:
        engine = self.weight_transfer_engine
        if not isinstance(engine, RollfleetWeightTransferEngine):
            raise TypeError(
                f"worker {self.rank} has no rollfleet transfer engine but {type(engine).__name__}: "
                """start vLLM with --weight-transfer-config '{"backend": "rollfleet"}'"""
            )
        engine.know(self.model_config)
        return engine
