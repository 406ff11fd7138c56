"""The blocking face of a RolloutFleet, also for where a loop runs already."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rollfleet_trainer.beginning import Beginning
from rollfleet_trainer.checkpoints import Published
from rollfleet_trainer.publishing import Progress as Written
from rollfleet_trainer.publishing import Tensors
from rollfleet_trainer.retention import Retained
from rollfleet_trainer.sampling import BlockingRollouts
from rollfleet_trainer.updates import OnProgress, Update
from rollfleet_trainer.versions import Wish, label

if TYPE_CHECKING:
    from rollfleet_trainer.fleet import RolloutFleet
    from rollfleet_trainer.sources import Given


class BlockingFleet:
    """The blocking face of a RolloutFleet. Weights are gone through in the calling thread."""

    def __init__(self, fleet: RolloutFleet) -> None:
        self._fleet = fleet

    def update(
        self,
        named_parameters: Given,
        *,
        step: int | str = "",
        pause: str | None = None,
        drain_timeout_s: int | None = None,
        version: int | None = None,
        probe: Sequence[int] | None = None,
        probe_logprobs: Sequence[float] | None = None,
        recovery: str | None = None,
        spec: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Update:
        """As RolloutFleet.update."""
        wish = Wish(version, label(step), pause, drain_timeout_s, probe, probe_logprobs, recovery, spec or {})
        return self._fleet._update(named_parameters, wish, on_progress)

    def publish(
        self,
        tensors: Given | Tensors,
        root: str | Path | None = None,
        *,
        step: int | str,
        name: str = "",
        within: str = "",
        assets: str | Path | None = None,
        keep: int | None = None,
        collective: bool = False,
        on_progress: Written | None = None,
    ) -> Published:
        """As RolloutFleet.publish."""
        how = {
            "step": label(step),
            "name": name,
            "within": within,
            "assets": assets,
            "keep": keep,
            "collective": collective,
        }
        return self._fleet._publish(tensors, root, threading.Event(), on_progress, how)

    def retain(
        self,
        keep: int,
        *,
        within: str = "",
        root: str | Path | None = None,
        also_in_use: Callable[[], Collection[str]] = tuple,
    ) -> Retained:
        """As RolloutFleet.retain."""
        return self._fleet._retain(keep, within, root, also_in_use)

    def rollouts(
        self, endpoints: str | Sequence[str] | None = None, *, model: str | None = None, **options: Any
    ) -> BlockingRollouts:
        """As RolloutFleet.rollouts, of blocking calls, for as many threads as you like."""
        return BlockingRollouts(self._fleet.rollouts(endpoints, model=model, **options))

    @property
    def begin(self) -> Callable[..., Beginning]:
        """As RolloutFleet.begin."""
        return self._fleet.begin

    def spec(self) -> Mapping[str, Any]:
        """As RolloutFleet.spec."""
        return self._fleet._spec()

    def close(self) -> None:
        """As RolloutFleet.aclose."""
        self._fleet._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()
