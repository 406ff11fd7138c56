"""A call that may never come back, and that nothing can end: made in a thread that others need not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Aside(Generic[_T]):
    """Begins the call at once, in a daemon thread. `ended` is called by that thread when the call has come back.

    Who gives the call up leaves its thread. What it returns after that is given to `late`, by that thread.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[], _T],
        *,
        late: Callable[[_T], object] | None = None,
        ended: Callable[[], object] | None = None,
    ) -> None:
        self._outcome: tuple[_T, None] | tuple[None, BaseException] | None = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._given_up = False
        threading.Thread(target=self._run, args=(call, late, ended), name=name, daemon=True).start()

    def _run(
        self,
        call: Callable[[], _T],
        late: Callable[[_T], object] | None,
        ended: Callable[[], object] | None,
    ) -> None:
        try:
            try:
                self._outcome = (call(), None)
            except BaseException as error:  # noqa: BLE001 - carried over to who waits, who raises it again
                self._outcome = (None, error)
            with self._lock:
                self._done.set()
                nobody = self._given_up
            if nobody:
                self._drop(late)
        finally:
            if ended is not None:
                ended()

    def _drop(self, late: Callable[[_T], object] | None) -> None:
        outcome, self._outcome = self._outcome, None
        if late is not None and outcome is not None and outcome[1] is None:
            late(outcome[0])

    def done(self, seconds: float) -> bool:
        """Whether it has come back, waited for up to so long."""
        return self._done.wait(max(0.0, seconds))

    def give_up(self) -> bool:
        """Wait no longer. False: it has come back, and its result is there to be taken."""
        with self._lock:
            self._given_up = not self._done.is_set()
            return self._given_up

    def result(self) -> _T:
        """What a call that is done returned, or raised. Once: nothing here holds on to it afterwards."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            raise RuntimeError("the call has not come back, or its result was taken")
        result, error = outcome
        if error is None:
            return result  # type: ignore[return-value]
        try:
            raise error
        finally:
            del error, outcome  # the traceback holds this frame: what the call held would outlive it
