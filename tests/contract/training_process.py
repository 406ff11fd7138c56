"""examples/training's loop, in a process with torch, against engines whose operator is the test (sdk_process.py).

What it reports per version is collected, and handed out at its end.
"""

import asyncio
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from examples.training import train
from rollfleet_trainer.errors import TrainerError
from rollfleet_trainer.rollout_errors import RolloutError
from tests.contract.sdk_process import Order, Trainer, main
from tests.support.memory_api import POLICY_PATH


class Loop(Trainer):
    """Orders of a training loop, beside those of a trainer."""

    def train(self, order: Order) -> dict[str, Any]:
        """Begin; answers once the first version is offered."""
        folders = {name: Path(order[name]) for name in ("model", "checkpoints")}
        plan = train.Plan(**folders, **order["plan"])
        torch.manual_seed(plan.seed)
        torch.set_num_threads(1)
        policy = train.Policy(AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32), plan)
        self._lines: list[Any] = []
        train.report = self._lines.append  # type: ignore[assignment]

        async def run() -> dict[str, Any]:
            how = {"max_staleness": train.MAX_STALENESS, "on_abort": "continue"}
            async with self.fleet.rollouts(order["endpoints"], model="policy", **how) as rollouts:
                return await train.Loop(self.fleet, rollouts, policy, plan).run()

        def told() -> None:
            try:
                self._result = {"result": asyncio.run(run())}
            except (TrainerError, RolloutError, ValueError) as error:
                self._result = {"error": str(error), "type": type(error).__name__}

        self._result = {}
        self._thread = threading.Thread(target=told, daemon=True)
        self._thread.start()
        return self.next({"after": 0})

    def next(self, order: Order) -> dict[str, Any]:
        """Wait until a version above this one is offered, or the loop has ended."""
        thread, looks = self._thread, threading.Event()
        assert thread is not None
        while thread.is_alive() and not looks.wait(0.01):
            version = self.api.objects.get(POLICY_PATH, {}).get("spec", {}).get("version", 0)
            offered = f"/{version}" in self.lease()["annotations"].get("rollfleet.io/offers", "")
            if version > order["after"] and offered:
                return self.lease() | {"version": version}
        return {"version": None} | self._result

    def policy(self, _: Order) -> dict[str, Any]:
        """The WeightVersion."""
        spec: dict[str, Any] = self.api.objects[POLICY_PATH]["spec"]
        return spec

    def result(self, order: Order) -> dict[str, Any]:
        """What the loop told, and its end."""
        return super().result(order) | {"lines": self._lines}

    def loss(self, order: Order) -> dict[str, Any]:
        """The surrogate and its gradient by the new logprobs."""
        new = torch.tensor(order["new"], requires_grad=True)
        loss = train.surrogate(new, *(torch.tensor(order[name]) for name in ("old", "advantages", "mask")))
        [slope] = torch.autograd.grad(loss, new)
        return {"loss": loss.item(), "gradient": slope.tolist()}


if __name__ == "__main__":
    main(0, Loop)
