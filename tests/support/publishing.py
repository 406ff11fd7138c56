"""File systems that fail, crash and lose what was not synced, under a publisher."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy.typing as npt

from rollfleet_engine.weights.coverage import ModelTensors
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.staging import stage_checkpoint
from rollfleet_protocol.state import FailureReason
from rollfleet_trainer.files import Files

Arrays = dict[str, npt.NDArray[Any]]
Choose = Callable[[int], int]  # a number below the one that is given
REFUSED = (FailureReason.CHECKPOINT_INCOMPLETE, FailureReason.CHECKPOINT_NOT_FOUND)


class CrashError(BaseException):
    """The machine stops here: nothing that would clean up runs any more."""


class CountedFiles(Files):
    """Counts the steps that change something; at the step `at` `happens` is called in place of it."""

    def __init__(self, at: int = -1, happens: Callable[[], None] = lambda: None) -> None:
        self.steps = 0
        self._at = at
        self._happens = happens

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self._at:
            self._happens()

    def make_folder(self, path: Path) -> None:
        self._step()
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._step()
        return super().create(path)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        half = len(data) // 2
        super().write(fd, data[:half], offset)
        self._step()
        super().write(fd, data[half:], offset + half)

    def sync(self, fd: int) -> None:
        self._step()
        super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        self._step()
        super().sync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)

    def remove_tree(self, path: Path) -> None:
        self._step()
        super().remove_tree(path)


def full_disk() -> None:
    """No space left on device."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class LosingFiles(CountedFiles):
    """A machine that loses power at a step; `lose` does to the folder what the disk has not kept.

    Of a file everything since its last sync may be lost: cut off or zeros. Of a folder any of the changes of names
    since its last sync.
    """

    def __init__(self, at: int) -> None:
        super().__init__(at, self._stop)
        self.stopped = False
        self._open: dict[int, Path] = {}
        self._kept: dict[Path, int] = {}  # synced bytes of each file that has more
        self._undo: list[tuple[Path, Callable[[], None]]] = []  # by folder, the newest last

    def _stop(self) -> None:
        self.stopped = True
        raise CrashError

    def _step(self) -> None:
        if self.stopped:
            raise CrashError
        super()._step()

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self._undo.append((path.parent, lambda: shutil.rmtree(path)))

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._open[fd], self._kept[path] = path, 0
        self._undo.append((path.parent, path.unlink))
        return fd

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        self._kept.setdefault(self._open[fd], os.fstat(fd).st_size)
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._kept.pop(self._open[fd], None)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._undo = [each for each in self._undo if each[0] != path]

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        assert old not in self._kept
        assert not any(path.is_relative_to(old) for path in self._kept)
        self._undo.append((new.parent, lambda: new.rename(old)))

    def lose(self, choose: Choose) -> None:
        """After the crash."""
        for path, kept in self._kept.items():
            size = path.stat().st_size
            left = kept + choose(size - kept + 1)
            with path.open("r+b") as file:
                file.truncate(left)
                file.truncate(size if choose(2) else left)  # a file system may keep the size and show zeros
        for _, undo in reversed(self._undo):
            if choose(2):
                with suppress(FileNotFoundError):  # it went with a folder that is lost itself
                    undo()


def read_as_engines_do(root: Path, relative: str, model: ModelTensors) -> str:
    """The digest that a guard finds, or a refusal of one that is not complete: empty."""
    try:
        staged = stage_checkpoint(root, relative, model)
    except CheckpointError as error:
        if error.reason not in REFUSED:
            raise
        return ""
    staged.close()
    return staged.digest
