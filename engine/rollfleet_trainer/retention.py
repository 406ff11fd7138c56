"""Deletes old checkpoints, and never one that a fleet has committed, is loading, or names.

Whether one is used is asked twice: before, and again when it has been taken out of its place, which is undone where
somebody has named it in between. Where nobody can be asked nothing is deleted.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rollfleet_trainer.checkpoints import Published, manifest_of, published, relative_path
from rollfleet_trainer.errors import PublishError
from rollfleet_trainer.files import FILES, Files

ABANDONED_AFTER_S = 86400.0  # a working folder in which nothing was written for so long has no writer any more
ASIDE_S = 300.0  # since it was renamed: whoever took it aside may be asking about it right now
CONFIG = "config.json"  # of a model
_DELETED = ".deleted"
_WORKING = ".part"

InUse = Callable[[], Collection[str]]  # paths below root


@dataclass(frozen=True)
class Retained:
    """What became of them, each list the oldest first."""

    kept: tuple[Published, ...]  # the newest, and those in use
    in_use: tuple[Published, ...]
    deleted: tuple[Published, ...]


def paths_in_use(engines: Iterable[Mapping[str, Any]], versions: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Checkpoints that RolloutEngines and WeightVersions speak of, as the API server gives these objects.

    Committed (late joiners and restored engines read it), named as source, recovery or stored by a spec, and the one
    that an update has begun with, which a newer spec may have left behind. Of a fleet whose model is on the same volume
    what its engines start from, told by a file in it: a model may have checkpoints in a folder below.

    Read `versions` first: what is in use by a version is committed before the version goes on to another.
    """
    found: set[object] = set()
    for engine in engines:
        found.add(_at(engine, "status", "committed", "checkpoint"))
        volume, model = _at(engine, "spec", "volumes", "model"), _at(engine, "spec", "model", "path")
        if model and volume and volume == _at(engine, "spec", "volumes", "checkpoints"):
            found.add(f"{model}/{CONFIG}")
    for version in versions:
        found.add(_at(version, "spec", "source", "checkpoint", "path"))
        found.add(_at(version, "spec", "recovery", "checkpoint", "path"))
        found.add(_at(version, "spec", "stored", "checkpoint", "path"))
        found.add(_at(version, "status", "checkpoint"))
    return frozenset(path for path in found if isinstance(path, str) and path)


def _at(document: object, *names: str) -> object:
    for name in names:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def retain(
    root: Path | str,
    *,
    keep: int,
    in_use: InUse,
    within: str = "",
    abandoned_after_s: float = ABANDONED_AFTER_S,
    files: Files = FILES,
) -> Retained:
    """Keep the `keep` newest of the complete checkpoints in root/within, and all that are in use; delete the others.

    in_use: paths below root that must stay, asked anew each time: of every fleet that reads this volume. What it raises
    is raised here, and nothing more is deleted then. `root` must be what the fleets have as volumes.checkpoints, so
    that their paths mean the same: where nothing of what is in use is there, nothing is deleted. Folders without a
    manifest of ours are left alone, and so are links.

    Also removes what publishers and this function left unfinished when they died. Raises PublishError where root is not
    the fleets' volume, OSError where the file system refuses.
    """
    if keep < 1:
        raise ValueError(f"keep {keep}: at least one is kept")
    relative_path(within, "any")  # ValueError before anything is looked at
    root = Path(root)
    paths = in_use()
    used = _Used(root, paths)
    _bring_back(root, within, used, files)
    _require_volume(root, paths)
    _tidy(root, within, abandoned_after_s, files)
    found = published(root, within=within)
    old = found[: max(0, len(found) - keep)]
    deleted = tuple(each for each in old if each.path not in used and _delete(root, each, in_use, files))
    kept = tuple(each for each in found if each not in deleted)
    return Retained(kept, tuple(each for each in kept if each.path in used), deleted)


class _Used:
    """Paths in use, and what they stand for: through links, above and below."""

    def __init__(self, root: Path, paths: Collection[str]) -> None:
        self._root = root.resolve()
        self._places = [PurePosixPath(path) for path in paths]
        self._places += [PurePosixPath((self._root / path).resolve()) for path in paths]

    def __contains__(self, path: object) -> bool:
        asked = PurePosixPath(str(path))
        real = PurePosixPath((self._root / str(path)).resolve())
        return any(
            each.is_relative_to(one) or one.is_relative_to(each) for each in self._places for one in (asked, real)
        )


def _delete(root: Path, checkpoint: Published, in_use: InUse, files: Files) -> bool:
    """Whether it is gone; not where somebody has named it meanwhile."""
    folder = checkpoint.folder
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}{_DELETED}")
    try:
        files.rename(folder, aside)
    except FileNotFoundError:  # somebody else's retain() was faster
        return True
    try:
        needed = checkpoint.path in _Used(root, in_use())
    except BaseException:
        files.rename(aside, folder)
        raise
    if needed:
        files.rename(aside, folder)
        return False
    files.remove_tree(aside)
    return True


def _require_volume(root: Path, paths: Collection[str]) -> None:
    """Paths that mean nothing here would protect nothing."""
    if paths and not any((root / path).exists() for path in paths):
        named = ", ".join(sorted(paths)[:3])
        raise PublishError(f"{root}: holds nothing of what is in use ({named}): is it the fleet's volumes.checkpoints?")


def _bring_back(root: Path, within: str, used: _Used, files: Files) -> None:
    """What was taken aside by somebody who died before it was deleted, and is named now."""
    for path, name in _hidden(root / within, _DELETED):
        folder = root / within / name
        if str(PurePosixPath(within, name)) in used and not folder.exists() and manifest_of(path) is not None:
            files.rename(path, folder)


def _tidy(root: Path, within: str, abandoned_after_s: float, files: Files) -> None:
    """Working folders without a writer, and what was taken aside and not deleted."""
    for path, _ in _hidden(root / within, _DELETED):
        if files.clock_s(path.parent) - path.stat().st_ctime > ASIDE_S:
            files.remove_tree(path)
    for path, _ in _hidden(root / within, _WORKING):
        if files.clock_s(path.parent) - _written_s(path) > abandoned_after_s:
            files.remove_tree(path)


def _hidden(place: Path, suffix: str) -> list[tuple[Path, str]]:
    """Folders of ours of one kind, each with the name that its checkpoint has: .<name>.<unique><suffix>"""
    found = []
    for path in sorted(place.iterdir()) if place.is_dir() else ():
        name, _, unique = path.name.removesuffix(suffix).removeprefix(".").rpartition(".")
        ours = path.name.startswith(".") and path.name.endswith(suffix) and len(unique) == len(uuid.uuid4().hex)
        if name and ours and path.is_dir() and not path.is_symlink():
            found.append((path, name))
    return found


def _written_s(folder: Path) -> float:
    """When it was last written into."""
    newest = folder.stat().st_mtime
    with suppress(FileNotFoundError):
        newest = max([newest, *(path.stat().st_mtime for path in folder.iterdir())])
    return newest
