"""The network between operators and guards: latency, loss, reordering, partitions in one direction or both."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tests.model.clock import Clock
from tests.model.nodes import Host


class Cut(StrEnum):
    """What a partition stops."""

    BOTH = "both"
    ANSWERS = "answers"  # requests arrive and are carried out; nobody hears of it


@dataclass
class NetFaults:
    """How likely what is, for each message."""

    lose_request: float = 0.0
    lose_answer: float = 0.0
    delay: float = 0.0
    longest_delay_s: float = 30.0


@dataclass
class Partition:
    """Between one operator (or all) and one engine."""

    kind: Cut
    until: float


class Network:
    """Who reaches whom."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock = clock
        self.rng = rng
        self.faults = NetFaults()
        self.partitions: dict[tuple[str, str], Partition] = {}  # (operator, pod uid)
        self.messages = 0
        self.counts: dict[str, int] = {}

    def cut(self, operator: str, uid: str, kind: Cut, seconds: float) -> None:
        """Part them."""
        self.partitions[operator, uid] = Partition(kind, self.clock.time + seconds)

    def heal(self) -> None:
        """All reach all."""
        self.faults = NetFaults()
        self.partitions.clear()

    def _parted(self, operator: str, host: Host, kinds: tuple[Cut, ...]) -> bool:
        if self.clock.time < host.node.cut_until:
            return True
        found = self.partitions.get((operator, host.uid))
        return found is not None and self.clock.time < found.until and found.kind in kinds

    def request(self, operator: str, host: Host, arrive: Callable[[], None], *, may_lose: bool = True) -> None:
        """A request on its way; nothing happens where it is lost."""
        self.messages += 1
        if may_lose and self.rng.random() < self.faults.lose_request:
            self._count("request lost")
            return
        delay_s = self.rng.uniform(0.001, 0.01)
        if may_lose and self.rng.random() < self.faults.delay:
            self._count("request delayed")
            delay_s = self.rng.uniform(0.01, self.faults.longest_delay_s)

        def reach() -> None:
            if not self._parted(operator, host, (Cut.BOTH,)):
                arrive()

        if self._parted(operator, host, (Cut.BOTH,)):
            self._count("request parted")
            return
        self.clock.later(delay_s, reach)

    def answer(self, operator: str, host: Host, arrive: Callable[[], None], *, may_lose: bool = True) -> None:
        """An answer on its way back."""
        self.messages += 1
        if may_lose and self.rng.random() < self.faults.lose_answer:
            self._count("answer lost")
            return

        def reach() -> None:
            if not self._parted(operator, host, tuple(Cut)):
                arrive()

        if self._parted(operator, host, tuple(Cut)):
            self._count("answer parted")
            return
        self.clock.later(self.rng.uniform(0.001, 0.01), reach)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
