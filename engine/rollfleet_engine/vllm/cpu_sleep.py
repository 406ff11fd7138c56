"""Sleep on CPUs, for tests: vLLM's CPU worker only warns (v1/worker/cpu_worker.py, 0.27.1).

Level 1 moves the model's parameters aside, level 2 drops them, and a wake of the weights after level 2 gives memory
without content: not-a-number, so that whoever computes with it before a reload is seen. No memory is given back to the
system at level 1, and the KV cache keeps its memory: the core has dropped what was in it. Weights that the CPU back end
has prepacked into its own form stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

WEIGHTS = "weights"


@dataclass
class _Aside:
    """What a worker's model has given away."""

    moved: list[tuple[torch.nn.Parameter, torch.Tensor]] = field(default_factory=list)
    dropped: list[tuple[torch.nn.Parameter, torch.Size, tuple[int, ...]]] = field(default_factory=list)


def install() -> None:
    """Give CPU workers of this process a sleep that does something."""
    CPUWorker.sleep = _sleep
    CPUWorker.wake_up = _wake_up


def _sleep(worker: Any, level: int = 1) -> None:
    aside = _Aside()
    for parameter in worker.model_runner.get_model().parameters():
        if level == 1:
            aside.moved.append((parameter, parameter.data))
        else:
            aside.dropped.append((parameter, parameter.data.size(), parameter.data.stride()))
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    worker.rollfleet_aside = aside


def _wake_up(worker: Any, tags: list[str] | None = None) -> None:
    if tags is not None and WEIGHTS not in tags:
        return
    aside: _Aside = worker.rollfleet_aside
    worker.rollfleet_aside = _Aside()
    for parameter, data in aside.moved:
        parameter.data = data
    for parameter, size, stride in aside.dropped:
        data = torch.empty_strided(size, stride, dtype=parameter.dtype)
        parameter.data = data.fill_(float("nan") if data.is_floating_point() else 0)
