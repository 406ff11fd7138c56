"""What docs/trainer.md shows first, run as it stands by the process of sdk_process.py.

Of the page's names it has what a trainer has: a policy, a step, a prompt. `RolloutFleet("rl/qwen")` is the object that
the order "open" has made, whose API server is in this process's memory.
"""

import asyncio
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import rollfleet_trainer
from rollfleet_trainer import RolloutFleet, Update
from tests.contract.sdk_process import Order, Trainer, main, tensors_of
from tests.support.memory_api import ENGINE_PATH
from tests.support.pages import ROOT, blocks

PAGE = ROOT / "docs" / "trainer.md"


class Policy(torch.nn.Module):
    """A module whose tensors bear the names of a checkpoint's, dots and all."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = {name: torch.nn.Parameter(each, requires_grad=False) for name, each in tensors.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self._tensors.items()

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {name: each.detach() for name, each in self._tensors.items()}


class Reader(Trainer):
    """Runs the page's blocks."""

    told: dict[str, Any]

    def page(self, order: Order) -> dict[str, Any]:
        """Begin with them; answers once a version is offered."""
        self.api.change(ENGINE_PATH, {"spec": {"model": {"servedName": "policy"}}})
        self.api.change(ENGINE_PATH, {"status": {"endpoint": order["endpoint"]}})
        made: Any = self._named
        rollfleet_trainer.RolloutFleet = made  # for this process, which does nothing else
        names = {"policy": Policy(tensors_of(order)), "step": 70, "steps": 1, "log": print, "train": print}
        run = {"async": self._asynchronous, "blocking": self._blocking}[order["form"]]
        self.told = {}
        self._start(lambda: run(names | {"prompt": order["prompt"]}))
        return self._offered()

    def _named(self, name: str) -> RolloutFleet:
        assert name == "rl/qwen"
        return self.fleet

    def _asynchronous(self, names: dict[str, Any]) -> Update:
        """The first two blocks, in one coroutine."""
        body = textwrap.indent("".join(blocks(PAGE, "python")[:2]), "    ")
        execute(f"async def page():\n{body}    return update, ckpt, sample\n", names)
        update, ckpt, sample = asyncio.run(names["page"]())
        self.told = {"recovers": ckpt.recovers, "path": ckpt.path, "digest": ckpt.digest}
        self.told["versions"] = sorted(set(sample.versions))
        assert isinstance(update, Update)
        return update

    def _blocking(self, names: dict[str, Any]) -> Update:
        """The third."""
        execute(f"from rollfleet_trainer import RolloutFleet\n{blocks(PAGE, 'python')[2]}", names)
        update = names["update"]
        assert isinstance(update, Update)
        return update

    def result(self, order: Order) -> dict[str, Any]:
        """With what the copy and the sample tell."""
        return super().result(order) | {"told": self.told}


def execute(source: str, names: dict[str, Any]) -> None:
    """Of this tree's own page."""
    exec(compile(source, str(PAGE), "exec"), names)  # noqa: S102 - see above


if __name__ == "__main__":
    main(0, Reader)
