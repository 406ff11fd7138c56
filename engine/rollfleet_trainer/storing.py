"""The checkpoints volume of a fleet, as this trainer has it mounted: copies of what it sent, written and deleted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from rollfleet_trainer.background import Background
from rollfleet_trainer.checkpoints import Published, relative_path
from rollfleet_trainer.control import Control
from rollfleet_trainer.errors import NotPossible
from rollfleet_trainer.publishing import Progress, Tensors, publish
from rollfleet_trainer.ranks import Ranks, Word, lead
from rollfleet_trainer.retention import CONFIG, Retained, retain

if TYPE_CHECKING:
    from rollfleet_trainer.sources import Given

CHECKPOINTS_VARIABLE = "ROLLFLEET_CHECKPOINTS"
NO_ROOT = (
    "where is the fleet's volumes.checkpoints mounted here? RolloutFleet(..., checkpoints=) says so, or "
    f"${CHECKPOINTS_VARIABLE}, or root="
)


class Store:
    """Of one fleet, on rank 0. `root`: where the volume is mounted here; None: each call says it."""

    def __init__(self, background: Background, control: Control, ranks: Ranks, root: Path | None) -> None:
        self._background = background
        self._control = control
        self._ranks = ranks
        self._root = root
        self._assets: frozenset[Path] = frozenset()  # the folder that the caller's next copy may need as well

    def publish(
        self,
        given: Given | Tensors,
        root: Path | None,
        *,
        keep: int | None,
        collective: bool,
        progress: Progress,
        **how: Any,
    ) -> Published:
        """Write a copy, and name it as recovery of the version that it is one of; its end is told to all ranks."""

        def act() -> Published:
            place = self._place(root)
            if how["assets"] is not None:
                self._assets = frozenset({Path(how["assets"])})
            relative_path(how["within"], how["name"] or f"step-{how['step']}")  # before the others begin to gather
            self._ranks.tell(Word.SEND)
            gathers = self._ranks.size > 1
            tensors: Given | Tensors = _gathered(given) if gathers else given
            made = publish(place, tensors, collective=collective or gathers, progress=progress, **how)
            version = self._background.run(self._control.name_recovery(made.path, made.digest))
            if keep is not None:
                # By a clock that was set back what was just written is the oldest of all.
                self.retain(place, keep=keep, within=how["within"], also=lambda: [made.path])
            return replace(made, recovers=version)

        return lead(self._ranks, act)

    def retain(
        self, root: Path | None, *, keep: int, within: str = "", also: Callable[[], Collection[str]] = tuple
    ) -> Retained:
        """Delete old ones, but for what a fleet of the namespace uses, and what `also` names, asked anew each time.

        What was last given as assets stays too: a run that goes on from a copy takes them from there each time.
        """
        place = self._place(root)
        ours = frozenset(path for path in map(partial(_below, place), self._assets) if path)

        def in_use() -> frozenset[str]:
            return self._background.run(self._control.in_use()) | frozenset(also()) | ours

        return retain(place, keep=keep, within=within, in_use=in_use)

    def require_copy(self, path: str | None) -> None:
        """NotPossible where a copy that an update names is not there, as far as this process can see the volume."""
        if path is None or self._root is None:
            return
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise NotPossible(f"recovery={path!r}: must be relative to the fleet's volumes.checkpoints, without '..'")
        if not (self._root / path).is_dir():
            where = f"{self._root}, where the fleet's volumes.checkpoints is mounted"
            raise NotPossible(f"recovery={path!r}: is no folder below {where}: publish names a copy once it is whole")

    def _place(self, root: Path | None) -> Path:
        place = self._root if root is None else root
        if place is None:
            raise NotPossible(NO_ROOT)
        if not place.is_dir():
            raise NotPossible(f"{place}: is no folder: is the fleet's volumes.checkpoints mounted there?")
        return place


def _below(root: Path, folder: Path) -> str:
    """A file of this folder, as retain takes paths; empty where it is elsewhere. It may hold checkpoints below."""
    found, place = folder.resolve(), root.resolve()
    return str(found.relative_to(place) / CONFIG) if found.is_relative_to(place) else ""


def _gathered(given: Any) -> Tensors:
    from rollfleet_trainer.sources import Weights  # noqa: PLC0415 - needs torch

    return ((name, tensor) for name, tensor, _ in Weights(given).go_through())
