"""TRL's sampling arguments as those of the rollout client, and samples as TRL's batches. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollfleet_trainer.asking import MOST_SEED
from rollfleet_trainer.errors import NotPossible
from rollfleet_trainer.rollout_errors import VersionPassedError
from rollfleet_trainer.samples import Sample

Batch = dict[str, list[Any] | None]


class Wish:
    """Arguments of `generate` or `chat`; what generation_kwargs names too is overridden by it, as TRL has it."""

    def __init__(self, named: Mapping[str, Any], regex: str | None, more: Mapping[str, Any] | None) -> None:
        fields = dict(named)
        if regex is not None:
            fields["structured_outputs"] = {"regex": regex}
        fields |= more or {}
        self.n = int(fields.pop("n"))
        self.max_tokens = int(fields.pop("max_tokens"))
        self.logprobs: int | None = fields.pop("logprobs")
        self._fields = fields
        if self.n < 1:
            raise NotPossible(f"n is {self.n}: at least 1")
        if self.logprobs:
            raise NotPossible(
                f"logprobs={self.logprobs}: a fleet's samples have the log-probability of the sampled token (0) or none"
            )

    def fields(self) -> Iterator[dict[str, Any]]:
        """Of each of the n samples of a prompt: a seed is moved as vLLM moves it (v1/engine/parallel_sampling.py)."""
        for place in range(self.n):
            seed = self._fields.get("seed")
            yield self._fields if seed is None else {**self._fields, "seed": (int(seed) + place) % MOST_SEED}


def schemas(tools: Sequence[Any]) -> list[Any]:
    """Functions as the JSON that a chat template is given."""
    if not any(callable(tool) for tool in tools):
        return list(tools)
    from transformers.utils import get_json_schema  # noqa: PLC0415 - TRL's own way

    return [get_json_schema(tool) if callable(tool) else tool for tool in tools]


def require_no_images(messages: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """NotPossible where a conversation has parts that JSON does not hold."""
    for message in (message for turns in messages for message in turns):
        content = message.get("content")
        kinds = (
            {part.get("type") for part in content} if isinstance(content, Sequence) and content != str(content) else ()
        )
        if found := sorted({"image", "image_pil"}.intersection(kinds)):
            raise NotPossible(f"{found[0]}: messages with images are not sent to a fleet")


def batch_of(samples: Sequence[Sample], wish: Wish) -> Batch:
    """TRL's four lists, and versions: of each token of each sample.

    Raises VersionPassedError where a sample was ended by another version, NotPossible where logprobs are lacking.
    """
    for sample in samples:
        if sample.aborted:
            raise VersionPassedError(
                f"{sample.engine}: the fleet went on from version {sample.versions[-1] if sample.versions else '?'} "
                "before a sample of it was finished"
            )
    return {
        "prompt_ids": [list(sample.prompt_tokens) for sample in samples[:: wish.n]],
        "completion_ids": [list(sample.tokens) for sample in samples],
        "logprobs": None if wish.logprobs is None else [_logprobs(sample) for sample in samples],
        "logprob_token_ids": None
        if wish.logprobs is None
        else [[[token] for token in each.tokens] for each in samples],
        "versions": [list(sample.versions) for sample in samples],
    }


def _logprobs(sample: Sample) -> list[list[float | None]]:
    if sample.logprobs is None:
        raise NotPossible("logprobs are asked for, but Rollouts(logprobs=False) leaves them out")
    return [[None if math.isnan(logprob) else logprob] for logprob in sample.logprobs]
