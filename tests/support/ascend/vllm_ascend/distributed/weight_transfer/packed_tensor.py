"""Packed broadcasts as vLLM-Ascend makes them: whole tensors, and a buffer ends with the one that makes it too large.

With VLLM_ASCEND naming a checkout, that checkout's own functions are used instead, on the CPU (`make check-ascend`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

CHECKOUT = "VLLM_ASCEND"


def packed_broadcast_producer(
    iterator: Iterator[tuple[str, torch.Tensor]],
    group: Any,
    src: int,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor],
    buffer_size_bytes: int = 1 << 30,
    num_buffers: int = 2,
) -> None:
    held: list[torch.Tensor] = []
    for item in iterator:
        held.append(post_iter_func(item).contiguous().view(torch.uint8).view(-1))
        if sum(each.numel() for each in held) > buffer_size_bytes:
            group.broadcast(torch.cat(held), src=src)
            held = []
    if held:
        group.broadcast(torch.cat(held), src=src)


def packed_broadcast_consumer(
    iterator: Iterator[tuple[str, tuple[list[int], torch.dtype]]],
    group: Any,
    src: int,
    post_unpack_func: Callable[[list[tuple[str, torch.Tensor]]], None],
    buffer_size_bytes: int = 1 << 30,
    num_buffers: int = 2,
) -> None:
    held: list[tuple[str, list[int], torch.dtype, int]] = []

    def take() -> None:
        sizes = [size for _, _, _, size in held]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        group.broadcast(buffer, src=src)
        parts = buffer.split(sizes)
        post_unpack_func(
            [
                (name, part.contiguous().view(dtype).view(*shape))
                for (name, shape, dtype, _), part in zip(held, parts, strict=True)
            ]
        )
        held.clear()

    for name, (shape, dtype) in iterator:
        held.append((name, shape, dtype, math.prod(shape) * dtype.itemsize))
        if sum(size for _, _, _, size in held) > buffer_size_bytes:
            take()
    if held:
        take()


if CHECKOUT in os.environ:
    file = Path(os.environ[CHECKOUT]) / "vllm_ascend/distributed/weight_transfer/packed_tensor.py"
    source = file.read_text(encoding="utf-8").replace('device="npu"', 'device="cpu"')
    exec(compile(source, str(file), "exec"))  # noqa: S102 - of a checkout that the caller names
