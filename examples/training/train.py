"""GRPO against a fleet of rollout engines: `python -m examples.training.train --fleet rl/qwen --model FOLDER ...`.

The policy learns to answer in lower-case letters. What is toy is the reward and the size; the rest is what a loop of
its kind does: samples of a step are asked for before the weights of the step before are sent, so that the engines are
busy while the trainer computes. An update finds them in the middle: they are cut short and continued under the new
weights, and each token knows which weights spoke it. The loss corrects for that by the engines' own logprobs.

Needs rollfleet[trainer], torch and transformers. A line of JSON per version goes to standard output, and what an update
waits for to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.training.objective import group_advantages, require_versions, reward, rise
from rollfleet_trainer import ProgressLine, RolloutFleet, TrainerError, Update
from rollfleet_trainer.rollout_errors import RolloutError
from rollfleet_trainer.rollouts import Rollouts
from rollfleet_trainer.samples import Sample

PROMPTS = (
    *("The fleet serves", "A policy learns.", "Weights change: ", "Rollouts go on, "),
    *("Every token has ", "its own version.", "Nothing is stale", "1 + 1 = two and "),
)
MAX_STALENESS = 1  # versions between the trainer's weights and the oldest token that it learns from
CLIP = 0.2  # of the importance ratio (PPO's)
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Plan:
    """How long and how fast."""

    model: Path  # the policy's first weights, and what else belongs to its folder
    versions: int = 20
    group: int = 8  # answers to one prompt, which are compared with each other
    max_tokens: int = 48
    learning_rate: float = 3e-3
    seed: int = 0
    dtype: str = "float32"  # of the engines' weights; the trainer's own are float32
    checkpoints: Path | None = None  # the fleet's volumes.checkpoints, as this process sees it
    checkpoint_every: int = 5  # versions
    keep: int = 2  # checkpoints, beside those in use


class Policy:
    """The trainer's weights, and copies of the last ones that were sent (a large policy keeps logprobs instead)."""

    def __init__(self, model: PreTrainedModel, plan: Plan) -> None:
        self.model = model
        self._dtype: torch.dtype = getattr(torch, plan.dtype)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=0.0)
        self.sent: dict[int, Weights] = {}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As the engines' model has them: what an update sends, made one by one and again for every attempt."""
        return ((name, each.detach().to(self._dtype)) for name, each in self.model.named_parameters())

    def note_sent(self, version: int) -> None:
        """Keep what the engines hold now, and what they may have held when the samples in flight were begun."""
        self.sent[version] = {name: each.to(torch.float32, copy=True) for name, each in self.weights()}
        for old in [each for each in self.sent if each < version - MAX_STALENESS]:
            del self.sent[old]

    def logprobs(self, samples: Sequence[Sample], weights: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Of each output token, by these weights or the present ones: (samples, longest), zero where there is none."""
        rows = [torch.tensor([*each.prompt_tokens, *each.tokens]) for each in samples]
        ids = pad_sequence(rows, batch_first=True)  # causal: what follows an answer does not change it
        named = dict(self.model.named_parameters()) if weights is None else dict(weights)
        logits = torch.func.functional_call(self.model, named, (ids[:, :-1],)).logits
        scores = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
        outputs = zip(scores, samples, strict=True)
        return padded([row[len(each.prompt_tokens) - 1 :][: len(each.tokens)] for row, each in outputs])

    def learn(self, samples: Sequence[Sample], advantages: Sequence[float]) -> None:
        """One step on one batch."""
        engines = padded([torch.tensor(each.logprobs) for each in samples])
        mask = padded([torch.ones(len(each.tokens)) for each in samples])
        loss = surrogate(self.logprobs(samples), engines, torch.tensor(advantages), mask)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    @torch.no_grad()
    def differences(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """Largest difference of engines' and trainer's logprobs: by the version that each token names, and by another.

        The second one tells whether the first could have told a wrong name.
        """
        engines = padded([torch.tensor(each.logprobs) for each in samples])
        versions = padded([torch.tensor(each.versions) for each in samples])
        mask = padded([torch.ones(len(each.tokens)) for each in samples]).bool()
        own, other = [0.0], [0.0]
        for version, weights in self.sent.items():
            away = (self.logprobs(samples, weights) - engines).abs()
            own += away[mask & (versions == version)].tolist()
            other += away[mask & (versions != version)].tolist()
        return max(own), max(other)


def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """One row per sample, zeros at the end."""
    return pad_sequence(list(rows), batch_first=True)


def surrogate(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """PPO's clipped objective per token, negated; `old` is what the engines sampled with, whatever their version."""
    ratio, advantage = (new - old).exp(), advantages[:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -(gain * mask).sum() / mask.sum()


class Loop:
    """The training loop: rollouts, a step, an update, and again."""

    def __init__(self, fleet: RolloutFleet, rollouts: Rollouts, policy: Policy, plan: Plan) -> None:
        self._fleet, self._rollouts, self._policy, self._plan = fleet, rollouts, policy, plan
        self._asked = 0
        self.version = 0

    async def run(self) -> dict[str, Any]:
        """All versions; what was learned."""
        await self._update(step=0)  # the policy's first weights: from here on trainer and fleet hold the same
        before = await self._evaluate()
        batch = asyncio.create_task(self._sample())
        try:
            for step in range(1, self._plan.versions + 1):
                samples = await batch
                line = await asyncio.to_thread(self._step, samples)  # the loop goes on with what was interrupted
                batch = asyncio.create_task(self._sample())  # runs on while weights change
                update = await self._update(step)
                report(line | {"step": step} | figures(update))
            require_versions(await batch, self.version - MAX_STALENESS, self.version)
        finally:
            batch.cancel()
        after = await self._evaluate()
        risen = rise(before, after)
        return {"seed": self._plan.seed, "version": self.version} | vars(risen)

    def _step(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Check a batch and learn from it."""
        require_versions(samples, self.version - MAX_STALENESS, self.version)
        own, other = self._policy.differences(samples)
        rewards = [reward(each.text or "") for each in samples]
        size = self._plan.group
        groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
        self._policy.learn(samples, [each for group in groups for each in group_advantages(group)])
        return {
            "reward": sum(rewards) / len(rewards),
            "mixed": sum(each.mixed for each in samples),
            "stale": sum(each.staleness(self.version) > 0 for each in samples),
            "samples": len(samples),
            "logprobs": own,
            "logprobsOtherVersion": other,
        }

    async def _update(self, step: int) -> Update:
        line = ProgressLine()  # to standard error
        update = await self._fleet.update(self._policy.weights, step=step, pause="abort", on_progress=line)
        self.version = update.version
        self._policy.note_sent(update.version)
        if self._plan.checkpoints is not None and step % self._plan.checkpoint_every == 0:
            how = {
                "step": step,
                "name": f"version-{update.version}",
                "assets": self._plan.model,
                "keep": self._plan.keep,
            }
            made = await self._fleet.publish(self._policy.weights, self._plan.checkpoints, **how)
            if made.recovers != update.version:  # it has the fleet's digest, or it is no copy of this version
                raise ValueError(f"{made.folder}: has digest {made.digest}, version {update.version} {update.digest}")
        return update

    async def _sample(self) -> list[Sample]:
        """A group of answers to each prompt."""
        return await asyncio.gather(*(self._answer(prompt) for prompt in PROMPTS for _ in range(self._plan.group)))

    async def _answer(self, prompt: str) -> Sample:
        self._asked += 1
        seed = self._plan.seed * 1_000_000 + self._asked
        return await self._rollouts.complete(prompt, self._plan.max_tokens, temperature=1.0, seed=seed)

    async def _evaluate(self) -> list[float]:
        """Rewards of a batch that nobody learns from, all of it by the present weights."""
        samples = await self._sample()
        require_versions(samples, self.version, self.version)
        return [reward(each.text or "") for each in samples]


def figures(update: Update) -> dict[str, Any]:
    """What an update cost."""
    told = {"version": update.version, "digest": update.digest, "attempts": update.attempts}
    return told | {"pausedS": update.paused_s, "transferS": update.transfer_s, "engines": list(update.engines)}


def report(line: Mapping[str, Any]) -> None:
    """For whoever watches."""
    print(json.dumps(line), flush=True)


async def train(arguments: argparse.Namespace, plan: Plan) -> None:
    """With a fleet, and a client for its samples."""
    if not plan.model.is_dir():  # transformers would look for a repository of that name
        raise ValueError(f"--model {plan.model}: there is no such folder")
    torch.manual_seed(plan.seed)
    model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=torch.float32)
    options = {"kubeconfig": arguments.kubeconfig, "service_account": arguments.service_account}
    samples = {"max_staleness": MAX_STALENESS, "on_abort": "continue", "hold_s": arguments.hold}
    samples["resend_unanswered"] = True  # an engine that dies may have worked on a sample: another one may do it again
    async with (
        RolloutFleet(arguments.fleet, **options) as fleet,
        fleet.rollouts(arguments.endpoint, **samples) as rollouts,
    ):
        report({"result": await Loop(fleet, rollouts, Policy(model, plan), plan).run()})


def heed_signals() -> None:
    """SIGTERM as Ctrl-C, which gives the Lease back: the kernel gives a container's first process no other one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 with why not; 130 where it was interrupted."""
    heed_signals()
    parser = argparse.ArgumentParser(description="train a policy on a fleet of rollout engines")
    parser.add_argument("--fleet", required=True, help="namespace/name of the RolloutEngine")
    parser.add_argument("--endpoint", action="append", help="of the fleet's router or engines, else status.endpoint")
    parser.add_argument("--model", type=Path, required=True, help="folder of the policy's first weights")
    parser.add_argument("--kubeconfig", type=Path, help="else the pod's ServiceAccount, or $KUBECONFIG")
    parser.add_argument("--service-account", help="as whom to send; else our own, or the fleet's only trainer")
    parser.add_argument("--hold", type=float, default=120.0, help="seconds that a prompt waits for an engine")
    parser.add_argument("--checkpoints", type=Path, help="the fleet's volumes.checkpoints: publish recovery copies")
    for name in ("versions", "checkpoint_every", "keep", "group", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Plan, name))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the engines' weights")
    arguments = parser.parse_args(argv)
    plan = Plan(**{name: value for name, value in vars(arguments).items() if name in Plan.__dataclass_fields__})
    try:
        asyncio.run(train(arguments, plan))
    except (TrainerError, RolloutError, ValueError, OSError) as error:
        print(f"train: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train: interrupted; the fleet's sender Lease is given back", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
