"""One update from asking to Active, as the thread that sends goes through it.

After a failed attempt the operator makes another one where spec.onFailure says so, and waits, closed, for a sender that
offers the version: the same weights are sent again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rollfleet_trainer.background import Background
from rollfleet_trainer.control import Control
from rollfleet_trainer.errors import NotPossible, SenderLost, Superseded, TransferError, UpdateFailed
from rollfleet_trainer.looks import Asked, Look, Manifest, Serving, Standing
from rollfleet_trainer.push import Push
from rollfleet_trainer.ranks import Ranks, Word, lead
from rollfleet_trainer.sending import Line, key_of, require_sender
from rollfleet_trainer.taken import Forms, Taken
from rollfleet_trainer.updates import OnProgress, Progress, Update
from rollfleet_trainer.versions import Wish

if TYPE_CHECKING:
    from rollfleet_trainer.sources import Weighed, Weights

SLICE_S = 2.0  # between words to other ranks while nothing happens
SETTLE_S = 3.0  # after a failed send: for the operator to see by itself what its engines say
REPORT_S = 1.0  # between reports of bytes


@dataclass
class Run:
    """An update that is under way."""

    asked: Asked
    on_progress: OnProgress | None
    forms: Forms | None = None  # of what is sent, where they are known beforehand
    nbytes: int = 0  # that are to be sent, as far as that is known
    began_s: float = field(default_factory=time.monotonic)
    look: Look | None = None
    served: int = 0  # epoch of the attempt that was sent for last
    failed: TransferError | None = None  # why that did not come to its end
    digest: str = ""  # of what was sent, where all engines have said that they took it
    settles_s: float = 0.0
    withdrawn: bool = False
    reported: Progress | None = None
    reported_s: float = 0.0

    def report(self, sent_bytes: int = 0) -> None:
        """Tell the caller how far it is, where something has changed."""
        look, now = self.look, time.monotonic()
        if self.on_progress is None or look is None:
            return
        told = Progress(
            version=self.asked.version,
            phase=look.phase,
            attempt=look.attempt,
            done=look.done,
            total=look.total,
            sent_bytes=sent_bytes,
            total_bytes=self.nbytes if look.phase == "Transferring" else 0,
            seconds=0.0,  # no change by itself
            message=look.message,
        )
        if told == self.reported or (sent_bytes and now - self.reported_s < REPORT_S):
            return
        self.reported, self.reported_s = told, now
        self.on_progress(replace(told, seconds=now - self.began_s))


class Driver:
    """Goes through updates of one fleet, one after the other, on rank 0."""

    def __init__(
        self,
        background: Background,
        control: Control,
        ranks: Ranks,
        address: str | None,
        wait_s: float,
        part_bytes: int,
        asked: Callable[[int], None],
        require_copy: Callable[[str | None], None],
    ) -> None:
        """`asked` is told of each version that is asked for; `require_copy` raises where there is no such recovery."""
        self.control = control
        self._background = background
        self._ranks = ranks
        self._address = address
        self._wait_s = wait_s
        self._part_bytes = part_bytes
        self._asked = asked
        self._require_copy = require_copy
        self._line: Line | None = None
        self._nbytes = 0  # of the version that was sent last
        self._taken = Taken()
        self._run: Run | None = None

    def spec(self) -> Manifest:
        """RolloutEngine.spec as it is now."""
        return self._background.run(self.control.spec())

    def serves(self) -> Serving:
        """As Control.serves."""
        return self._background.run(self.control.serves())

    # --- update

    def update(self, weights: Weights, wish: Wish, on_progress: OnProgress | None) -> Update:
        """The whole of it; its end is told to all ranks."""
        return lead(self._ranks, lambda: self._ended(weights, wish, on_progress))

    def _ended(self, weights: Weights, wish: Wish, on_progress: OnProgress | None) -> Update:
        with self._ending():
            alone = self._ranks.size == 1
            forms = weights.require_sendable(alone=alone)
            self._taken.require_alike(forms)
            require_sender((self.spec().get("weightTransfer") or {}).get("backend") or "", self._ranks.size)
            run = self._ask(wish, on_progress)
            run.forms = forms
            if on_progress is not None:
                run.nbytes = weights.nbytes(alone=alone) or self._nbytes
            update = self._update(weights, run)
            self._taken.note(update.version, forms)
            return update

    def _update(self, weights: Weights, run: Run) -> Update:
        while True:
            look = self._next(run)
            self._ranks.tell(Word.WAIT, run.asked.version)
            if look.standing is Standing.ACTIVE:
                return self._updated(run)
            if look.error is not None:
                raise look.error from run.failed
            self._after_failure(run, look)
            if look.standing is Standing.READY and look.epoch != run.served:
                weights.require_another_pass()
                self._ranks.tell(Word.SEND)
                run.failed = self._send(run, look, weights)

    def _ask(self, wish: Wish, on_progress: OnProgress | None) -> Run:
        self._require_copy(wish.recovery)
        run = Run(self._background.run(self.control.ask(wish, self._wait_s)), on_progress)
        self._asked(run.asked.version)
        return run

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Whatever ends an update, its version is offered no more; where it is an error, with that."""
        message = ""
        try:
            yield
        except BaseException as error:
            message = _words(error)
            raise
        finally:
            self._background.run(self.control.end(message))

    def _next(self, run: Run) -> Look:
        """The next look, or the same one after a while."""
        look = self._background.run(self.control.next(run.look, SLICE_S))
        run.look = look
        run.report()
        return look

    def _after_failure(self, run: Run, look: Look) -> None:
        """What failed on our side only would last until the transfer's deadline: end it, and stand ready again."""
        if run.failed is None:
            return
        if look.epoch == run.served and not run.withdrawn and time.monotonic() >= run.settles_s:
            self._background.run(self.control.withdraw(str(run.failed)))
            run.withdrawn = True
        elif look.epoch != run.served and run.withdrawn:
            self._background.run(self.control.offer())
            run.withdrawn = False

    def _send(self, run: Run, look: Look, weights: Weights) -> TransferError | None:
        """Send for this attempt; what the engines did not take is returned, for the operator to judge."""
        passing = weights.go_through()
        push: Push | None = None
        run.served, run.digest = look.epoch, ""
        try:
            push = self._push(run.asked.version, look)
            if run.forms is not None:
                push.announce(run.forms)
            run.digest = self._required_line().send(push, passing, self._part_bytes, run.report)
            self._nbytes = push.sent_bytes
        except TransferError as error:
            self._go_on(passing)
            self._start_over()
            self._require_sender(look.epoch)
            # The last phase has its own judge: an engine that fails it is left out where enough others are left.
            run.settles_s = float("inf") if push is not None and push.finishing else time.monotonic() + SETTLE_S
            return error
        except BaseException as error:
            if push is not None:
                push.abort_weight_update(_words(error))
            self._go_on(passing)
            self._start_over()
            raise
        finally:
            if push is not None:
                push.close()
        return None

    def _require_sender(self, epoch: int) -> None:
        """What the engines say of an attempt that is not ours any more is not the cause."""
        try:
            self.control.may_send(epoch)
        except (SenderLost, Superseded):
            raise
        except TransferError:
            pass

    def _go_on(self, passing: Iterator[Weighed]) -> None:
        """The other ranks are in the middle of collectives that need this one."""
        if self._ranks.size > 1:
            for _ in passing:
                pass

    def _updated(self, run: Run) -> Update:
        """What the fleet serves. UpdateFailed where that is not what was sent: guards are believed by all others."""
        update = Update.of(self.control.weight_version, run.asked)
        if run.digest and update.digest and update.digest != run.digest:
            text = f"{run.asked.place}: the fleet serves {update.digest}, and this trainer sent {run.digest}"
            raise UpdateFailed("DigestDisagrees", f"{text}: send a higher version, and look at the engines' guards")
        return update

    # --- begin

    def begin(self, wish: Wish, on_progress: OnProgress | None) -> Push:
        """Until all engines wait for us."""
        try:
            return self._begin(self._ask(wish, on_progress))
        except BaseException as error:
            self._background.run(self.control.end(_words(error)))
            raise

    def _begin(self, run: Run) -> Push:
        while True:
            look = self._next(run)
            if look.standing is Standing.READY:
                run.served, self._run = look.epoch, run
                return self._push(run.asked.version, look)
            if look.error is not None:
                raise look.error
            if look.standing in (Standing.TAKEN, Standing.ACTIVE):
                raise NotPossible(f"{run.asked.place}: all engines hold it already")

    def finish(self, push: Push, error: BaseException | None) -> Update | None:
        """After the caller's block. None where it raised: that error is the one to tell."""
        run, self._run = self._run, None
        if run is None:
            return None
        if error is None and not push.finished:
            error = NotPossible(f"{run.asked.place}: the block ended without finish_weight_update")
            self._broken(push, error)
            raise error
        if error is not None:
            self._broken(push, error)
            return None
        push.close()
        run.digest = push.digest
        with self._ending():
            return self._outcome(run)

    def _broken(self, push: Push, error: BaseException) -> None:
        """Tell engines and operator why no more comes."""
        push.abort_weight_update(_words(error))
        push.close()
        self._start_over()
        self._background.run(self.control.end(_words(error)))

    def _outcome(self, run: Run) -> Update:
        while True:
            look = self._next(run)
            if look.standing is Standing.ACTIVE:
                return self._updated(run)
            if look.error is not None:
                raise look.error
            if look.epoch != run.served:
                raise TransferError(f"{run.asked.place}: the attempt failed, begin it again: {look.message}")

    # --- the way to the engines

    def _push(self, version: int, look: Look) -> Push:
        fleet = self._background.run(self.control.fleet())
        if self._line is not None and self._line.key != key_of(fleet, look.seats):
            self._drop_line()
        if self._line is None:
            tokens = self.control.tokens
            if tokens is None:
                raise NotPossible("there is no connection yet")
            self._line = Line(fleet, look.seats, tokens.bearer, self._address)
        return self._line.begin(version, lambda: self.control.may_send(look.epoch))

    def _required_line(self) -> Line:
        if self._line is None:
            raise NotPossible("there is no way to the engines")
        return self._line

    def _drop_line(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _start_over(self) -> None:
        """After a failure: tokens too, which engines refuse where the ServiceAccount was made again under its name."""
        self._drop_line()
        if self.control.tokens is not None:
            self.control.tokens.forget()

    def close(self) -> None:
        """Give everything back."""
        if self._background.is_closed:
            return
        try:
            self._background.run(self.control.close())
        finally:
            self._background.close()
            self._drop_line()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
