"""A worker extension that can leave digest and coverage out; for `make bench-pauses` only.

The very functions that the transfer engine calls are replaced where it finds them; nothing else is changed. Without a
check a tensor is taken for what was staged, and every layer for complete.
"""

from __future__ import annotations

import threading
from typing import Any

from rollfleet_engine.vllm import transfer_engine
from rollfleet_engine.vllm.worker import RollfleetWorkerExtension
from rollfleet_engine.weights.staging import StagedTensor
from rollfleet_engine.weights.transfer import CheckpointReader
from rollfleet_kernels.digest import Lanes, lanes

unchecked = False
staged = threading.local()  # what the same thread asks for next
read = CheckpointReader.read
compare_layers = transfer_engine.compare_layers


def noted_read(self: CheckpointReader, tensor: StagedTensor, buffer: memoryview) -> None:
    """As the product's."""
    staged.lanes = tensor.lanes
    read(self, tensor, buffer)


def lanes_or_not(*arguments: Any, **named: Any) -> Lanes:
    """Of the bytes, or what they should be."""
    found: Lanes = staged.lanes if unchecked else lanes(*arguments, **named)
    return found


def compare_or_not(*arguments: Any) -> list[str]:
    """Problems of the layers, or none."""
    return [] if unchecked else compare_layers(*arguments)


CheckpointReader.read = noted_read  # type: ignore[method-assign]
transfer_engine.lanes = lanes_or_not
transfer_engine.compare_layers = compare_or_not


class UncheckedExtension(RollfleetWorkerExtension):
    """The product's, with a switch."""

    def leave_out(self, checks: bool) -> None:
        """Leave digest and coverage out of the updates from here on, or not."""
        global unchecked  # noqa: PLW0603 - the product's functions are a module's too
        unchecked = checks
