"""An update whose bytes the caller sends: what `RolloutFleet.begin` gives."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from rollfleet_trainer.errors import NotPossible
from rollfleet_trainer.push import Push
from rollfleet_trainer.stops import Stop
from rollfleet_trainer.updates import OnProgress, Update
from rollfleet_trainer.versions import Wish

if TYPE_CHECKING:
    from rollfleet_trainer.fleet import RolloutFleet


class Beginning:
    """An update that was begun by `begin`: a context manager of either kind. `update` is set once it has ended well."""

    def __init__(self, fleet: RolloutFleet, wish: Wish, on_progress: OnProgress | None) -> None:
        self._fleet, self._wish, self._on_progress = fleet, wish, on_progress
        self._push: Push | None = None
        self._stop = Stop()
        self.update: Update | None = None

    def __enter__(self) -> Push:
        self._stop = Stop()
        return self._begun()

    def _begun(self) -> Push:
        driver = self._fleet._driver
        if driver is None:
            raise NotPossible("begin is for rank 0; the others only go through the weights with it")
        self._fleet._require_open()
        if not self._fleet._busy.acquire(blocking=False):
            raise NotPossible("this object is busy with an update or a publication: one at a time")
        try:
            self._fleet._heed(driver, self._stop)
            self._push = driver.begin(self._wish, self._on_progress)
        except BaseException:
            self._fleet._busy.release()
            raise
        return self._push

    def __exit__(self, _type: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        driver, push, self._push = self._fleet._driver, self._push, None
        if driver is None or push is None:
            return
        try:
            self.update = driver.finish(push, error)
        finally:
            self._fleet._busy.release()

    async def __aenter__(self) -> Push:
        self._stop = Stop()
        try:
            return await self._fleet._in_thread(self._begun, self._fleet._ending(self._stop))
        except asyncio.CancelledError as error:
            await self.__aexit__(type(error), error, None)  # it may have begun just then, and nobody else would end it
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._fleet._in_thread(lambda: self.__exit__(kind, error, trace), self._fleet._ending(self._stop))
