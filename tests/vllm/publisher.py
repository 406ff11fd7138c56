"""Publishes from tensors of torch, in a process of an interpreter that has it: python -m tests.vllm.publisher ROOT

Prints, as JSON, the digest of each checkpoint, those of pushes of the same tensors, and what was refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from rollfleet_trainer.host import TensorError
from rollfleet_trainer.publishing import publish
from rollfleet_trainer.tensors import Sent, raw_bytes


class Tied(torch.nn.Module):
    """An embedding that is its own head, and parameters of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Embedding(16, 8, dtype=torch.bfloat16)
        self.turned = torch.nn.Parameter(torch.randn(8, 4).t())
        self.head = torch.nn.Linear(8, 16, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight


def pushed(tensors: dict[str, torch.Tensor]) -> str:
    """As the senders digest them."""
    sent = Sent()
    for name, tensor in tensors.items():
        sent.add(name, tensor, raw_bytes(tensor))
    return sent.digest()


def refusal(root: Path, tensor: Any) -> str:
    """Why it is not published."""
    try:
        publish(root, {"w": tensor}, step="refused")
    except TensorError as error:
        return str(error)
    return ""


def main(root: Path) -> None:
    """As told above."""
    model = Tied()
    other = {
        "half": torch.arange(5, dtype=torch.float16)[::2],
        "eight": torch.ones(3, 3).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
        "truth": torch.tensor([True, False, True]),
    }
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    spread = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Replicate()])
    found = {
        "state": publish(root, model.state_dict(), step="state").digest,
        "named": publish(root, model.named_parameters(), step="named").digest,
        "pushed": pushed(dict(model.named_parameters())),
        "other": publish(root, other, step="other").digest,
        "otherPushed": pushed({name: tensor.resolve_conj() for name, tensor in other.items()}),
        "gathered": publish(root, (("w", each.full_tensor()) for each in (spread,)), step="gathered").digest,
        "refused": [
            refusal(root, spread),
            refusal(root, torch.ones(2, device="meta")),
            refusal(root, torch.ones(2).to_sparse()),
            refusal(root, torch.ones(0)),
        ],
    }
    torch.distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
