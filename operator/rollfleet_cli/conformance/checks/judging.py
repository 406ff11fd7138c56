"""Judgements of single exchanges: pure, each yields what is wrong with one answer. Nothing passes on nothing."""

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from math import isfinite
from typing import Any, TypeGuard

from pydantic import ValidationError

from rollfleet_cli.conformance.checks.check import Fault, Subject
from rollfleet_cli.conformance.checks.wire import Exchange, parsed
from rollfleet_protocol.refusals import SPANS_HEADER, WEIGHT_VERSION_HEADER, ClosedReason, Refusal, RefusalReason
from rollfleet_protocol.state import EngineState

DONE = "data: [DONE]"
SPANS_COMMENT = f": {SPANS_HEADER.lower()} "
NO_SUCH_ROUTE = 404
UNTIL_OPEN = (503, RefusalReason.CLOSED)


def refusal_of(exchange: Exchange) -> Refusal | None:
    """What a guard refused with; None where a guard of ours did not speak."""
    try:
        return Refusal.model_validate_json(exchange.body)
    except ValidationError:
        return None


def closed_by(exchange: Exchange) -> ClosedReason | None:
    """Why the gate was closed to this request; None where it was not refused for that."""
    found = refusal_of(exchange) if exchange.status == UNTIL_OPEN[0] else None
    return found.error.closed_reason if found is not None and found.error.reason is UNTIL_OPEN[1] else None


def refused(exchange: Exchange, status: int, reason: RefusalReason, *secrets: str) -> Iterator[Fault]:
    """In a guard's own words, with this status, and without anything that the caller had no right to learn."""
    found = refusal_of(exchange)
    if exchange.status != status or found is None or found.error.reason is not reason:
        yield Fault(f"{exchange.call.words} must be refused by the guard: HTTP {status} {reason.value}", exchange.told)
    elif found.error.code != status:
        yield Fault(f"{exchange.call.words}: the body says code {found.error.code} under HTTP {status}", exchange.told)
    if any(secret and secret in exchange.text for secret in secrets):
        yield Fault(f"{exchange.call.words}: the refusal tells what only the operator may know")


def missing(exchange: Exchange) -> Iterator[Fault]:
    """The guard says that there is no such thing."""
    yield from refused(exchange, NO_SUCH_ROUTE, RefusalReason.NOT_FOUND)


def has_status(exchange: Exchange, *wanted: int) -> Iterator[Fault]:
    """Answered, with one of these."""
    if exchange.status not in wanted:
        expected = " or ".join(str(each) for each in wanted)
        yield Fault(f"{exchange.call.words} must answer HTTP {expected}", exchange.told)


def openai_error(exchange: Exchange, *statuses: int) -> Iterator[Fault]:
    """The engine's refusal as OpenAI's clients read it: error.message, error.type, error.code."""
    if exchange.status not in statuses:
        yield from has_status(exchange, *statuses)
        return
    document = exchange.json
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict) or not error.get("message") or "type" not in error:
        yield Fault(f"{exchange.call.words}: the error has no OpenAI form (error.message, error.type)", exchange.told)
    elif error.get("code") not in (exchange.status, str(exchange.status)):
        code = error.get("code")
        yield Fault(f"{exchange.call.words}: error.code is {code!r} under HTTP {exchange.status}", exchange.told)


def tells_version(exchange: Exchange, version: int) -> Iterator[Fault]:
    """Once, and it is the one that is held."""
    told = exchange.all(WEIGHT_VERSION_HEADER)
    if told != (str(version),):
        said = ", ".join(told) or "nothing"
        yield Fault(f"{exchange.call.words}: {WEIGHT_VERSION_HEADER} must be {version} once, it says {said}")
    if spans := exchange.all(SPANS_HEADER):
        yield Fault(f"{exchange.call.words}: spans {spans[0]} on an answer of one version")


def state_of(exchange: Exchange) -> EngineState | None:
    """What a guard told of its engine."""
    try:
        return EngineState.model_validate_json(exchange.body) if exchange.status == 200 else None
    except ValidationError:
        return None


@dataclass(frozen=True)
class Completed:
    """One choice of an answer, from any of the generating routes."""

    finish_reason: Any
    tokens: int  # by the engine's own count
    choice: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)


