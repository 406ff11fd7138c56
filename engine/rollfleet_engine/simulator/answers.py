"""Bodies of answers, field by field as vLLM 0.27.1 was seen to give them."""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from rollfleet_engine.simulator.core import Step
from rollfleet_engine.simulator.model import Context, following_logprobs
from rollfleet_engine.simulator.tokens import VOCABULARY, decode

JsonObject = dict[str, Any]
FINGERPRINT = "simulator-0.27.1"
DONE = b"data: [DONE]\n\n"


def sse(event: JsonObject) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def usage(prompt: int, generated: int, cached: int | None, *, chunk: bool = False) -> JsonObject:
    """Tokens counted; `cached` None: the server was not started with --enable-prompt-tokens-details."""
    details: JsonObject | None = None
    if cached is not None:
        rest = {} if chunk else {"created_cache_tokens": None, "multimodal_tokens": None}
        details = {"cached_tokens": cached} | rest
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + generated,
        "completion_tokens": generated,
        "prompt_tokens_details": details,
    }


def ranked(context: Context) -> list[tuple[int, float]]:
    """All tokens with their log-probabilities, the likeliest first."""
    return sorted(((token, context.logprob(token)) for token in range(VOCABULARY)), key=lambda entry: -entry[1])


def _top(step: Step, count: int) -> list[tuple[int, float]]:
    return ranked(step.context)[:count] if count else [(step.token, step.logprob)]


class Completion:
    """Answers of /v1/completions."""

    def __init__(self, model: str, logprobs: int | None, *, token_ids: bool) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex[:16]}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs = logprobs
        self._token_ids = token_ids

    def _logprobs_of(self, steps: Sequence[Step], offset: int) -> JsonObject | None:
        if self._logprobs is None:
            return None
        return {
            "text_offset": [offset + place for place in range(len(steps))],
            "token_logprobs": [step.logprob for step in steps],
            "tokens": [decode([step.token]) for step in steps],
            "top_logprobs": [
                {decode([token]): logprob for token, logprob in _top(step, self._logprobs)} for step in steps
            ],
        }

    def whole(
        self, prompt: Sequence[int], steps: Sequence[Step], reason: str, usage: JsonObject, prompt_logprobs: Any
    ) -> JsonObject:
        """The answer of a request that does not stream."""
        tokens = [step.token for step in steps]
        choice = {
            "index": 0,
            "text": decode(tokens),
            "logprobs": self._logprobs_of(steps, 0),
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": tokens if self._token_ids else None,
            "prompt_logprobs": prompt_logprobs,
            "prompt_token_ids": list(prompt) if self._token_ids else None,
            "routed_experts": None,
        }
        return self._head | {
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self) -> list[JsonObject]:
        """Chunks before the first token."""
        return []

    def chunk(self, step: Step | None, place: int, reason: str | None) -> JsonObject:
        """One token of a stream; the last one carries the reason, and none where an abort came between tokens."""
        steps = [] if step is None else [step]
        choice = {
            "index": 0,
            "text": decode(step.token for step in steps),
            "logprobs": self._logprobs_of(steps, place),
            "finish_reason": reason,
            "stop_reason": None,
            "prompt_token_ids": None,
            "token_ids": [step.token for step in steps] if self._token_ids else None,
        }
        last = {"system_fingerprint": FINGERPRINT} if reason else {}
        return self._head | {"choices": [choice]} | last

    def closing(self, usage: JsonObject) -> JsonObject:
        """The chunk that include_usage asks for."""
        return self._head | {"choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}


class Chat:
    """Answers of /v1/chat/completions."""

    def __init__(self, model: str, logprobs: int | None, *, token_ids: bool) -> None:
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex[:16]}", "created": int(time.time()), "model": model}
        self._logprobs = logprobs
        self._token_ids = token_ids

    def _logprobs_of(self, steps: Sequence[Step]) -> JsonObject | None:
        if self._logprobs is None:
            return None
        content = []
        for step in steps:
            top = [_logprob(token, logprob) for token, logprob in _top(step, self._logprobs)]
            content.append(_logprob(step.token, step.logprob) | {"top_logprobs": top if self._logprobs else []})
        return {"content": content}

    def whole(
        self, prompt: Sequence[int], steps: Sequence[Step], reason: str, usage: JsonObject, prompt_logprobs: Any
    ) -> JsonObject:
        """The answer of a request that does not stream."""
        tokens = [step.token for step in steps]
        message = {
            "role": "assistant",
            "content": decode(tokens),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs_of(steps),
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": tokens if self._token_ids else None,
            "routed_experts": None,
        }
        return self._head | {
            "object": "chat.completion",
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage,
            "prompt_logprobs": prompt_logprobs,
            "prompt_token_ids": list(prompt) if self._token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self) -> list[JsonObject]:
        """The role comes first."""
        return [self._chunk({"role": "assistant", "content": ""}, None, None)]

    def chunk(self, step: Step | None, place: int, reason: str | None) -> JsonObject:
        """One token of a stream."""
        steps = [] if step is None else [step]
        return self._chunk({"content": decode(step.token for step in steps)}, self._logprobs_of(steps), reason)

    def _chunk(self, delta: JsonObject, logprobs: JsonObject | None, reason: str | None) -> JsonObject:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        last = {"system_fingerprint": FINGERPRINT} if reason else {}
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]} | last

    def closing(self, usage: JsonObject) -> JsonObject:
        """The chunk that include_usage asks for."""
        last = {"object": "chat.completion.chunk", "choices": [], "usage": usage}
        return self._head | last | {"system_fingerprint": FINGERPRINT}


def _logprob(token: int, logprob: float) -> JsonObject:
    text = decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def token_logprobs(steps: Sequence[Step], count: int | None) -> JsonObject | None:
    """Of the token route: tokens are told by their number, and at least one likely token beside the sampled one."""
    if count is None:
        return None
    content = []
    for step in steps:
        top = [_numbered(*entry) for entry in ranked(step.context)[: max(count, 1)]]
        content.append(_numbered(step.token, step.logprob) | {"top_logprobs": top})
    return {"content": content}


def _numbered(token: int, logprob: float) -> JsonObject:
    return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}


def prompt_logprobs(digest: str, prompt: Sequence[int]) -> list[JsonObject | None]:
    """Of each token of the prompt after the first."""
    following = following_logprobs(digest, prompt)
    return [
        None,
        *(
            {str(token): {"logprob": logprob, "rank": None, "decoded_token": decode([token])}}
            for token, logprob in zip(prompt[1:], following, strict=True)
        ),
    ]


def model_list(served_name: str, root: str, max_model_len: int, created: int) -> JsonObject:
    """GET /v1/models."""
    card = {
        "id": served_name,
        "object": "model",
        "created": created,
        "owned_by": "rollfleet",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
    }
    return {"object": "list", "data": [card]}
