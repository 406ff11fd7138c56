"""Answers of vLLM's three routes, read into segments. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from rollfleet_protocol.refusals import ENGINE_HEADER, SPANS_HEADER, WEIGHT_VERSION_HEADER, VersionSpan
from rollfleet_trainer.asking import CHAT, TOKENS
from rollfleet_trainer.rollout_errors import BadAnswerError, RoutedExpertsError
from rollfleet_trainer.routing import decode_routed_experts
from rollfleet_trainer.samples import ABORT, Experts, Segment

_SPANS = TypeAdapter(tuple[VersionSpan, ...])
_TOKENS = TypeAdapter(tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...])
_LOGPROBS = TypeAdapter(tuple[float, ...])
LONGEST_VERSION = 19  # digits: an int64


def served_version(headers: Mapping[str, str]) -> int | None:
    """The version that an answer speaks of, a refusal's too; None where it says none."""
    told = headers.get(WEIGHT_VERSION_HEADER.lower(), "")
    return int(told) if told.isascii() and told.isdigit() and len(told) <= LONGEST_VERSION else None


def read_answer(
    route: str, headers: Mapping[str, str], raw: bytes, engine: str, asked: tuple[int, ...], *, logprobs: bool
) -> Segment:
    """A 200. `headers` by lower-case names; `asked`: the prompt, where it was tokens. Raises BadAnswerError."""
    try:
        body = json.loads(raw)
        (choice,) = body["choices"]
        tokens = _TOKENS.validate_python(choice["token_ids"])
        prompt = asked if route == TOKENS else _prompt_tokens(route, body, choice)
        reason = choice["finish_reason"]
        told = _logprobs(route, choice["logprobs"]) if logprobs else None
        message = choice["message"] if route == CHAT else None
        routed = choice.get("routed_experts")
        text = _text(route, choice)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        missing = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise BadAnswerError(f"{engine}{route}: the answer is not vLLM's: {missing}") from error
    if told is not None and len(told) != len(tokens):
        raise BadAnswerError(f"{engine}{route}: {len(tokens)} tokens came with {len(told)} logprobs")
    if not isinstance(reason, str):
        raise BadAnswerError(f"{engine}{route}: the answer has finish_reason {reason!r}")
    return Segment(
        prompt_tokens=prompt,
        tokens=tokens,
        logprobs=told,
        versions=_versions(headers, len(tokens), f"{engine}{route}"),
        finish_reason=reason,
        stop_reason=choice.get("stop_reason"),
        text=text,
        message=message,
        routed_experts=_routed(routed, len(prompt) + len(tokens), aborted=reason == ABORT),
        engine=headers.get(ENGINE_HEADER.lower()) or engine,
    )


def require_asked(segment: Segment, prompt: Sequence[int] | None, most: int, where: str) -> None:
    """BadAnswerError where it has more tokens than were asked for, or is an answer to another prompt (None: a text)."""
    if len(segment.tokens) > most:
        raise BadAnswerError(f"{where}: {len(segment.tokens)} tokens came where {most} were asked for at most")
    if prompt is not None and segment.prompt_tokens != tuple(prompt):
        told = (
            f"a prompt of {len(segment.prompt_tokens)} tokens is answered, not the one of {len(prompt)} that was sent"
        )
        raise BadAnswerError(f"{where}: {told}")


def _prompt_tokens(route: str, body: dict[str, Any], choice: dict[str, Any]) -> tuple[int, ...]:
    found: tuple[int, ...] = _TOKENS.validate_python((body if route == CHAT else choice)["prompt_token_ids"])
    return found


def _logprobs(route: str, told: Any) -> tuple[float, ...]:
    """Of the sampled tokens: OpenAI's old form in completions, its newer one elsewhere."""
    if route in (CHAT, TOKENS):
        content = told["content"] if told is not None else None
        return _LOGPROBS.validate_python([each["logprob"] for each in content or ()])
    return _LOGPROBS.validate_python(told["token_logprobs"] if told is not None else ())


def _text(route: str, choice: dict[str, Any]) -> str | None:
    if route == TOKENS:
        return None
    if route != CHAT:
        return str(choice["text"])
    message = choice["message"]
    # What parsers have taken out of the text cannot be put back in its place.
    parsed = any(message.get(part) for part in ("reasoning", "reasoning_content", "tool_calls", "function_call"))
    return None if parsed else str(message["content"] or "")


def _versions(headers: Mapping[str, str], tokens: int, where: str) -> tuple[int, ...]:
    admitted = served_version(headers)
    if admitted is None:
        raise BadAnswerError(f"{where}: the answer has no {WEIGHT_VERSION_HEADER}: no guard of rollfleet stands there")
    versions = [admitted] * tokens
    told = headers.get(SPANS_HEADER.lower())
    if told is None:
        return tuple(versions)
    try:
        spans = _SPANS.validate_json(told)
    except ValidationError as error:  # of any depth: pydantic's own parser has a bound
        raise BadAnswerError(f"{where}: {SPANS_HEADER}: {told[:200]!r} cannot be read") from error
    for span in spans:
        (start,) = span.from_token if len(span.from_token) == 1 else (None,)
        if start is not None and 0 <= start <= tokens:
            versions[start:] = [span.version] * (tokens - start)
    return tuple(versions)


def _routed(encoded: Any, tokens: int, *, aborted: bool) -> Experts | None:
    """Of an aborted answer only what fits its tokens: it may have been cut in the middle of a step."""
    if encoded is None:
        return None
    try:
        return decode_routed_experts(str(encoded), tokens)
    except RoutedExpertsError:
        if aborted:
            return None
        raise
