"""The copy of a staged checkpoint that workers on another node than the guard's read.

The guard's open files are out of their reach. So they open the same names below the same volume, before the pause as
the guard does, compare sizes, and one worker of each node hashes all bytes: what is read in the transfer is what was
found whole here, from the same open files, and is digested again then.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.layout import OpenFile, open_file, open_folder
from rollfleet_engine.weights.staging import hash_ranges
from rollfleet_engine.weights.transfer import CheckpointReader, CheckpointUpdate, FileReference
from rollfleet_protocol.state import FailureReason


class OwnCopy:
    """Staged by a thread of its own: the worker goes on computing. `close` lets the files go."""

    def __init__(self, update: CheckpointUpdate, *, hashes: bool) -> None:
        self._update = update
        self._hashes = hashes  # whether this worker reads all bytes, or leaves that to another of its node
        self._files: list[OpenFile] = []
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._ended = False  # the thread touches no file any more
        self._failure: CheckpointError | None = None
        self._thread = threading.Thread(target=self._work, name="rollfleet-own-copy", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no room for a thread
            self._failure = CheckpointError(FailureReason.CHECKPOINT_INVALID, f"cannot be staged here: {error}")
            self._ended = True

    @property
    def digest(self) -> str:
        """Of the checkpoint that this is a copy of."""
        return self._update.digest

    @property
    def failure(self) -> CheckpointError | None:
        """Why it is not a copy of what the guard has staged."""
        return self._failure

    @property
    def done(self) -> bool:
        """Whether it is ready, or has failed."""
        return self._ended

    def reader(self) -> CheckpointReader:
        """Reads these files. Raises CheckpointError where they are not ready."""
        if not self.done or self._failure is not None or self._closed:
            raise _changed("this node's own copy of the checkpoint is not staged: Prepare again")
        return CheckpointReader(self._update, self._open_again)

    def close(self) -> None:
        """End the thread, and close the files once it has ended."""
        self._cancelled.set()
        with self._lock:
            self._closed = True
            if self._ended:
                self._let_go()

    def _work(self) -> None:
        try:
            self._stage()
        except CheckpointError as error:
            self._failure = error
        except (OSError, RuntimeError, MemoryError) as error:  # also no room for a thread or a buffer
            words = (error.strerror if isinstance(error, OSError) else "") or f"{type(error).__name__}: {error}"
            why = f"checkpoint {self._update.path!r}: cannot be read: {words}"
            self._failure = CheckpointError(FailureReason.CHECKPOINT_INVALID, why)
        with self._lock:
            self._ended = True
            if self._closed or self._failure is not None:
                self._let_go()

    def _stage(self) -> None:
        update = self._update
        root = Path(update.root)
        folder = open_folder(root, update.path, confined=update.confined)
        try:
            for wanted in update.files:
                self._files.append(open_file(folder, wanted.name, root, confined=update.confined))
                found = self._files[-1].size
                if found != wanted.size:
                    raise _changed(f"{wanted.name}: has {found} bytes on this node and {wanted.size} on the leader's")
        finally:
            os.close(folder)
        if self._hashes:
            self._compare()

    def _compare(self) -> None:
        work = [(self._files[tensor.file], tensor.offset, tensor.nbytes) for tensor in self._update.tensors]
        found = hash_ranges(work, lambda _done, _total: None, self._cancelled)
        for tensor, lanes in zip(self._update.tensors, found, strict=True):
            if lanes != tensor.lanes:
                name = self._update.files[tensor.file].name
                why = f"tensor {tensor.name} in {name}: holds other bytes on this node than on the leader's"
                raise CheckpointError(FailureReason.DIGEST_MISMATCH, why)

    def _open_again(self, file: FileReference) -> int:
        mine = self._files[self._update.files.index(file)]
        if not mine.unchanged():
            raise _changed(f"{file.name}: was changed on this node since it was staged; stage it again")
        return os.dup(mine.fd)

    def _let_go(self) -> None:
        while self._files:
            os.close(self._files.pop().fd)


def _changed(message: str) -> CheckpointError:
    return CheckpointError(FailureReason.CHECKPOINT_CHANGED, message)
