"""Who of several operators acts: the real judgement of a Lease and its real times, over an API server that fails.

A candidate looks, takes, renews and loses as the runtime's election does. Its process may stand still at any moment (a
stopped process, a frozen machine): then it learns late that its term is over, and does what it was about to do.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rollfleet_operator.clients.errors import Conflict, NotLeading, RollfleetError
from rollfleet_operator.core.leases import PERIOD_S, RENEW_DEADLINE_S, LeaseRecord, Rival, held_by
from rollfleet_operator.runtime.election import JITTER, RETRY_S
from tests.model.api_server import ApiServer
from tests.model.clock import Clock


@dataclass
class Lease:
    """The object."""

    record: LeaseRecord = field(default_factory=LeaseRecord)
    version: int = 0


class Candidate:
    """One process. `later` calls back only while it lives, and not while it stands still."""

    def __init__(
        self,
        identity: str,
        drift: float,
        clock: Clock,
        rng: random.Random,
        api: ApiServer,
        lease: Lease,
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.on_term: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self.in_term = False
        self._identity = identity
        self._drift = drift
        self._clock = clock
        self._rng = rng
        self._api = api
        self._lease = lease
        self._later = later
        self._rival = Rival()
        self._seen = Lease()
        self._leads_until = 0.0
        self._later(0.0, self._look)

    def _now(self) -> float:
        return self._clock.time * self._drift  # its own monotonic clock

    def leads(self) -> bool:
        """Whether it may act, by its own clock."""
        return self.in_term and self._now() < self._leads_until

    def demand(self) -> None:
        """At the last moment before each write and each command."""
        if not self.leads():
            raise NotLeading("this process does not lead (any more)")

    def _read(self) -> None:
        self._api.demand_up()
        self._seen = Lease(self._lease.record, self._lease.version)
        self._rival.saw(self._seen.record, self._now())

    def _look(self) -> None:
        """One who waits."""
        if self.in_term:
            return
        wait_s = PERIOD_S * self._rng.uniform(1 - JITTER, 1 + JITTER)
        try:
            self._read()
            free_in_s = self._rival.free_in(self._identity, self._now())
            if free_in_s <= 0 and self._write():
                self.in_term = True
                self._later(self._pause(), self._renew)
                self._watch_end()
                self.on_term()
                return
            wait_s = min(wait_s, max(free_in_s, RETRY_S))
        except RollfleetError:
            wait_s = min(wait_s, RETRY_S * 2)
        self._later(wait_s, self._look)

    def _pause(self) -> float:
        return PERIOD_S * self._rng.uniform(1 - JITTER, 1.0)

    def _renew(self) -> None:
        if not self.in_term:
            return
        try:
            if not self._write():
                self._read()
                if self._seen.record.holder != self._identity:
                    self._end()
                    return
                self._later(RETRY_S, self._renew)
                return
        except RollfleetError:
            self._later(RETRY_S, self._renew)
            return
        self._watch_end()
        self._later(self._pause(), self._renew)

    def _write(self) -> bool:
        """Take or renew it over exactly what was read; the time counts from before the request."""
        began_s = self._now()
        record = held_by(self._identity, self._seen.record, self._clock.now())
        try:
            self._api.write_lease(lambda: self._put(record))
        except Conflict:
            return False
        self._seen = Lease(self._lease.record, self._lease.version)
        self._leads_until = began_s + RENEW_DEADLINE_S
        return True

    def _put(self, record: LeaseRecord) -> None:
        if self._lease.version != self._seen.version:
            raise Conflict("somebody else wrote first")
        self._lease.record, self._lease.version = record, self._lease.version + 1

    def _watch_end(self) -> None:
        until = self._leads_until

        def end() -> None:
            if self.in_term and self._leads_until == until:
                self._end()

        self._later((until - self._now()) / self._drift, end)

    def _end(self) -> None:
        """The term is over, not the process."""
        self.in_term, self._leads_until = False, 0.0
        self.on_end()
        self._later(RETRY_S, self._look)
