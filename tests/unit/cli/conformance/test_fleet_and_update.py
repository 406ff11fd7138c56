"""What engines must have in common, and what an update under load must show: each way in which it may be otherwise."""

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from rollfleet_cli.conformance.checks import fleet, update
from rollfleet_cli.conformance.checks.check import Held, Member
from rollfleet_cli.conformance.checks.update import ASK_FOR_DETAILS, Cached, Moved
from rollfleet_cli.conformance.checks.wire import Exchange, post
from rollfleet_cli.conformance.updating import KEPT_BYTES, kept
from rollfleet_protocol.refusals import SPANS_HEADER, WEIGHT_VERSION_HEADER, ClosedReason, RefusalReason
from rollfleet_protocol.state import Gate, Host, ProbeReport, Weights, WeightsState
from tests.support.honest_engine import STATE, refuse

ALLOWED = Decimal("0.001")
CALL = post("/v1/completions", {})
OLD, NEW = 7, 8
FLEET_CHECKS = {check.id: check for check in fleet.CHECKS}
UPDATE_CHECKS = {check.id: check for check in update.CHECKS}


def member(pod: str, version: int = OLD, digest: str | None = "sha256:d", first: float = -1.0, **facts: Any) -> Member:
    weights = Weights(state=WeightsState.VERIFIED, version=version, digest=digest)
    report = ProbeReport(
        incarnation="i",
        epoch=4,
        gate=Gate.OPEN,
        weights=weights,
        tokens=(1, 2, 3),
        by_rank=((first, -2.0),),
        seconds=0.1,
    )
    state = STATE.model_copy(update={"weights": weights, "facts": STATE.facts.model_copy(update=facts)})
    return Member(pod, state, report)


HELD = Held(OLD, "sha256:d")


def test_under_load_no_engine_fills_the_memory_of_who_asks_it() -> None:
    told = ((WEIGHT_VERSION_HEADER, str(NEW)),)
    long = Exchange(CALL, 200, told, b"x" * (8 << 20), began=1.0, ended=2.0)
    assert kept(long) == Exchange(CALL, 200, told, began=1.0, ended=2.0)
    assert update.version_of(kept(long)) == NEW
    assert len(kept(replace(long, status=500)).body) == KEPT_BYTES
    closed = refuse(CALL, 503, RefusalReason.CLOSED, closed_reason=ClosedReason.UPDATING)
    assert kept(closed) == closed, "a refusal of a guard's is kept whole"


ALIKE = (member("a"), member("b"))


@pytest.mark.parametrize("name", FLEET_CHECKS)
def test_engines_that_are_alike_pass(name: str) -> None:
    assert FLEET_CHECKS[name].judge(ALIKE, HELD, ALLOWED) == ()


NOT_ALIKE: dict[str, list[tuple[tuple[Member, ...], Held | None]]] = {
    "same-weights": [
        ((member("a"), member("b", 6)), HELD),
        ((member("a"), member("b", digest="sha256:x")), HELD),
        ((member("a"), member("b", digest=None)), HELD),
        ((member("a"), member("b", digest="sha256:x")), Held(OLD, None)),
        (ALIKE, None),
    ],
    "same-answers": [
        ((member("a"), member("b", first=-1.1)), HELD),
        ((member("a"), Member("b", STATE, None, "silent")), HELD),
        ((member("a", first=float("nan")), member("b")), HELD),
    ],
    "same-releases": [
        ((member("a"), member("b", engine_version="0.27.1")), HELD),
        ((member("a"), member("b", guard_version="0.2.0")), HELD),
        ((member("a"), member("b", host=Host(software={"CANN": "9.0.0"}))), HELD),
    ],
}


@pytest.mark.parametrize(("name", "case"), [(name, n) for name, cases in NOT_ALIKE.items() for n in range(len(cases))])
def test_engines_that_differ_are_named(name: str, case: int) -> None:
    members, held = NOT_ALIKE[name][case]
    assert FLEET_CHECKS[name].judge(members, held, ALLOWED)


def answer(version: int | None, began: float, *, cached: int | None = None, **changes: Any) -> Exchange:
    usage: dict[str, Any] = {"completion_tokens": 1}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    document = {"choices": [{"finish_reason": "length"}], "usage": usage}
    told = () if version is None else ((WEIGHT_VERSION_HEADER, str(version)),)
    return replace(Exchange(CALL, 200, told, json.dumps(document).encode(), began=began, ended=began + 0.5), **changes)


def null_details(version: int, began: float) -> Exchange:
    found = answer(version, began)
    document = json.loads(found.body)
    document["usage"]["prompt_tokens_details"] = None
    return replace(found, body=json.dumps(document).encode())


