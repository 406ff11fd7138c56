"""Drives checks: carries their calls, keeps their deadlines, and tells a fault from an update that came between."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from rollfleet_cli.conformance.checks.check import Check, Fault, Member, Subject
from rollfleet_cli.conformance.checks.features import probe_call, report_of
from rollfleet_cli.conformance.checks.judging import closed_by, refusal_of, state_of
from rollfleet_cli.conformance.checks.wire import MOST_WORDS, Call, Exchange, Identity, Port, Together, get
from rollfleet_protocol.commands import LOOK_PATH
from rollfleet_protocol.refusals import RefusalReason
from rollfleet_protocol.state import EngineState, Gate
from rollfleet_protocol.words import fitted

TRIES = 3  # of a check that an update interrupts
BUSY_TRIES, BUSY_S = 20, 0.5  # of a probe that finds another one running
CHECK_S = 120.0  # of one check at one engine
OPENS_S = 60.0  # that an engine may be closed by an update before a check gives up on it
LOOK_EVERY_S = 0.5
# What judging data of others may raise. It is found by one engine's answer, so it is that engine's fault in the report:
# the other engines and checks go on, and the file shows what to correct here.
UNJUDGED = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


class Result(StrEnum):
    """What came of a check."""

    PASSED = "Passed"
    FAILED = "Failed"
    SKIPPED = "Skipped"


@dataclass(frozen=True)
class Verdict:
    """Of one check at one engine, or of the whole fleet."""

    check: str
    engine: str  # its pod; empty: all that were asked
    result: Result
    faults: tuple[Fault, ...] = ()
    skipped: str = ""  # why
    seconds: float = 0.0
    late: bool = False  # skipped for a reason that is not the spec's: the run is not complete
    of: int = 1  # engines that it speaks of


class Carrier(Protocol):
    """What takes calls to one engine."""

    async def carry(self, call: Call) -> Exchange:
        """The exchange; what goes wrong on the way is told in it."""
        ...


class InterruptedByUpdateError(Exception):
    """The engine was closed while a check asked it."""


class NoStateError(Exception):
    """The engine does not tell its state; the message is its own text."""


async def look(carrier: Carrier) -> EngineState:
    """The guard's state, for somebody who only looks."""
    answer = await carrier.carry(get(LOOK_PATH, port=Port.CONTROL, identity=Identity.OPERATOR))
    state = state_of(answer)
    if state is None:
        raise NoStateError(answer.told)
    return state


async def look_until_open(carrier: Carrier) -> EngineState:
    """The state once the gate is open, or as it is after OPENS_S."""
    ends = time.monotonic() + OPENS_S
    while True:
        state = await look(carrier)
        if state.gate is Gate.OPEN or time.monotonic() >= ends:
            return state
        await asyncio.sleep(LOOK_EVERY_S)


async def run_check(check: Check, carrier: Carrier, subject: Subject, within_s: float = CHECK_S) -> Verdict:
    """The check at this engine; done anew where an update of the fleet came between."""
    began = time.monotonic()
    verdict = Verdict(check.id, subject.pod, Result.SKIPPED, skipped=check.unless(subject))
    if not verdict.skipped:
        try:
            async with asyncio.timeout(within_s):
                verdict = await _judged(check, carrier, subject)
        except TimeoutError:
            faults = (Fault(f"it did not come to its end within {within_s:.0f} s"),)
            verdict = replace(verdict, result=Result.FAILED, faults=faults)
        except NoStateError as error:
            verdict = replace(verdict, result=Result.FAILED, faults=(Fault("it tells no state", str(error)),))
    return replace(verdict, seconds=time.monotonic() - began)


async def _judged(check: Check, carrier: Carrier, subject: Subject) -> Verdict:
    for _ in range(TRIES):
        seen = replace(subject, state=await look_until_open(carrier))
        try:
            faults = await _drive(check, carrier, seen)
        except InterruptedByUpdateError:
            continue
        if faults and _moved(seen.state, await look(carrier)):
            continue
        return Verdict(check.id, subject.pod, Result.FAILED if faults else Result.PASSED, faults)
    return Verdict(check.id, subject.pod, Result.SKIPPED, skipped=f"updates interrupted it {TRIES} times", late=True)


def _moved(before: EngineState, after: EngineState) -> bool:
    return (before.incarnation, before.epoch, before.weights, before.gate) != (
        after.incarnation,
        after.epoch,
        after.weights,
        after.gate,
    )


def judged(judge: Callable[[], tuple[Fault, ...]]) -> tuple[Fault, ...]:
    """What it finds; that it could not judge is a fault too."""
    try:
        return judge()
    except UNJUDGED as error:
        return (_unjudged(error),)


def _unjudged(error: BaseException) -> Fault:
    told = fitted(f"{type(error).__name__}: {error}", MOST_WORDS)
    return Fault("what it answered cannot be judged by this release: report it with this file", told)


async def _drive(check: Check, carrier: Carrier, subject: Subject) -> tuple[Fault, ...]:
    steps = check.run(subject)
    try:
        calls = next(steps)
        while True:
            exchanges = await _carry(carrier, calls)
            # What finds the gate closed was not judged by anybody: the engine is not what it was.
            if subject.state.gate is Gate.OPEN and any(closed_by(each) is not None for each in exchanges):
                raise InterruptedByUpdateError
            try:
                calls = steps.send(exchanges)
            except UNJUDGED as error:
                return (_unjudged(error),)
    except StopIteration as ended:
        faults: tuple[Fault, ...] = ended.value
        return faults
    finally:
        steps.close()


async def _carry(carrier: Carrier, calls: tuple[Call, ...]) -> tuple[Exchange, ...]:
    if isinstance(calls, Together):
        return tuple(await asyncio.gather(*(_patiently(carrier, call) for call in calls)))
    return tuple([await _patiently(carrier, call) for call in calls])


async def _patiently(carrier: Carrier, call: Call) -> Exchange:
    """Another probe may run: the operator's, or somebody's `rollfleet verify`."""
    for _ in range(BUSY_TRIES):
        exchange = await carrier.carry(call)
        found = refusal_of(exchange) if exchange.status == 429 else None
        if found is None or found.error.reason is not RefusalReason.BUSY:
            break
        await asyncio.sleep(BUSY_S)
    return exchange


async def member_of(carrier: Carrier, subject: Subject) -> Member:
    """What an engine says of itself, for the comparison of all; NoStateError where it says nothing."""
    state = await look_until_open(carrier)
    answer = await _patiently(carrier, probe_call(replace(subject, state=state)))
    report = report_of(answer)
    return Member(subject.pod, state, report, "" if report is not None else answer.told)
