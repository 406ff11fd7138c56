"""A trainer that uses the client for TRL without TRL, in a process of its own under an interpreter that has torch.

python -m tests.contract.trl_process: as sdk_process, whose orders it also takes.
"""

from collections.abc import Iterator
from typing import Any

import torch

from rollfleet_trainer import Update
from rollfleet_trainer.passing import OnePass
from rollfleet_trainer.rollouts import Rollouts
from rollfleet_trainer.trl import FleetClient
from tests.contract.sdk_process import Order, Trainer, main, tensors_of


def announced(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, list[int]]]:
    """As TRL's VLLMGeneration collects it."""
    return [(name, str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in tensors.items()]


def module_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Whose parameters have these names."""
    whole = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        place = whole
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, torch.nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    return whole


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By their bytes: those of simulated models are random, and not all of them numbers."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class TrlTrainer(Trainer):
    """Whose weights are a checkpoint's, in double precision where that is asked for."""

    def __init__(self, order: Order, rank: int) -> None:
        super().__init__(order, rank)
        rollouts = Rollouts(order["serving"], model="policy", on_abort="restart", hold_s=30.0)
        self.double = bool(order.get("double"))
        dtype = torch.float32 if self.double else None
        self.client = FleetClient(self.fleet, rollouts, dtype=dtype, keep_copy=bool(order.get("keepCopy")))
        self.drawn = 0
        self.ended = False

    def connect(self, _: Order) -> dict[str, Any]:
        """What TRL does when it makes its client."""
        self.client.check_server(10.0)
        self.client.init_communicator(torch.device("cpu"))
        return self.client.get_server_info()

    def _tensors(self, order: Order) -> dict[str, torch.Tensor]:
        found = tensors_of(order)
        return {name: each.double() for name, each in found.items()} if self.double else found

    def _gathered(self, tensors: dict[str, torch.Tensor], order: Order) -> Iterator[tuple[str, torch.Tensor]]:
        """Each is good until the next one is asked for, as FSDP1 and merged adapters have it."""
        self.drawn, self.ended = 0, False
        for name, tensor in tensors.items():
            if name in order.get("omit", ()):
                continue
            self.drawn += 1
            yield name, tensor
            tensor.zero_()
        self.ended = True

    def sync(self, order: Order) -> dict[str, Any]:
        """One of the three ways; answers once the version is offered, or the update has ended."""
        self._start(lambda: self._synced(order))
        return self._offered()

    def _synced(self, order: Order) -> Update:
        tensors = self._tensors(order)
        told = {name: each for name, each in tensors.items() if name not in order.get("omit", ())}
        if order["form"] == "params":
            self.client.update_named_params(announced(told), self._gathered(tensors, order))
        elif order["form"] == "model":
            self.client.update_model_params(module_of(tensors))
        else:
            with self.client.weight_update():
                for place, (name, tensor) in enumerate(self._gathered(tensors, order)):
                    if place == order.get("breakAt"):
                        raise ValueError("the merge failed")
                    self.client.update_named_param(name, tensor)
        self.client.reset_prefix_cache()
        assert self.client.update is not None
        return self.client.update

    def passes(self, order: Order) -> dict[str, Any]:
        """A pass that is left in the middle, and another one; and one whose tensors were not announced."""
        tensors = tensors_of(order)
        expected = {name: each.clone() for name, each in tensors.items()}
        passing = OnePass(announced(tensors), self._gathered(tensors, order), keep=True)
        first = passing()
        next(first), next(first)
        again = dict(passing())
        same = list(again) == list(expected) and all(_same(again[name], each) for name, each in expected.items())
        mixed = {"whole": torch.arange(3), "half": torch.ones(3, dtype=torch.float16)}
        cast = dict(OnePass(announced(mixed), iter(mixed.items()), torch.float32)())
        told = {"same": same, "cast": {name: str(each.dtype).removeprefix("torch.") for name, each in cast.items()}}
        wrong = OnePass(announced(expected)[1:], iter(expected.items()))
        try:
            list(wrong())
        except Exception as error:  # noqa: BLE001 - its kind is told
            return told | {"type": type(error).__name__, "error": str(error)}
        return told

    def sample(self, order: Order) -> dict[str, Any]:
        """What TRL asks for after a sync."""
        return dict(
            self.client.generate(order["prompts"], n=order["n"], max_tokens=order["maxTokens"], temperature=0.0)
        )

    def iterator(self, _: Order) -> dict[str, Any]:
        """How far the weights' own iterator was gone through."""
        return {"drawn": self.drawn, "ended": self.ended}

    def close(self, _: Order) -> dict[str, Any]:
        """As TRL does at exit."""
        self.client.close_communicator()
        return self.lease()


if __name__ == "__main__":
    main(0, TrlTrainer)
