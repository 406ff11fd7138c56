"""A trainer that uses RolloutFleet, in a process of its own under an interpreter that has torch.

python -m tests.contract.sdk_process: a line of JSON on standard input per order, a line of JSON for what came of it.
Its API server is in its memory, and the test plays the operator there by orders; engines and their guards are real. A
sharded trainer has a second process, which does what the first one tells it to.
"""

import asyncio
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rollfleet_trainer import RolloutFleet, Update
from rollfleet_trainer.control import NO_POD
from rollfleet_trainer.errors import TrainerError
from rollfleet_trainer.updates import Progress
from tests.contract.vllm_trainer import send_by_vllm
from tests.support.memory_api import ENGINE_PATH, LEASE_PATH, POLICY_PATH, conditions, fleet

Order = Mapping[str, Any]
Forms = dict[str, Callable[[Order], Any]]
OFFER_S = 30.0


def tensors_of(order: Order) -> dict[str, torch.Tensor]:
    """All of the checkpoint's."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(order["checkpoint"]).glob("*.safetensors")):
        found |= load_file(path)
    return found


def gathered(order: Order) -> Iterator[tuple[str, torch.Tensor]]:
    """Made one by one as they are asked for, as a trainer does that gathers by itself."""
    for name, tensor in tensors_of(order).items():
        if name not in order.get("omit", ()):
            yield name, tensor.clone()


def parameters(order: Order) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """As module.named_parameters() yields them."""
    for name, tensor in tensors_of(order).items():
        yield name, torch.nn.Parameter(tensor, requires_grad=False)


def at_first_without(order: Order) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """Leaves tensors out the first time."""
    passes: list[int] = []

    def one_pass() -> Iterator[tuple[str, torch.Tensor]]:
        passes.append(1)
        return gathered(order if len(passes) == 1 else {**order, "omit": []})

    return one_pass


def breaking(order: Order) -> Iterator[tuple[str, torch.Tensor]]:
    """Cannot be gathered to the end."""
    for place, pair in enumerate(gathered(order)):
        if place == 3:
            raise ValueError("the gather failed on rank 3")
        yield pair


def sharded(order: Order) -> dict[str, torch.Tensor]:
    """Rows over the ranks, as FSDP2 has them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors_of(order).items()}


def tied(order: Order) -> dict[str, torch.Tensor]:
    """As state_dict() has a weight that is used in two places."""
    found = tensors_of(order)
    return found | {f"{name}.again": found[name].view_as(found[name]) for name in list(found)[:2]}


def renamed(order: Order) -> dict[str, torch.Tensor]:
    """With a slip in a name."""
    found = tensors_of(order)
    return found | {f"{next(iter(found))}s": found.pop(next(iter(found)))}


FORMS: Forms = {
    "renamed": renamed,
    "listed": lambda order: list(tensors_of(order).items()),
    "mapping": tensors_of,
    "tied": tied,
    "parameters": parameters,
    "iterator": gathered,
    "callable": lambda order: lambda: gathered(order),
    "omitting": at_first_without,
    "breaking": breaking,
    "sharded": sharded,
}


