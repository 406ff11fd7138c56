"""Why a rollout has no sample.

RolloutError
    NotServedError          nobody answered within hold_s: closed, of another version, or not there
    RefusedError            the engine will not answer this request; `status` is its own
    UnansweredError         it was sent, and what became of it is not known; it may have been processed
    VersionPassedError      the version that was asked for is not served any more
    OverdueError            not done within deadline_s; `partial` is what there was of it
    BadAnswerError          the answer is not what it must be
        RoutedExpertsError  the routing is absent, or not of these tokens
        TraceError          the tokens are not those of the trace
    ClosedError             the client was closed meanwhile
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollfleet_trainer.samples import Sample


class RolloutError(Exception):
    """Base of them all. The message names the endpoint and tells its own words."""


class NotServedError(RolloutError):
    """As above; the message tells why the last one to be asked refused."""


class RefusedError(RolloutError):
    """As above."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class UnansweredError(RolloutError):
    """As above: sent again only where resend_unanswered says so."""


class VersionPassedError(RolloutError):
    """As above: versions only rise."""


class OverdueError(RolloutError):
    """As above."""

    def __init__(self, message: str, partial: Sample | None) -> None:
        super().__init__(message)
        self.partial = partial


class BadAnswerError(RolloutError):
    """As above."""


class RoutedExpertsError(BadAnswerError):
    """As above."""


class TraceError(BadAnswerError):
    """As above."""


class ClosedError(RolloutError):
    """As above."""
