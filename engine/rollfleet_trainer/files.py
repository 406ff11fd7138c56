"""What a publisher does to a file system, a method for each step that can fail or be the last one before a crash."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

# A file system that knows no fsync of a folder says so by one of these: there its own order of writing must do.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


class NotRegularError(OSError):
    """A pipe, a device, a folder: nothing that can be read to its end."""


def open_regular(path: Path) -> int:
    """A file, open for reading; the caller closes it. A pipe would hold whoever opens it.

    Raises OSError, of which NotRegularError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegularError(errno.EINVAL, "is not a regular file", str(path))
    return fd


def read_small(path: Path, most: int) -> bytes:
    """All of a file, or its first `most` + 1 bytes. Raises as open_regular."""
    with open(open_regular(path), "rb") as file:
        return file.read(most + 1)


class Files:
    """The real one. Every method raises OSError."""

    def make_folder(self, path: Path) -> None:
        """With the folders above it."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """A new file, open for writing; the caller closes it."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """All of it."""
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)

    def sync(self, fd: int) -> None:
        """Content and size are on disk, at the server where there is one, when it returns."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """NFS tells of failed writes here at the latest."""
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Names are on disk when it returns."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Atomic on POSIX file systems; a folder that is not empty is not replaced."""
        os.rename(old, new)  # noqa: PTH104 - beside its kin of os

    def clock_s(self, folder: Path) -> float:
        """What the file system's own clock says, by which it dates files: a server's may differ from ours."""
        os.utime(folder)
        return folder.stat().st_mtime

    def remove(self, path: Path) -> None:
        """A file."""
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        """A folder with all that is in it."""
        shutil.rmtree(path)


FILES = Files()
