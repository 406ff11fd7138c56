"""One rank of a sharded trainer that publishes a copy: its API server is in memory, the other rank is another process.

python -m tests.contract.sharded_copies_process RANK STORE VOLUME: lines of JSON for what came of each publication.
"""

import json
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rollfleet_trainer import NotPossible, RolloutFleet, TrainerError
from rollfleet_trainer.publishing import Tensors
from tests.support.memory_api import POLICY_PATH, fleet

RANKS = 2


def sharded() -> dict[str, torch.Tensor]:
    """Rows over the ranks, as FSDP2 has them."""
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = {f"layer.{place}": torch.arange(12.0).reshape(4, 3) + place for place in range(6)}
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}


def breaking() -> Iterator[tuple[str, torch.Tensor]]:
    """The third has a name that no engine would take: rank 0 finds that, and the rest is gathered all the same."""
    for place, (name, tensor) in enumerate(sharded().items()):
        yield (name + "\n" * (place == 2)), tensor


def publish(trainer: RolloutFleet, tensors: Tensors, step: int) -> dict[str, object]:
    """What came of it."""
    try:
        made = trainer.blocking.publish(tensors, step=step)
    except TrainerError as error:
        return {"type": type(error).__name__, "error": str(error)}
    except ValueError as error:
        return {"type": type(error).__name__, "error": str(error)}
    return {"path": made.path, "digest": made.digest, "tensors": made.tensors, "recovers": made.recovers}


def main(rank: int, store: str, volume: str) -> None:
    """A copy; one that cannot be; the first again, as the recovery of what is served by then; what is for rank 0."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    trainer = RolloutFleet("rl/qwen", service_account="grpo", process_group=dist.group.WORLD, checkpoints=volume)
    api = fleet()
    if trainer._driver is not None:
        trainer._driver.control._api = api  # type: ignore[assignment]
    first = publish(trainer, sharded(), 1)
    told = [first, publish(trainer, breaking(), 2)]
    spec = {"engineRef": {"name": "qwen"}, "version": 7, "source": {"type": "Trainer"}}
    api.put(POLICY_PATH, {"metadata": {"namespace": "rl", "name": "qwen-policy"}, "spec": spec})
    api.put_status(POLICY_PATH, phase="Active", digest=first["digest"])
    told.append(publish(trainer, sharded(), 1))
    if rank:
        try:
            trainer.blocking.retain(1)
        except NotPossible as error:
            told.append({"error": str(error)})
    print(json.dumps(told), flush=True)
    trainer.blocking.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
