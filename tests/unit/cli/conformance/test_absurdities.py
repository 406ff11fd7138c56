"""Values that no program writes, at every place of an engine's answers: none of them ends a run before its report."""

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rollfleet_cli.conformance.checks.catalogue import ENGINE_CHECKS
from rollfleet_cli.conformance.checks.check import Check
from rollfleet_cli.conformance.checks.update import version_of
from rollfleet_cli.conformance.checks.wire import Exchange, get
from rollfleet_protocol.refusals import WEIGHT_VERSION_HEADER
from tests.support.honest_engine import VERSION, HonestEngine

# What no honest engine says, put at each place of what one says; numbers that no float holds, and depth, as text.
ABSURD = (None, True, -1, "x", [], {}, [None], ["a"] * 4, [[1] * 5] * 4, {"a": 1}, 1e308, "@HUGE", ["@HUGE"] * 8)
ABSURD_TEXTS = ("@INFINITE", "@NAN", "@LONG", "@DEEP")
AS_TEXT = {"HUGE": "1" + "0" * 400, "INFINITE": "1e999", "NAN": "NaN", "LONG": "1" * 5000}
AS_TEXT["DEEP"] = "[" * 50_000 + "]" * 50_000


def places(document: Any, before: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Ways to every value; of a list to its first two."""
    yield before
    inner = document.items() if isinstance(document, dict) else ()
    for key, value in enumerate(document[:2]) if isinstance(document, list) else inner:
        yield from places(value, (*before, key))


def absurd(place: tuple[str | int, ...], value: Any) -> Callable[[Exchange], Exchange]:
    """That value there, in every answer that has such a place."""

    def lie(exchange: Exchange) -> Exchange:
        document = exchange.json
        if place not in set(places(document)):
            return exchange
        changed = [document]
        inner: Any = changed
        for step in (0, *place)[:-1]:
            inner = inner[step]
        inner[(0, *place)[-1]] = value
        content = json.dumps(changed[0])
        for name, words in AS_TEXT.items():
            content = content.replace(f'"@{name}"', words)
        return replace(exchange, body=content.encode())

    return lie


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.id)
def test_nothing_absurd_ends_a_check(check: Check) -> None:
    """It may be found or not matter; what it may not do is to end the run, and with it the report."""
    found: set[tuple[str | int, ...]] = set()

    def note(exchange: Exchange) -> Exchange:
        found.update(places(exchange.json))
        return exchange

    HonestEngine(note).drive(check)
    for place in found:
        for value in (*ABSURD, *ABSURD_TEXTS):
            HonestEngine(absurd(place, value)).drive(check)


@pytest.mark.parametrize("shape", ["(1e999,)", "(" * 500, "{}", "(1,) if 1 else 2"])
def test_no_array_ends_a_check(shape: str) -> None:
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".encode()
    file = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head
    lie = absurd(("choices", 0, "routed_experts"), b64encode(file).decode())
    assert HonestEngine(lie).drive(next(check for check in ENGINE_CHECKS if check.id == "routed-experts"))


def test_a_version_of_thousands_of_digits_is_none() -> None:
    call = get("/v1/models")
    assert version_of(Exchange(call, 200, ((WEIGHT_VERSION_HEADER, "9" * 5000),))) is None
    assert version_of(Exchange(call, 200, ((WEIGHT_VERSION_HEADER, str(VERSION)),))) == VERSION
