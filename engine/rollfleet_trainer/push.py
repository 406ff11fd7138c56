"""One push to all engines of an update: vLLM's four calls, fanned out, while this process is the sender.

The engines' doors open a moment after the operator has told that all are ready: the first call waits for that.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rollfleet_protocol.refusals import RefusalReason
from rollfleet_trainer.errors import GuardRefusedError, NotPossible, TrainerError
from rollfleet_trainer.fan_out import FanOut, SyncClient, Target, group_size
from rollfleet_trainer.looks import Seat
from rollfleet_trainer.said import Said, said
from rollfleet_trainer.taken import Forms, fits, listed_forms

if TYPE_CHECKING:
    from rollfleet_trainer.sources import DigestedSource, Given

logger = logging.getLogger("rollfleet.trainer")

DOORS_S = 15.0  # the operator's Transfer goes out as soon as the status that we see is written
FIRST_LOOK_S, LONGEST_LOOK_S = 0.02, 0.25
WATCH_S = 0.5  # between looks whether this process may still send
PARTING_S = 5.0  # for guards to say themselves that the attempt has ended


def group_name(holder: str, seats: Sequence[Seat]) -> str:
    """The group epoch: members and trainer by their processes. The same group may keep its communicator."""
    members = "\n".join(f"{seat.incarnation} {seat.rank_offset} {seat.world_size}" for seat in seats)
    return f"{holder}:{hashlib.sha256(members.encode()).hexdigest()[:16]}"[-256:]


class Door:
    """The four calls of one engine, over the pushes of one group.

    A version's tensors may come in several parts: a sender starts and finishes each, the engine hears of one start and
    one finish.
    """

    def __init__(self, guard: SyncClient) -> None:
        self._guard = guard
        self._push: Push | None = None
        self._is_open = self._has_started = False

    def enter(self, push: Push) -> None:
        """From here on calls belong to this push."""
        self._push, self._is_open, self._has_started = push, False, False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Phase 1."""
        self._call(lambda: self._guard.init_weight_transfer_engine(init_info))

    def start_weight_update(self, tensors: dict[str, Any] | None = None, *, whole: bool = True) -> None:
        """Phase 2, once. tensors: of this part, where the push does not know those of all."""
        if not self._has_started:
            known, is_all = self._of.known(tensors, whole=whole)
            self._call(lambda: self._guard.start_weight_update(known, whole=is_all))
            self._has_started = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Phase 3, as often as there are parts."""
        self._call(lambda: self._guard.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None, digest: str | None = None) -> None:
        """Phase 4, after the last part."""
        if self._of.more_follows:
            return
        self._of.finishing = True
        self._call(lambda: self._guard.finish_weight_update(weight_version, digest))

    def abort_weight_update(self, reason: str) -> None:
        """Say why no more comes; at once, whoever is the sender by now: a guard takes it from its own only."""
        self._guard.abort_weight_update(reason)

    @property
    def _of(self) -> Push:
        if self._push is None:
            raise NotPossible("there is no push: begin one")
        return self._push

    def _call(self, call: Callable[[], None]) -> None:
        ends, pause_s = time.monotonic() + DOORS_S, FIRST_LOOK_S
        while True:
            self._of.check()
            try:
                call()
            except GuardRefusedError as error:
                early = error.reason is RefusalReason.FORBIDDEN and not self._is_open
                if not early or time.monotonic() >= ends:
                    raise
            else:
                self._is_open = True
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)


class Push:
    """Keeps vLLM's VLLMWeightSyncClient (0.27.1: four methods, by structure) towards all engines of one attempt.

    Calls block until every engine has answered, and raise TransferError with the words of all that failed, each with
    its pod and phase; SenderLost and Superseded where this process must not send any more.

    `cut` ends the calls that run. It is called where this process must not send any more and engines still have not
    answered: nobody waits for one whose node is gone until a deadline that was the attempt's before.
    """

    def __init__(
        self,
        version: int,
        seats: Sequence[Seat],
        doors: Sequence[Door],
        group: str,
        may_send: Callable[[], None],
        cut: Callable[[], None] | None = None,
        address: Callable[[], str] | None = None,
    ) -> None:
        self.version = version
        self.group = group  # changes with every process that takes part
        self.targets = tuple(seats)  # engines in the order of their ranks; the trainer is rank 0
        self.more_follows = False  # parts: a finish before the last one is none
        self.finishing = False  # the last phase has been called somewhere
        self.finished = False  # at all engines
        self._coming: Said | None = None  # all tensors, as update_weights tells them, where they are known
        self._sources: list[Said | None] = []  # of each `source`, what it tells of itself
        self.sent_bytes = 0
        self._may_send = may_send
        self._address = address
        self._digest: str | None = None
        self.digest = ""  # that finish_weight_update told
        self.doors = tuple(
            Target(door, seat.rank_offset, seat.world_size) for door, seat in zip(doors, seats, strict=True)
        )
        self._fan = FanOut(self.doors)
        self._closed = threading.Event()
        for door in doors:
            door.enter(self)
        if cut is not None:
            threading.Thread(target=self._watch, args=(cut,), name="rollfleet-push-watch", daemon=True).start()

    def _watch(self, cut: Callable[[], None]) -> None:
        while not self._closed.wait(WATCH_S):
            try:
                self.check()
            except Exception:  # noqa: BLE001 - whatever ended the update: the caller's own by `stop`, too
                if not self._closed.wait(PARTING_S) and not self.finished:
                    cut()
                return

    @property
    def world_size(self) -> int:
        """Ranks of trainer and engines together."""
        return group_size(self.doors)

    @property
    def address(self) -> str:
        """This process's, as engines reach it, for a sender that they connect to: see RolloutFleet's `address`."""
        if self._address is None:
            raise NotPossible("this push knows no address of its own: give the sender one")
        return self._address()

    @property
    def as_target(self) -> Target:
        """All engines as one, for a sender of this package: `GlooSender([u.as_target], u.address, group=u.group)`."""
        return Target(self, 1, self.world_size - 1)

    def check(self) -> None:
        """Raise where this process must not send any more."""
        self._may_send()

    def took(self, nbytes: int) -> None:
        """A tensor goes out."""
        self.check()
        self.sent_bytes += nbytes

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Phase 1. rank_offset and world_size are each engine's own where the info names them."""
        size = self.world_size

        def init(target: Target) -> None:
            own = {"rank_offset": target.rank_offset, "world_size": size}
            target.client.init_weight_transfer_engine(
                init_info | {name: value for name, value in own.items() if name in init_info}
            )

        self._fan.all(init)

    def start_weight_update(self, tensors: dict[str, Any] | None = None, *, whole: bool = True) -> None:
        """Phase 2. tensors: all that come, as update_weights tells them; not `whole`: those that come first.

        What does not fit the model is refused while the engines still hold what they held.
        """
        told = None if tensors is None else said(tensors)
        self._fan.all(lambda target: target.client.start_weight_update(told, whole=whole))

    def announce(self, forms: Forms) -> None:
        """These come, and no others: engines hear of them when the update starts, whatever the caller says then."""
        coming = listed_forms(forms)
        self._coming = coming if fits(coming) else None
        if self._coming is None:
            logger.warning("%d tensors are more than one call can announce: they are judged as they come", len(forms))

    def known(self, tensors: dict[str, Any] | None, *, whole: bool) -> tuple[dict[str, Any] | None, bool]:
        """Which tensors come, as far as it is known when the update starts, and whether they are all.

        What was announced; else `tensors` and `whole`, as whoever starts it says; else what the one source told.
        """
        if self._coming is not None:
            return self._coming, True
        if tensors is not None:
            return tensors, whole and not self.more_follows
        told = self._sources[0] if len(self._sources) == 1 else None
        return told, told is not None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Phase 3: blocks while the trainer sends, so run it beside that where the backend is a collective."""
        told = Said(update_info)
        self._fan.all(lambda target: target.client.update_weights(told))

    def finish_weight_update(self, weight_version: str | None = None, digest: str | None = None) -> None:
        """Phase 4. The label is this version, the digest that of the newest whole pass of `source`, unless given."""
        label, told = weight_version or str(self.version), digest or self._digest
        self._fan.all(lambda target: target.client.finish_weight_update(label, told))
        self.digest = told or ""
        self.finished = True

    def abort_weight_update(self, reason: str) -> None:
        """Say to all engines why no more comes. One that cannot be told, or has ended the transfer, is left alone."""
        for call in self._fan.begin(lambda target: target.client.abort_weight_update(reason)):
            if (error := call.exception()) is not None and not isinstance(error, TrainerError):
                raise error

    def source(self, model: Given) -> DigestedSource:
        """vLLM's WeightSource of a module, or around another one, which digests what is sent as it is gone through.

        Without it engines can only compare among themselves: status.digestSource EnginesOnly.
        """
        from rollfleet_trainer.sources import DigestedSource  # noqa: PLC0415 - needs torch

        place = len(self._sources)
        self._sources.append(None)

        def coming(forms: Forms) -> None:
            listed = listed_forms(forms)
            self._sources[place] = listed if fits(listed) else None

        return DigestedSource(model, self._saw, self.took, coming)

    def _saw(self, digest: str) -> None:
        self._digest = digest

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        self._fan.close()
