"""Who called the control port, for what, and what came of it: a line for each command, sums of what only repeats.

A stranger must not fill the log: refusals are told once a second with a count. Reads of the state, some per minute and
engine, are told when somebody begins to read and then as a sum. No line has a token, and none an unbounded word.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollfleet_engine.guard.answers import Scope
from rollfleet_engine.guard.identity import Caller
from rollfleet_engine.guard.log import GuardLog
from rollfleet_engine.guard.tallies import Tallies
from rollfleet_protocol.words import fitted

DENIALS_EVERY_S = 1.0
READS_EVERY_S = 300.0
MOST_READERS = 64
OPERATOR = "operator"  # the only one that commands
TRAINER = "trainer"  # of an armed push: native routes only
STATE, NATIVE, UNKNOWN = "state", "native", "unknown"
_LONGEST_WORD = 200
_LONGEST_MESSAGE = 500


@dataclass(frozen=True)
class Call:
    """One call on the control port, as far as it is known."""

    command: str  # of ours, or STATE, NATIVE, UNKNOWN
    outcome: str  # Accepted, Answered, Gone, or the reason of a refusal
    status: int | None = None  # None: the caller went away before there was an answer
    epoch: int | None = None  # as the command named them
    incarnation: str | None = None


class Audit:
    """Writes the lines and counts the calls. Belongs to one event loop."""

    def __init__(self, log: GuardLog, tallies: Tallies) -> None:
        self._log = log
        self._tallies = tallies
        self._denials = _Sum(DENIALS_EVERY_S, self._write_denial)
        self._readers: OrderedDict[tuple[Caller, str], _Sum] = OrderedDict()

    def called(self, scope: Scope, caller: Caller, call: Call, seconds: float, role: str = OPERATOR) -> None:
        """Somebody who may call did."""
        self._tallies.control[call.command, call.outcome] += 1
        if call.command == STATE and call.outcome == "Answered":
            self._read(scope, caller)
            return
        details: dict[str, Any] = {} if call.command not in (NATIVE, UNKNOWN) else {"path": _word(scope["path"])}
        self._log.write(
            "control",
            **_who(caller, role),
            peer=_peer(scope),
            command=call.command,
            epoch=call.epoch,
            incarnation=None if call.incarnation is None else _word(call.incarnation),
            outcome=call.outcome,
            status=call.status,
            milliseconds=round(1000 * seconds, 3),
            **details,
        )

    def denied(self, scope: Scope, call: Call, message: str) -> None:
        """Somebody who may not tried to."""
        self._tallies.control[call.command, call.outcome] += 1
        self._denials.add(
            {
                "peer": _peer(scope, port=False),
                "path": _word(scope["path"]),
                "status": call.status,
                "outcome": call.outcome,
                "message": fitted(message, _LONGEST_MESSAGE),
            }
        )

    def _read(self, scope: Scope, caller: Caller) -> None:
        reader = (caller, _peer(scope, port=False))
        found = self._readers.get(reader)
        if found is None:
            found = self._readers[reader] = _Sum(READS_EVERY_S, self._write_reads)
            if len(self._readers) > MOST_READERS:
                self._readers.popitem(last=False)[1].flush()
        found.add({**_who(caller), "peer": reader[1]})

    def _write_denial(self, details: dict[str, Any], more: int) -> None:
        others: dict[str, Any] = {"unreported": more} if more else {}
        self._log.write("control.denied", **details, **others)

    def _write_reads(self, details: dict[str, Any], more: int) -> None:
        self._log.write("control.reads", **details, count=more + 1)

    def close(self) -> None:
        """The process ends: say what was not said yet."""
        for each in (self._denials, *self._readers.values()):
            each.flush()


class _Sum:
    """The first of a kind is told at once, those within the next seconds together at their end."""

    def __init__(self, every_s: float, write: Callable[[dict[str, Any], int], None]) -> None:
        self._every_s = every_s
        self._write = write
        self._timer: asyncio.TimerHandle | None = None
        self._last: dict[str, Any] = {}
        self._count = 0

    def add(self, details: dict[str, Any]) -> None:
        """One more."""
        if self._timer is None:
            self._write(details, 0)
            self._begin()
        else:
            self._last = details
            self._count += 1

    def flush(self) -> None:
        """Tell the sum now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._count:
            count, self._count = self._count, 0
            self._write(self._last, count - 1)

    def _begin(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._end)

    def _end(self) -> None:
        again = self._count > 0
        self.flush()
        if again:  # a flood goes on: one line in each of these intervals
            self._begin()


def _who(caller: Caller, role: str = OPERATOR) -> dict[str, Any]:
    return {"caller": caller.subject, "uid": caller.uid, "role": role}


def _peer(scope: Scope, *, port: bool = True) -> str:
    peer = scope.get("client")
    if not peer:
        return ""
    host = f"[{peer[0]}]" if ":" in peer[0] else peer[0]
    return f"{host}:{peer[1]}" if port else str(peer[0])


def _word(text: str) -> str:
    return fitted(text, _LONGEST_WORD)
