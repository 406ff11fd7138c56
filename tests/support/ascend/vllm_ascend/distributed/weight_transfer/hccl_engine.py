"""What a trainer calls of vLLM-Ascend's hccl engine to send. How a group is made there has no stand-in: it is not used.

With VLLM_ASCEND naming a checkout, that checkout's own function and arguments are used instead.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_ascend.distributed.weight_transfer.packed_tensor import CHECKOUT, packed_broadcast_producer

FILE = "vllm_ascend/distributed/weight_transfer/hccl_engine.py"
ARGUMENTS, ENGINE, SEND = "HCCLTrainerSendWeightsArgs", "HCCLWeightTransferEngine", "trainer_send_weights"


@dataclass
class HCCLTrainerSendWeightsArgs:
    group: Any
    src: int = 0
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor] | None = None
    packed: bool = False
    stream: Any = None
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2


class HCCLWeightTransferEngine:
    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any] | HCCLTrainerSendWeightsArgs
    ) -> None:
        args = HCCLTrainerSendWeightsArgs(**trainer_args) if isinstance(trainer_args, dict) else trainer_args
        assert args.packed, "one by one: a form that our engines do not take"
        packed_broadcast_producer(
            iterator=iterator,
            group=args.group,
            src=args.src,
            post_iter_func=args.post_iter_func or (lambda item: item[1]),
            buffer_size_bytes=args.packed_buffer_size_bytes,
            num_buffers=args.packed_num_buffers,
        )


def _theirs(body: list[ast.stmt], *path: str) -> ast.stmt:
    """A definition by its name, with the classes around it."""
    found = next(each for each in body if getattr(each, "name", "") == path[0])
    return found if len(path) == 1 else _theirs(found.body, *path[1:])  # type: ignore[attr-defined]


if CHECKOUT in os.environ:
    file = Path(os.environ[CHECKOUT]) / FILE
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for each in (("DEFAULT_PACKED_BUFFER_SIZE_BYTES", 1 << 30), ("DEFAULT_PACKED_NUM_BUFFERS", 2)):
        globals().setdefault(*each)
    taken = ast.Module([_theirs(tree.body, ARGUMENTS), _theirs(tree.body, ENGINE, SEND)], [])
    exec(compile(taken, str(file), "exec"))  # noqa: S102 - of a checkout that the caller names
    HCCLWeightTransferEngine.trainer_send_weights = globals()[SEND]
