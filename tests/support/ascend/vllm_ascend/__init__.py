"""A stand-in of vLLM-Ascend for machines without NPUs: what rollfleet_transport imports of it, over gloo and the CPU.

Its folder is on the PYTHONPATH of test processes only. Names and signatures are vLLM-Ascend's (devtools/ascend_rules.py
is compared with a checkout by `make check-ascend`, and with this package by a unit test). `torch.npu` and Tensor.npu
are what torch_npu brings: here everything lies on the CPU, and all that is asked of a stream is done at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch


class Stream:
    """Work is done when it is asked for, so there is nothing to wait for."""

    npu_stream = 0

    def synchronize(self) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...


@contextmanager
def _on(_: Any) -> Iterator[None]:
    yield


def _tensor_npu(tensor: torch.Tensor, device: int | None = None) -> torch.Tensor:
    return tensor


npu: Any = ModuleType("torch.npu")
npu.Stream = Stream
npu.current_stream = Stream
npu.stream = _on
npu.device = _on
npu.current_device = lambda: 0
npu.set_device = lambda _: None
npu.synchronize = lambda: None
npu.is_available = lambda: False  # as transformers asks, which vLLM imports
torch.npu = npu
torch.Tensor.npu = _tensor_npu
