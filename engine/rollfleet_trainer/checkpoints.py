"""Published checkpoints in a folder: which there are, and whether one is whole."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rollfleet_protocol.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, ManifestError, decode
from rollfleet_trainer.files import NotRegularError, read_small

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"
# What savers and copy tools leave beside a checkpoint that is not finished; the engines' guards refuse it by these.
UNFINISHED_SUFFIXES = (".tmp", ".part", ".partial", ".incomplete", ".crdownload")
LONGEST_NAME = 200  # bytes; working folders carry it with 40 more
LONGEST_PATH = 1024  # characters, of spec.source.checkpoint.path
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


@dataclass(frozen=True)
class Published:
    """A complete checkpoint."""

    root: Path
    path: str  # below root: what WeightVersion's spec.source.checkpoint.path and spec.recovery.checkpoint.path take
    step: str
    digest: str  # of the version, as the engines' guards compute it: "sha256:<hex>"
    nbytes: int  # of all tensors
    tensors: int
    created_ns: int  # wall clock of who published it
    seconds: float = 0.0  # that publishing took; 0 where it was there already
    recovers: int | None = None  # RolloutFleet.publish: the version whose spec.recovery names it

    @property
    def folder(self) -> Path:
        """Where it is here."""
        return self.root / self.path


def published_as(root: Path, path: str, manifest: Manifest, seconds: float = 0.0) -> Published:
    """A manifest in other words."""
    tensors = len(manifest.tensors)
    return Published(root, path, manifest.step, manifest.digest, manifest.nbytes, tensors, manifest.created_ns, seconds)


def relative_path(within: str, name: str) -> str:
    """A checkpoint's path below the root. ValueError where it could lead elsewhere or is a working folder's."""
    parts = PurePosixPath(within).parts
    if within.startswith("/") or ".." in parts or "\0" in within:
        raise ValueError(f'within {within!r}: must be relative to the root, without ".."')
    if not name or name.startswith(".") or "/" in name or "\0" in name or name.endswith(UNFINISHED_SUFFIXES):
        raise ValueError(f"name {name!r}: must be one folder's name, not hidden, not ending in a word for unfinished")
    if len(name.encode(errors="surrogateescape")) > LONGEST_NAME:
        raise ValueError(f"name {name[:40]!r}...: is longer than {LONGEST_NAME} bytes")
    found = str(PurePosixPath(*parts, name))
    if not 0 < len(found) <= LONGEST_PATH or any(ord(each) < 0x20 or ord(each) == 0x7F for each in found):
        raise ValueError(f"{found[:80]!r}: a WeightVersion takes up to {LONGEST_PATH} characters, none of control")
    return found


def manifest_of(folder: Path) -> Manifest | None:
    """The manifest of a folder that holds all of what it names, by sizes; None where the folder is not complete.

    Bytes are not read: that do the engines, before any pause. Raises OSError where the file system does not answer.
    """
    try:
        if any(path.name.endswith(UNFINISHED_SUFFIXES) for path in folder.iterdir()):
            return None
        manifest = decode(read_small(folder / MANIFEST, MAX_MANIFEST_BYTES))
        sizes = {name: each.size for name, each in manifest.shards.items()}
        sizes |= {name: each.size for name, each in manifest.files.items()}
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (NotRegularError, ManifestError):
        return None
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return None
    return manifest if whole else None


def published(root: Path | str, *, within: str = "") -> tuple[Published, ...]:
    """All complete ones in root/within, the oldest first. A folder that is not there holds none."""
    root = Path(root)
    relative_path(within, "any")
    found = [
        published_as(root, path, manifest)
        for path in _paths(root, within)
        if (manifest := _readable_manifest(root / path)) is not None
    ]
    return tuple(sorted(found, key=lambda each: (each.created_ns, each.path)))


def _readable_manifest(folder: Path) -> Manifest | None:
    """None also of a folder that is closed to us, such as a file system's lost+found: it is somebody else's."""
    try:
        return manifest_of(folder)
    except PermissionError:
        return None


def _paths(root: Path, within: str) -> Iterator[str]:
    """Of folders that publish could have made; links are somebody's pointers, not checkpoints of their own."""
    try:
        entries = sorted((root / within).iterdir())
    except FileNotFoundError:
        return
    for path in entries:
        if path.is_dir() and not path.is_symlink():
            try:
                yield relative_path(within, path.name)
            except ValueError:  # hidden, or renamed aside by somebody: "step-5.tmp"
                continue
