"""What an update under load must show: the same checkpoint as a new version, and what clients saw of it meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from rollfleet_cli.conformance.checks.check import Entry, Fault, Held, Member, Promise
from rollfleet_cli.conformance.checks.fleet import same_answers, same_weights
from rollfleet_cli.conformance.checks.judging import closed_by, completed
from rollfleet_cli.conformance.checks.wire import Exchange
from rollfleet_protocol.refusals import SPANS_HEADER, WEIGHT_VERSION_HEADER

ASK_FOR_DETAILS = "answers do not tell cached tokens: spec.engine.args lacks --enable-prompt-tokens-details"
LONGEST_VERSION = len(str(2**63 - 1))
MOST_TOLD = 3  # of answers that are wrong in the same way


@dataclass(frozen=True)
class Cached:
    """Three times the same long prompt: before the update when it was cached, as the first after it, and once more."""

    pod: str  # and rank
    warm: Exchange
    first: Exchange
    again: Exchange


@dataclass(frozen=True)
class Moved:
    """An update from its beginning to its end."""

    before: int
    wanted: int
    outcome: str  # empty: Active
    held: Held | None  # what is committed now
    old_digest: str | None
    was: tuple[Member, ...]
    members: tuple[Member, ...]  # after it
    load: tuple[tuple[str, Exchange], ...]  # by pod
    cached: tuple[Cached, ...]
    allowed: Decimal
    mixes: str = ""  # why answers of both versions are right; empty: they are not


@dataclass(frozen=True)
class UpdateCheck(Entry):
    """Judged of one update."""

    judge: Callable[[Moved], tuple[Fault, ...]]
    unless: Callable[[Moved], str] = lambda _: ""


def ended_well(moved: Moved) -> tuple[Fault, ...]:
    """Active, on every engine, with the same bytes."""
    if moved.outcome:
        return (Fault(f"version {moved.wanted} was not served", moved.outcome),)
    found = list(same_weights(moved.members, moved.held, moved.allowed))
    if moved.held is None or moved.held.version != moved.wanted:
        found.append(Fault(f"version {moved.wanted} must be committed, {moved.held and moved.held.version} is"))
    elif moved.old_digest and moved.held.digest != moved.old_digest:
        found.append(Fault(f"the same checkpoint has digest {moved.held.digest} now, and had {moved.old_digest}"))
    return tuple(found)


def never_both(moved: Moved) -> tuple[Fault, ...]:
    """No answer of the old version was begun after one of the new had ended, on whichever engine."""
    answers = [(pod, each, version_of(each)) for pod, each in moved.load if each.status == 200]
    known = (moved.before, moved.wanted)
    found = [
        Fault(f"{pod} answered under version {'none' if version is None else version}, neither of {known}")
        for pod, _, version in answers
        if version not in known
    ]
    found += [Fault(f"{pod} answered over two versions", told) for pod, told in _spanning(moved)]
    found += [
        Fault(f"{pod} answered HTTP {each.status or 'nothing'} to a request", each.told)
        for pod, each in moved.load
        if each.status != 200 and closed_by(each) is None
    ]
    old = [(pod, each) for pod, each, version in answers if version == moved.before]
    new = [(pod, each) for pod, each, version in answers if version == moved.wanted]
    if not old or not new:
        return (
            *found[:MOST_TOLD],
            Fault(f"{len(old)} answers of the old and {len(new)} of the new version: no evidence"),
        )
    first_pod, first = min(new, key=lambda entry: entry[1].ended)
    late = [(pod, each) for pod, each in old if each.began > first.ended]
    found += [
        Fault(f"{pod} took a request under {moved.before} after {first_pod} had answered one under {moved.wanted}")
        for pod, _ in late
    ]
    return tuple(found[:MOST_TOLD])


def nothing_cached(moved: Moved) -> tuple[Fault, ...]:
    """The first request after the update used nothing of before, and the one after it used that."""
    found = []
    for each in moved.cached:
        first, again = _cached_by_one_that_tells(each.first), _cached_by_one_that_tells(each.again)
        if first != 0 or version_of(each.first) != moved.wanted:
            told = f"{first} cached tokens under version {version_of(each.first)}"
            found.append(Fault(f"{each.pod}: the first request after the update had {told}", each.first.told))
        elif not again:
            found.append(Fault(f"{each.pod}: the same request once more had {again} cached tokens: nothing is cached"))
    return tuple(found)


def without_cache(moved: Moved) -> str:
    """Why nothing can be said of caches."""
    if moved.outcome or not moved.cached:
        return "the update did not come to its end"
    if any(cached_tokens(each.warm) is None for each in moved.cached):
        return ASK_FOR_DETAILS
    cold = [each.pod for each in moved.cached if not cached_tokens(each.warm)]
    return f"nothing was cached before the update ({', '.join(cold)}): prefix caching is off" if cold else ""


def answers_as_before(moved: Moved) -> tuple[Fault, ...]:
    """The same weights say the same to the probe."""
    found: list[Fault] = []
    for was, now in zip(moved.was, moved.members, strict=True):
        pair = (_named(was, f"{was.pod} before"), _named(now, f"{now.pod} after"))
        found += same_answers(pair, None, moved.allowed)
    return tuple(found)


def cached_tokens(exchange: Exchange) -> int | None:
    """Of its prompt; None where the engine does not tell."""
    found = completed(exchange)
    details = found.usage.get("prompt_tokens_details") if found is not None else None
    count = details.get("cached_tokens") if isinstance(details, dict) else None
    return count if isinstance(count, int) else None


def _cached_by_one_that_tells(exchange: Exchange) -> int | None:
    """The same of an engine that tells what is cached: there null details, as vLLM 0.23 gives them, say nothing is."""
    found = completed(exchange)
    nothing = found is not None and found.usage.get("prompt_tokens_details", "") is None
    return 0 if nothing else cached_tokens(exchange)


def version_of(exchange: Exchange) -> int | None:
    """Of an answer; None where it does not tell one."""
    told = exchange.all(WEIGHT_VERSION_HEADER)
    return int(told[0]) if len(told) == 1 and told[0].isdecimal() and len(told[0]) <= LONGEST_VERSION else None


def _spanning(moved: Moved) -> list[tuple[str, str]]:
    return [(pod, spans[0]) for pod, each in moved.load if (spans := each.all(SPANS_HEADER))]


def _named(member: Member, name: str) -> Member:
    return Member(name, member.state, member.report, member.error)


def _unfinished(moved: Moved) -> str:
    return "the update did not come to its end" if moved.outcome else ""


def _mixing(moved: Moved) -> str:
    return moved.mixes or _unfinished(moved)


CHECKS = (
    UpdateCheck(
        "update-active",
        "the committed checkpoint as a new version is verified and served by every engine, with the same digest",
        Promise.ALWAYS_ENDS,
        "`rollfleet history NAME` and `rollfleet diagnose NAME` tell why",
        ended_well,
    ),
    UpdateCheck(
        "update-atomic",
        "under load clients see the old version, then 503, then the new one, and never both",
        Promise.ATOMIC,
        "`rollfleet verify NAME`; the guards' logs have gate.closed and gate.opened with their times",
        never_both,
        _mixing,
    ),
    UpdateCheck(
        "update-caches",
        "the first request after an update has 0 cached tokens",
        Promise.NEVER_STALE,
        "a tier of the cache that Verify does not reset: look for --kv-transfer-config in spec.engine.args",
        nothing_cached,
        without_cache,
    ),
    UpdateCheck(
        "update-answers",
        "the same weights answer the probe as before the update",
        Promise.NEVER_STALE,
        "what is loaded into a running engine differs from what it loads at start: report it with this file",
        answers_as_before,
        _unfinished,
    ),
)
