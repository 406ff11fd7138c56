"""TRL's own GRPOTrainer against a fleet, in a process of its own under an interpreter that has torch and TRL.

python -m tests.trl.grpo_process: as tests.contract.sdk_process. vLLM is hidden from TRL, as where it is not installed.
"""

import importlib.util
import tempfile
import threading
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from rollfleet_trainer import Update
from rollfleet_trainer.rollouts import Rollouts
from rollfleet_trainer.trl import FleetClient, vllm_client_replaced
from tests.contract.sdk_process import Order, Trainer, main
from tests.support.memory_api import ENGINE_PATH

FOUND = importlib.util.find_spec


def _without_vllm(name: str, package: str | None = None) -> ModuleSpec | None:
    return None if name.partition(".")[0] == "vllm" else FOUND(name, package)


class GrpoTrainer(Trainer):
    """Of a tiny model, on the CPU, for a reward that differs with every letter."""

    def __init__(self, order: Order, rank: int) -> None:
        super().__init__(order, rank)
        self.api.change(ENGINE_PATH, {"spec": {"features": {"logprobs": {"mode": "processed_logprobs"}}}})
        self._serving = order["serving"]
        self._client: FleetClient | None = None
        self.versions: list[list[list[int]]] = []
        self.history: list[dict[str, Any]] = []

    def train(self, order: Order) -> dict[str, Any]:
        """Begin to train; answers at once."""
        self._start(lambda: self._trained(order))
        return {}

    def offered(self, order: Order) -> dict[str, Any]:
        """Once the trainer offers this version, or has ended."""
        thread, told = self._thread, f"/{order['version']}"
        assert thread is not None
        never = threading.Event()
        while thread.is_alive() and told not in self.lease()["annotations"].get("rollfleet.io/offers", ""):
            never.wait(0.01)
        return self.lease() | {"alive": thread.is_alive()}

    def _client_made(self) -> FleetClient:
        rollouts = Rollouts(self._serving, model="policy", on_abort="restart", max_staleness=0, hold_s=30.0)
        self._client = FleetClient(self.fleet, rollouts, step=lambda: f"sync-{len(self.versions)}")
        generate = self._client.generate

        def noted(**arguments: Any) -> Any:
            batch = generate(**arguments)
            self.versions.append(batch["versions"] or [])
            return batch

        self._client.generate = noted  # type: ignore[method-assign, assignment]
        return self._client

    def _trained(self, order: Order) -> Update:
        importlib.util.find_spec = _without_vllm
        from datasets import Dataset  # noqa: PLC0415 - seconds to import, and only after vLLM was hidden
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
        from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(order["model"])
        model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32)
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_timeout=10.0,
            max_steps=order["steps"],
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            learning_rate=1e-2,
            beta=0.0,
            temperature=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        with vllm_client_replaced(self._client_made):
            trainer = GRPOTrainer(
                model,
                reward_funcs=lambda completions, **_: [float(sum(map(ord, text))) for text in completions],
                args=config,
                train_dataset=Dataset.from_dict({"prompt": order["prompts"]}),
                processing_class=tokenizer,
            )
        trainer.train()
        self.history = trainer.state.log_history
        assert self._client is not None
        assert self._client.update is not None
        return self._client.update

    def told(self, _: Order) -> dict[str, Any]:
        """What TRL logged, and the versions of its samples."""
        return {"history": self.history, "versions": self.versions}

    def close(self, order: Order) -> dict[str, Any]:
        """As TRL does at exit."""
        if self._client is not None:
            self._client.close_communicator()
            return self.lease()
        return super().close(order)


if __name__ == "__main__":
    main(0, GrpoTrainer)