class Trainer:
    """What the orders are for."""

    def __init__(self, order: Order, rank: int) -> None:
        self.api = fleet(weightTransfer={"backend": order["backend"]})
        self.api.change(ENGINE_PATH, {"status": {"caBundle": order["ca"]}})
        self.api.token = lambda audience: str(order["tokens"].get(audience, "good nowhere"))
        ranks = int(order.get("ranks", 1))
        if ranks > 1:
            dist.init_process_group("gloo", init_method=order["store"], rank=rank, world_size=ranks)
        self.fleet = RolloutFleet(
            "rl/qwen",
            service_account="grpo",
            address="127.0.0.1",
            process_group=dist.group.WORLD if ranks > 1 else None,
            part_bytes=int(order.get("partBytes", 1 << 30)),
        )
        if self.fleet._driver is not None:
            self.fleet._driver.control._api = self.api
        self._thread: threading.Thread | None = None
        self._progress: list[Progress] = []
        self._result: dict[str, Any] = {}
        self._version = 0

    def update(self, order: Order) -> dict[str, Any]:
        """Begin an update; answers once its version is offered, or it has ended."""
        self._start(lambda: self._updated(order))
        return self._offered()

    def _updated(self, order: Order) -> Update:
        given = FORMS[order["form"]](order)
        options = {"step": order.get("step", ""), "on_progress": self._progress.append}
        if order.get("face") != "async":
            return self.fleet.blocking.update(given, **options)

        async def awaited() -> Update:
            return await self.fleet.update(given, **options)

        return asyncio.run(awaited())

    def refused(self, _: Order) -> dict[str, Any]:
        """What cannot be sent: the error of each, and what was asked of the API server meanwhile."""
        tensor, before = torch.ones(2), len(self.api.requests)
        given: dict[str, Any] = {
            "nothing": {},
            "module without parameters": torch.nn.ReLU(),
            "empty callable": lambda: iter(()),
            "callable of numpy": lambda: [("w", tensor.numpy())],
            "callable of nothing": lambda: None,
            "numpy": {"w": tensor, "v": tensor.numpy()},
            "path": "/checkpoints/step-5",
            "number": 5,
            "class": torch.nn.Linear,
            "list": [tensor],
            "name": {1: tensor},
            "dtype": {"w": tensor.to(torch.complex128)},
            "empty": {"w": torch.ones(0, 2)},
            "meta": torch.nn.Linear(2, 2, device="meta"),
            "compiled": {"_orig_mod.w": tensor},
            "lazy": MappingProxyType({"w": tensor.numpy()}),
        }
        told = {}
        for name, each in given.items():
            try:
                self.fleet.blocking.update(each)
            except TrainerError as error:
                told[name] = f"{type(error).__name__}: {error}"
        return {"told": told, "requests": self.api.requests[before:]}

    def begin(self, order: Order) -> dict[str, Any]:
        """The same by vLLM's own trainer classes, which take seconds to import."""
        importlib.import_module("vllm.distributed.weight_transfer.factory")

        def begun() -> Update:
            begun_update = self.fleet.begin(order.get("version"))
            with begun_update as push:
                if order["form"] == "iterator":
                    push.source(gathered(order)).metadata()
                send_by_vllm(push, tensors_of(order), digested=order["digested"])
            assert begun_update.update is not None
            return begun_update.update

        self._start(begun)
        return self._offered()

    def _start(self, call: Callable[[], Update]) -> None:
        self._progress.clear()
        self._result = {}

        def run() -> None:
            try:
                self._result = {"update": {name: _plain(value) for name, value in vars(call()).items()}}
            except (TrainerError, ValueError, AssertionError) as error:
                self._result = {"error": str(error), "type": type(error).__name__}

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def _offered(self) -> dict[str, Any]:
        thread, offered = self._thread, threading.Event()
        if thread is None or self.fleet._driver is None:
            return {}
        while thread.is_alive() and not offered.wait(0.01):
            version = self.api.objects.get(POLICY_PATH, {}).get("spec", {}).get("version", 0)
            if f"/{version}" in self.lease()["annotations"].get("rollfleet.io/offers", ""):
                offered.set()
        return self.lease() | {"version": self.api.objects.get(POLICY_PATH, {}).get("spec", {}).get("version")}

    def lease(self, order: Order | None = None) -> dict[str, Any]:
        """What the Lease says, after a change."""
        if order and order.get("change"):
            self.api.change(LEASE_PATH, order["change"])
        lease = self.api.objects[LEASE_PATH]
        return {
            "holder": lease["spec"].get("holderIdentity"),
            "annotations": lease["metadata"].get("annotations", {}),
        }

    def status(self, order: Order) -> dict[str, Any]:
        """What the operator says."""
        if order.get("bump"):
            self.api.change(POLICY_PATH, {"spec": {"version": self.api.objects[POLICY_PATH]["spec"]["version"] + 1}})
        told = dict(order["status"])
        if "holds" in told:
            told["conditions"] = conditions(**told.pop("holds"))
        self.api.put_status(POLICY_PATH, **told)
        return {}

    def result(self, _: Order) -> dict[str, Any]:
        """What came of the update."""
        assert self._thread is not None
        self._thread.join(60)
        if self._thread.is_alive():
            return {"error": "the update has no end", "type": "", "phases": []}
        phases = [f"{each.phase}/{each.attempt}" for each in self._progress]
        told = {"phases": phases, "toSend": max((each.total_bytes for each in self._progress), default=0)}
        shown = [audience for audience in self.api.audiences if not audience.endswith(f"/{NO_POD}")]
        return self._result | told | {"audiences": shown}

    def close(self, _: Order) -> dict[str, Any]:
        """Give the Lease back."""
        self.fleet.blocking.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        return self.lease()


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


class Second:
    """The other process of a sharded trainer."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.contract.sdk_process", "1"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def order(self, order: Order) -> None:
        assert self._process.stdin is not None
        print(json.dumps(dict(order)), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        said: dict[str, Any] = json.loads(self._process.stdout.readline())
        return said

    def close(self) -> None:
        self._process.communicate(timeout=30)


def main(rank: int, kind: type[Trainer] = Trainer) -> None:
    """Orders in, answers out; what libraries print goes elsewhere."""
    answers, sys.stdout = sys.stdout, sys.stderr
    trainer: Trainer | None = None
    second: Second | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "open" and rank == 0 and order.get("ranks", 1) > 1:
            second = Second()
        if second is not None and order["do"] in ("open", "update", "result", "close"):
            second.order(order)
        if order["do"] == "open":
            trainer = kind(order, rank)
            answer: dict[str, Any] = {}
        else:
            answer = getattr(trainer, order["do"])(order)
        if second is not None and order["do"] in ("open", "update", "result", "close"):
            answer["second"] = second.answer()
            if order["do"] == "close":
                second.close()
                second = None
        print(json.dumps(answer, default=str), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
