"""One sample: what engines generated for one prompt, in one answer or in several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

ABORT = "abort"  # vLLM's word: an update, or whoever else may do so, ended the request before it was finished
LENGTH = "length"

Experts = npt.NDArray[Any]  # integers, (tokens, layers, experts per token)


@dataclass(frozen=True)
class Span:
    """Tokens of one version."""

    version: int
    start: int  # index of its first output token


@dataclass(frozen=True)
class Sample:
    """Tokens are the truth of it; text is what the engine made of them."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None  # of each token, natural log, by the weights that spoke it; None: not asked for
    versions: tuple[int, ...]  # of each token
    finish_reason: str  # "stop", "length", "tool_calls", ...; "abort": no finished sample
    stop_reason: int | str | None
    text: str | None  # None: tokens were asked for, or parts of it cannot be put together
    message: dict[str, Any] | None  # of chat: the engine's own, or one made of the whole text where it was continued
    # (prompt + output - 1, layers, experts per token), the engine's own integers: row i tells how token i was routed,
    # by the weights that generated the token after it. None: disabled, or a part of it was aborted without.
    routed_experts: Experts | None
    engine: str  # host name of the engine that answered last; of one that tells none, the endpoint's URL
    continued: int  # times it was submitted again with what it had

    @property
    def aborted(self) -> bool:
        """Whether it was interrupted and is no finished sample."""
        return self.finish_reason == ABORT

    @property
    def spans(self) -> tuple[Span, ...]:
        """Its versions, oldest first."""
        starts = [place for place in range(len(self.versions)) if place == 0 or self._changes(place)]
        return tuple(Span(self.versions[place], place) for place in starts)

    def _changes(self, place: int) -> bool:
        return self.versions[place] != self.versions[place - 1]

    @property
    def mixed(self) -> bool:
        """Whether more than one version spoke."""
        return len(set(self.versions)) > 1

    def staleness(self, version: int) -> int:
        """How many versions its oldest token is behind; 0 without tokens."""
        return max(0, version - min(self.versions, default=version))


@dataclass(frozen=True)
class Segment:
    """One answer."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    versions: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    text: str | None
    message: dict[str, Any] | None
    routed_experts: Experts | None
    engine: str


@dataclass
class Gathered:
    """The answers to one prompt so far, each to the prompt and all tokens before it."""

    segments: list[Segment] = field(default_factory=list)
    restarts: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(_joined(segment.tokens for segment in self.segments))

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """As the first engine read the prompt."""
        return self.segments[0].prompt_tokens if self.segments else ()

    @property
    def unrouted(self) -> Segment | None:
        """An answer that nobody interrupted and that has no routing of its tokens all the same."""
        finished = (segment for segment in self.segments if segment.finish_reason != ABORT and segment.tokens)
        return next((segment for segment in finished if segment.routed_experts is None), None)

    def add(self, segment: Segment) -> None:
        """One answer more."""
        self.segments.append(segment)

    def forget(self) -> None:
        """Begin anew."""
        self.segments.clear()
        self.restarts += 1

    def sample(self, finish_reason: str) -> Sample:
        """All of it as one."""
        segments, last = self.segments, self.segments[-1]
        parts = [segment.text for segment in segments]
        text = None if any(part is None for part in parts) else "".join(part or "" for part in parts)
        continued = len(segments) > 1
        has_message = segments[0].message is not None
        made = {"role": "assistant", "content": text} if has_message and text is not None else None
        told = [segment.logprobs for segment in segments]
        return Sample(
            prompt_tokens=self.prompt_tokens,
            tokens=self.tokens,
            logprobs=None if any(each is None for each in told) else tuple(_joined(each or () for each in told)),
            versions=tuple(_joined(segment.versions for segment in segments)),
            finish_reason=finish_reason,
            stop_reason=last.stop_reason,
            text=text,
            message=made if continued else last.message,
            routed_experts=_routing(segments),
            engine=last.engine,
            continued=len(segments) - 1,
        )


def _joined(parts: Iterable[tuple[Any, ...]]) -> Iterable[Any]:
    return (each for part in parts for each in part)


def _routing(segments: list[Segment]) -> Experts | None:
    """Rows of each token as the weights routed it that generated the token after it.

    A later answer computes the tokens before it anew, under its own weights: of those its rows are not taken.
    """
    rows: list[Experts] = []
    done = 0
    for segment in segments:
        if not segment.tokens:
            continue
        if segment.routed_experts is None:
            return None
        rows.append(segment.routed_experts[done:])
        done = len(segment.prompt_tokens) + len(segment.tokens) - 1
    return np.concatenate(rows) if rows else None
