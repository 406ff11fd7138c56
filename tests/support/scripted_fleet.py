"""A fleet that answers as a script says, behind httpx: tokens of each version, refusals, lost connections.

Token i of an answer under version v is what the simulated model says under digest "v<v>" to all tokens before it. So
whoever has a sample can tell of each token whether it is that of the version that it is said to be of.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from rollfleet_engine.simulator.model import Context
from rollfleet_engine.simulator.tokens import decode, encode
from rollfleet_protocol.refusals import (
    ENGINE_HEADER,
    MINIMUM_HEADER,
    REQUIRED_HEADER,
    SPANS_HEADER,
    WEIGHT_VERSION_HEADER,
    ClosedReason,
    Refusal,
    RefusalDetail,
    RefusalReason,
)
from rollfleet_trainer.samples import Sample

PROCESSED = ("answer", "abort", "kept", "break")


@dataclass(frozen=True)
class Event:
    """What becomes of the next request, after `bump` versions more."""

    what: str  # answer | abort | kept | closed | nobody | unreachable | break | 400 | 500 | 502 | 503
    tokens: int = 0  # before an abort, or a change of version
    bump: int = 0


@dataclass
class ScriptedFleet(httpx.AsyncBaseTransport):
    """After its last event it goes on with that one."""

    events: Sequence[Event] = (Event("answer"),)
    version: int = 1
    retry_after: str | None = "1"
    name: str = ""  # that answers tell
    experts: bool = False  # answers tell routed experts: of each token its version; aborted ones do not
    log: list[tuple[str, str]] = field(default_factory=list)  # URL and event, in their order
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[httpx.Headers] = field(default_factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        place = min(len(self.log), len(self.events) - 1)
        event = self.events[place]
        self.version += event.bump
        body = json.loads(await request.aread())
        self.bodies.append(body)
        self.headers.append(request.headers)
        refused = self._demand(request.headers) if event.what in PROCESSED else None
        self.log.append((str(request.url), "wrong" if refused else event.what))
        if refused:
            return refused
        if event.what == "unreachable":
            raise httpx.ConnectError("refused", request=request)
        if event.what == "break":
            raise httpx.ReadError("reset", request=request)
        if event.what in PROCESSED:
            return self._answer(request.url.path, body, event)
        return self._refusal(event)

    def _demand(self, headers: httpx.Headers) -> httpx.Response | None:
        required, minimum = headers.get(REQUIRED_HEADER), headers.get(MINIMUM_HEADER)
        if (required is None or int(required) == self.version) and (minimum is None or int(minimum) <= self.version):
            return None
        return _refuse(409, RefusalReason.WRONG_VERSION, {WEIGHT_VERSION_HEADER: str(self.version)})

    def _refusal(self, event: Event) -> httpx.Response:
        headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
        if event.what == "closed":
            return _refuse(503, RefusalReason.CLOSED, headers, ClosedReason.UPDATING)
        if event.what == "nobody":
            return httpx.Response(503, text="No available workers")
        return httpx.Response(int(event.what), json={"error": {"message": "in the engine's own words"}})

    def _answer(self, path: str, body: dict[str, Any], event: Event) -> httpx.Response:
        prompt = prompt_of(path, body)
        wanted = body["sampling_params"]["max_tokens"] if path.endswith("generate") else body["max_tokens"]
        headers = {WEIGHT_VERSION_HEADER: str(self.version)} | ({ENGINE_HEADER: self.name} if self.name else {})
        changes = [(0, self.version)]
        if event.what == "kept" and event.tokens < wanted:
            self.version += 1
            changes.append((event.tokens, self.version))
            told = [{"version": version, "fromToken": [start]} for start, version in changes]
            headers[SPANS_HEADER] = json.dumps(told)
        count = min(wanted, event.tokens) if event.what == "abort" else wanted
        tokens, logprobs = _generate(changes, prompt, count)
        reason = "abort" if event.what == "abort" and count <= wanted else "length"
        document = _document(path, prompt, tokens, logprobs, reason)
        if self.experts and reason != "abort":
            rows = np.full((len(prompt) + len(tokens) - 1, 2, 1), self.version, dtype=np.uint8)
            document["choices"][0]["routed_experts"] = encoded(rows)
        return httpx.Response(200, headers=headers, json=document)


def encoded(array: Any, **options: Any) -> str:
    """As vLLM encodes routed experts."""
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return base64.b64encode(stream.getvalue()).decode()


def prompt_of(path: str, body: dict[str, Any]) -> list[int]:
    """Tokens of what was asked."""
    if path.endswith("chat/completions"):
        return list(encode("".join(f"{each['role']}: {each['content']}\n" for each in body["messages"])))
    asked = body["token_ids"] if path.endswith("generate") else body["prompt"]
    return list(encode(asked) if isinstance(asked, str) else asked)


def _generate(changes: list[tuple[int, int]], prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    for place in range(count):
        version = next(version for start, version in reversed(changes) if start <= place)
        context = Context(f"v{version}", [*prompt, *tokens])
        tokens.append(context.best())
        logprobs.append(context.logprob(tokens[-1]))
    return tokens, logprobs


def _document(path: str, prompt: list[int], tokens: list[int], logprobs: list[float], reason: str) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "token_ids": tokens, "stop_reason": None}
    content = {
        "content": [{"token": str(token), "logprob": each} for token, each in zip(tokens, logprobs, strict=True)]
    }
    if path.endswith("generate"):
        return {"choices": [choice | {"logprobs": content}]}
    if path.endswith("chat/completions"):
        message = {"role": "assistant", "content": decode(tokens), "reasoning": None}
        return {"prompt_token_ids": prompt, "choices": [choice | {"message": message, "logprobs": content}]}
    told = {"token_logprobs": logprobs}
    return {"choices": [choice | {"text": decode(tokens), "logprobs": told, "prompt_token_ids": prompt}]}


def _refuse(
    status: int, reason: RefusalReason, headers: dict[str, str], closed: ClosedReason | None = None
) -> httpx.Response:
    detail = RefusalDetail(message=f"refused: {reason.value}", code=status, reason=reason, closed_reason=closed)
    body = Refusal(error=detail).model_dump_json(by_alias=True)
    return httpx.Response(status, headers={"content-type": "application/json", **headers}, content=body)


def require_true(sample: Sample) -> None:
    """Each token, and its logprob, is that of the version that it is said to be of."""
    assert sample.logprobs is not None
    assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions)
    for place, version in enumerate(sample.versions):
        context = Context(f"v{version}", [*sample.prompt_tokens, *sample.tokens[:place]])
        assert sample.tokens[place] == context.best()
        assert sample.logprobs[place] == context.logprob(sample.tokens[place])
    assert [each for span in sample.spans for each in _length(span.start, span.version, sample)] == list(
        sample.versions
    )


def _length(start: int, version: int, sample: Sample) -> list[int]:
    ends = [span.start for span in sample.spans if span.start > start]
    return [version] * (min(ends, default=len(sample.tokens)) - start)
