"""A worker extension that can leave digest and coverage out; for `make bench-pauses` only.

The very functions that the transfer engine calls are replaced where it finds them; nothing else is changed. Without a
check a tensor is taken for what was staged, and every layer for complete.
"""

from __future__ import annotations

from typing import Any

from rollfleet_engine.vllm import transfer_engine
from rollfleet_engine.vllm.worker import RollfleetWorkerExtension
from rollfleet_engine.weights.staging import StagedTensor, read_into
from rollfleet_engine.weights.transfer import CheckpointReader
from rollfleet_kernels.digest import Lanes

unchecked = False
read_checked = CheckpointReader.read_checked
compare_layers = transfer_engine.compare_layers


def read_checked_or_not(self: CheckpointReader, tensor: StagedTensor, buffer: memoryview, kernel: Any) -> Lanes:
    """The product's, or one read of all its bytes."""
    if not unchecked:
        return read_checked(self, tensor, buffer, kernel)
    read_into(self._fds[tensor.file], buffer, tensor.offset, tensor.name)
    return tensor.lanes


def compare_or_not(*arguments: Any) -> list[str]:
    """Problems of the layers, or none."""
    return [] if unchecked else compare_layers(*arguments)


CheckpointReader.read_checked = read_checked_or_not  # type: ignore[method-assign]
transfer_engine.compare_layers = compare_or_not


class UncheckedExtension(RollfleetWorkerExtension):
    """The product's, with a switch."""

    def leave_out(self, checks: bool) -> None:
        """Leave digest and coverage out of the updates from here on, or not."""
        global unchecked  # noqa: PLW0603 - the product's functions are a module's too
        unchecked = checks