def completed(exchange: Exchange) -> Completed | None:
    """None where the answer is no generation of one choice."""
    document = exchange.json
    if exchange.status != 200 or not isinstance(document, dict):
        return None
    choices, usage = document.get("choices"), document.get("usage")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return None
    usage = usage if isinstance(usage, dict) else {}
    ids = choices[0].get("token_ids")
    count = usage.get("completion_tokens", len(ids) if isinstance(ids, list) else None)
    return Completed(choices[0].get("finish_reason"), count, choices[0], usage) if isinstance(count, int) else None


def generated(exchange: Exchange, subject: Subject, most: int) -> Iterator[Fault]:
    """All tokens that were asked for, from the version that is held."""
    if exchange.status != 200:
        yield from has_status(exchange, 200)
        return
    found = completed(exchange)
    if found is None:
        yield Fault(f"{exchange.call.words}: no generation with one choice and its count of tokens", exchange.told)
    elif (found.finish_reason, found.tokens) != ("length", most):
        told = f"{found.tokens} tokens, finish_reason {found.finish_reason!r}"
        yield Fault(f"{exchange.call.words}: {most} tokens and finish_reason 'length' were asked for, it gave {told}")
    yield from tells_version(exchange, subject.version)


def numbers(
    what: str, values: Any, count: int, *, below_zero: bool = True, may_begin_empty: bool = False
) -> Iterator[Fault]:
    """So many log-probabilities: finite, and none above zero."""
    listed = values if isinstance(values, list | tuple) else []
    rest = listed[1:] if may_begin_empty else listed
    if len(listed) != count:
        yield Fault(f"{what}: {count} values must come, there are {len(listed)}")
    elif not all(_is_number(value) and isfinite(value) for value in rest):
        yield Fault(f"{what}: values that are no numbers: {str(listed)[:200]}")
    elif below_zero and any(value > 0 for value in rest):
        yield Fault(f"{what}: log-probabilities above 0: {str(listed)[:200]}")


def alike(what: str, one: Collection[float], other: Collection[float], allowed: Decimal) -> Iterator[Fault]:
    """Two readings of the same computation."""
    if len(one) != len(other) or not one:
        yield Fault(f"{what}: {len(one)} values against {len(other)}")
        return
    apart = max(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True))
    if not isfinite(apart) or Decimal(apart) > allowed:
        yield Fault(f"{what}: differ by {apart:.6g}; allowed is {allowed}")


def token_values(choice: dict[str, Any]) -> list[float]:
    """`logprobs.token_logprobs` of a choice; empty where these are no numbers."""
    told = choice.get("logprobs")
    values = told.get("token_logprobs") if isinstance(told, dict) else None
    return values if isinstance(values, list) and all(_is_number(value) for value in values) else []


def prompt_values(exchange: Exchange, tokens: tuple[int, ...]) -> list[float]:
    """Log-probabilities of a prompt's tokens after the first, from `prompt_logprobs`; empty without them."""
    found = completed(exchange)
    entries = found.choice.get("prompt_logprobs") if found is not None else None
    if not isinstance(entries, list) or len(entries) != len(tokens):
        return []
    values = []
    for token, entry in zip(tokens[1:], entries[1:], strict=True):
        told = entry.get(str(token)) if isinstance(entry, dict) else None
        value = told.get("logprob") if isinstance(told, dict) else None
        if not _is_number(value):
            return []
        values.append(float(value))
    return values


@dataclass(frozen=True)
class Streamed:
    """Server-sent events of an answer."""

    text: str
    finish_reason: Any
    spans: tuple[str, ...]
    last: str
    after_done: bool  # something follows the end


def streamed(exchange: Exchange) -> Streamed:
    """The events, as far as they can be read."""
    lines = [line for line in exchange.text.splitlines() if line.strip()]
    text, reason, spans = "", None, []
    for line in lines:
        if line.startswith(SPANS_COMMENT):
            spans.append(line.removeprefix(SPANS_COMMENT))
        elif line.startswith("data: ") and line != DONE:
            choice = _choice_of(line.removeprefix("data: "))
            text += str(choice.get("text") or "")
            reason = choice.get("finish_reason") or reason
    return Streamed(text, reason, tuple(spans), lines[-1] if lines else "", DONE in lines[:-1])


def each(exchanges: Collection[Exchange], judge: Callable[[Exchange], Iterator[Fault]]) -> Iterator[Fault]:
    """The same judgement of all."""
    for exchange in exchanges:
        yield from judge(exchange)


def _choice_of(event: str) -> dict[str, Any]:
    document = parsed(event)
    choices = document.get("choices") if isinstance(document, dict) else None
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _is_number(value: Any) -> TypeGuard[float]:
    """JSON has integers of any length; those that no float can hold are no numbers here."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max