def closed(began: float) -> Exchange:
    refused = refuse(CALL, 503, RefusalReason.CLOSED, closed_reason=ClosedReason.UPDATING)
    return replace(refused, began=began, ended=began)


LOAD = (("a", answer(OLD, 1)), ("b", answer(OLD, 1.2)), ("a", closed(2)), ("a", answer(NEW, 3)), ("b", answer(NEW, 3)))
CACHED = (Cached("a", answer(OLD, 0, cached=256), answer(NEW, 4, cached=0), answer(NEW, 5, cached=256)),)
GOOD = Moved(
    before=OLD,
    wanted=NEW,
    outcome="",
    held=Held(NEW, "sha256:d"),
    old_digest="sha256:d",
    was=ALIKE,
    members=(member("a", NEW), member("b", NEW)),
    load=LOAD,
    cached=CACHED,
    allowed=ALLOWED,
)


@pytest.mark.parametrize("name", UPDATE_CHECKS)
def test_an_update_that_keeps_the_promises_passes(name: str) -> None:
    assert UPDATE_CHECKS[name].unless(GOOD) == ""
    assert UPDATE_CHECKS[name].judge(GOOD) == ()


def also(*entries: tuple[str, Exchange]) -> Moved:
    return replace(GOOD, load=(*LOAD, *entries))


def first_after(exchange: Exchange) -> Moved:
    return replace(GOOD, cached=(replace(CACHED[0], first=exchange),))


BROKEN: dict[str, dict[str, Moved]] = {
    "update-active": {
        "failed": replace(GOOD, outcome="the update failed: CoverageFailed"),
        "not committed": replace(GOOD, held=Held(OLD, "sha256:d")),
        "nothing committed": replace(GOOD, held=None),
        "other bytes": replace(GOOD, held=Held(NEW, "sha256:x"), members=(member("a", NEW, "sha256:x"),)),
        "one behind": replace(GOOD, members=(member("a", NEW), member("b", OLD))),
    },
    "update-atomic": {
        "old after new": also(("b", answer(OLD, 4))),
        "of neither": also(("b", answer(9, 4))),
        "of none": also(("b", answer(None, 4))),
        "of both": also(("b", answer(NEW, 4, headers=((WEIGHT_VERSION_HEADER, "8"), (SPANS_HEADER, "[]"))))),
        "an error": also(("b", Exchange(CALL, 500, began=4, ended=4))),
        "another's 503": also(("b", Exchange(CALL, 503, body=b"{}", began=4, ended=4))),
        "no answer": also(("b", Exchange(CALL, error="reset", began=4, ended=4))),
        "no load": replace(GOOD, load=()),
        "never the new one": replace(GOOD, load=LOAD[:3]),
    },
    "update-caches": {
        "old blocks": first_after(answer(NEW, 4, cached=128)),
        "of the old version": first_after(answer(OLD, 4, cached=0)),
        "not told": first_after(answer(NEW, 4)),
        "nothing cached": replace(GOOD, cached=(replace(CACHED[0], again=answer(NEW, 5, cached=0)),)),
        "nothing cached, as 0.23 says it": replace(GOOD, cached=(replace(CACHED[0], again=null_details(NEW, 5)),)),
    },
    "update-answers": {
        "otherwise": replace(GOOD, members=(member("a", NEW, first=-3.0), member("b", NEW))),
        "silent": replace(GOOD, members=(member("a", NEW), Member("b", STATE, None, "closed"))),
    },
}


def test_null_details_are_none_cached() -> None:
    """As vLLM 0.23 says it."""
    assert UPDATE_CHECKS["update-caches"].judge(first_after(null_details(NEW, 4))) == ()


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in BROKEN.items() for case in cases])
def test_an_update_that_breaks_one_fails(name: str, case: str) -> None:
    assert UPDATE_CHECKS[name].judge(BROKEN[name][case])


@pytest.mark.parametrize(
    ("name", "moved", "words"),
    [
        ("update-atomic", replace(GOOD, mixes="spec.strategy is Rolling"), "Rolling"),
        ("update-atomic", replace(GOOD, outcome="failed"), "did not come to its end"),
        ("update-answers", replace(GOOD, outcome="failed"), "did not come to its end"),
        ("update-caches", replace(GOOD, outcome="failed"), "did not come to its end"),
        ("update-caches", replace(GOOD, cached=(replace(CACHED[0], warm=answer(OLD, 0)),)), ASK_FOR_DETAILS),
        (
            "update-caches",
            replace(GOOD, cached=(replace(CACHED[0], warm=answer(OLD, 0, cached=0)),)),
            "prefix caching is off",
        ),
    ],
)
def test_what_says_nothing_is_skipped(name: str, moved: Moved, words: str) -> None:
    assert words in UPDATE_CHECKS[name].unless(moved)
