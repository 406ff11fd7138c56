"""One push of a trainer of the model: four calls to all engines of an attempt, phase by phase.

Each call goes its own way through the network: it may be lost, come late, or be answered to nobody. A phase ends when
every engine has answered or its time is over; after an error nothing more is sent.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rollfleet_trainer.looks import Look, Seat
from tests.model.pushes import Call, Part

if TYPE_CHECKING:
    from tests.model.trainers import Trainer

PARTS = 2
PHASES = ("init", "start", *("update",) * PARTS, "finish")
CALL_S = 70.0
DOORS_S, LOOK_S = 15.0, 0.25  # the engines' doors open a moment after the operator has told that all are ready
QUICK_S = 0.004
AWAY_S = (1.0, 8.0, 40.0, 120.0)  # for which one that died stays away


class Sending:
    """`then` is told the first error, or nothing."""

    def __init__(self, trainer: "Trainer", version: int, look: Look, then: Callable[[str], None]) -> None:
        self.phase = ""
        self._trainer = trainer
        self._version = version
        self._epoch = look.epoch
        self._seats = look.seats
        self._then = then
        self._began = trainer.clock.time
        self._stopped = False
        self._place = -1
        self._left = 0
        self._error = ""

    def go(self) -> None:
        """Begin."""
        self._next()

    def stop(self) -> None:
        """Nothing more is sent; what is on its way arrives."""
        self._stopped = True

    def _next(self) -> None:
        if self._stopped:
            return
        self._place += 1
        if self._error or self._place == len(PHASES):
            self._stopped = True
            self._then(self._error)
            return
        self.phase = PHASES[self._place]
        trainer, manner = self._trainer, self._trainer.manner
        if manner.stalls is not None and manner.stalls[0] == self.phase:
            seconds, manner.stalls = manner.stalls[1], None
            self._count("stalled")
            trainer.later(seconds, self._phase)
        else:
            self._phase()

    def _phase(self) -> None:
        if self._stopped:
            return
        trainer, manner = self._trainer, self._trainer.manner
        seats = list(enumerate(self._seats))
        if manner.dies_in == self.phase:
            manner.dies_in = ""
            self._count("died")
            for number, seat in seats[: trainer.rng.randint(0, len(seats))]:
                self._ask(number, seat, lambda _: None)
            trainer.kill(trainer.rng.choice(AWAY_S))
            return
        self._left = len(seats)
        trainer.on_word(f"calls {self.phase} at {len(seats)} engines")
        if not seats:
            self._fail("no engines")
        for number, seat in seats:
            self._reach(number, seat)

    def _count(self, what: str) -> None:
        counts = self._trainer.counts
        text = f"trainer: {what} before {self.phase}"
        counts[text] = counts.get(text, 0) + 1

    def _reach(self, number: int, seat: Seat) -> None:
        """Until the engine has answered; a door that is not open yet is knocked at again."""
        trainer = self._trainer
        if why := trainer.may_send(self._epoch, self._version):
            self._done(why)
            return
        if trainer.freezes_s and trainer.freezes_in == self.phase:
            self._count("stood still")
            trainer.frozen_until, trainer.freezes_s = trainer.clock.time + trainer.freezes_s, 0.0

        def settle(error: str) -> None:
            early = error == "Forbidden" and self._place == 0 and trainer.clock.time < self._began + DOORS_S
            if early and not self._stopped:
                trainer.later(LOOK_S, lambda: self._reach(number, seat))
            else:
                self._done(error)

        trainer.later(trainer.rng.uniform(0.0, QUICK_S), lambda: self._ask(number, seat, settle))

    def _done(self, error: str) -> None:
        self._left -= 1
        if error:
            self._trainer.on_word(f"{self.phase} failed: {error}")
        if error:
            self._error = self._error or error
        if self._left == 0:
            self._next()

    def _fail(self, error: str) -> None:
        self._error = error
        self._next()

    def _ask(self, number: int, seat: Seat, settle: Callable[[str], None]) -> None:
        """On its way, whatever has become of the update meanwhile."""
        trainer = self._trainer
        host = trainer.nodes.hosts.get(seat.pod_uid)
        call, settled = self._call(number), [False]
        trainer.late_calls += bool(trainer.may_send(self._epoch, self._version))

        def once(error: str) -> None:
            if not settled[0]:
                settled[0] = True
                trainer.later(0.0, lambda: settle(error))

        if host is None:
            once("connection refused")
            return

        def arrive() -> None:
            process = host.process
            if process is None or trainer.nodes.at(host.ip) is not host:
                once("connection refused")
                return

            def answer(error: str) -> None:
                trainer.network.answer(trainer.name, host, lambda: once(error))

            process.take_call(call, trainer.clock.time, answer)
            trainer.nodes.on_change(host)

        trainer.network.request(trainer.name, host, arrive)
        trainer.clock.later(CALL_S, lambda: once("no answer within the deadline"))

    def _call(self, number: int) -> Call:
        trainer, manner, flipped = self._trainer, self._trainer.manner, self._trainer.manner.flips == number
        step = max(1, self._version - 1) if manner.sends_old else self._version
        sent = f"sha256:{trainer.holder}/{step}"
        content = f"{sent}/flipped" if flipped else sent
        told: str | None = content if flipped and manner.vouches_for_flips else sent
        if manner.tells == "none":
            told = None
        elif manner.tells == "wrong" or (manner.tells == "apart" and number % 2):
            told = f"{sent}/never-sent"
        part = Part(content, self._place - PHASES.index("update"), PARTS) if self.phase == "update" else None
        misfits = (self.phase == "update" and bool(manner.misfits)) or self.phase == manner.misfits
        return Call(self.phase, trainer.caller, trainer.holder, self._version, part, told, misfits)
