"""Which backends there are: entry points of the group `rollfleet.weight_backends`, name -> a class that keeps Backend.

Ours are found without metadata too: a source tree on PYTHONPATH has none. A name of ours leads to ours, whoever else
claims it; one that two others lead to different places is nobody's. What is installed beside us is code and metadata of
others: it is told what is wrong with it, and it stops nothing else. A RolloutEngine can name ours only, so an engine's
start imports no other: code that hangs while it is imported would hang the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions

from rollfleet_engine.weights.backends.base import Backend
from rollfleet_engine.weights.errors import PushError

GROUP = "rollfleet.weight_backends"
OURS: Mapping[str, str] = {
    "gloo": "rollfleet_engine.weights.backends.gloo:GlooBackend",
    "hccl": "rollfleet_engine.weights.backends.hccl:HcclBackend",
    "ipc": "rollfleet_engine.weights.backends.ipc:IpcBackend",
    "shm": "rollfleet_engine.weights.backends.shm:ShmBackend",
}


@dataclass(frozen=True)
class Survey:
    """What is installed."""

    usable: tuple[str, ...]  # ours that can be imported here, in order
    others: tuple[str, ...]  # of others, not imported
    left_out: Mapping[str, str]  # what -> why not, in the words of whatever failed


def survey() -> Survey:
    """Every backend that is installed; ours are imported to see whether they can be. Never raises."""
    found, left_out = _installed()
    usable = []
    for name in sorted(OURS):
        try:
            _load(found[name])
        except _UnusableError as error:
            left_out[name] = str(error)
        else:
            usable.append(name)
    return Survey(tuple(usable), tuple(sorted(found.keys() - OURS.keys())), left_out)


def make(name: str) -> Backend:
    """A backend of this name. Raises PushError with the names that there are, or with why this one cannot run here."""
    found, left_out = _installed()
    if name in left_out:
        raise PushError(f"backend {name} is left out: {left_out[name]}; there are {_names(found)}")
    if name not in found:
        raise PushError(f"no backend {name!r}: there are {_names(found)}")
    try:
        return _made(_load(found[name]))
    except _UnusableError as error:
        rest = [each for each in found if each != name]
        raise PushError(f"backend {name} cannot run here: {error}; there are {_names(rest)}") from error


def usable_names() -> tuple[str, ...]:
    """Ours that can be imported here, in order."""
    return survey().usable


class _UnusableError(Exception):
    """Code of a backend's module, or its class, failed: in its own words."""


def _installed() -> tuple[dict[str, str], dict[str, str]]:
    """Name -> where it leads, and what is left out -> why: a name that is nobody's, a claim to ours, a distribution."""
    found, left_out, nobodys = dict(OURS), dict[str, str](), set[str]()
    for who, each in _distributions():
        try:
            points = [(point.name, point.value) for point in _points(each)]
        except Exception as error:  # noqa: BLE001 - metadata of others: each way of being broken raises another type
            left_out[f"distribution {who}"] = f"its metadata: {_told(error)}"
            continue
        for name, value in points:
            if found.setdefault(name, value) == value:
                continue
            if name in OURS:
                left_out[f"{name} of {who}"] = f"{value} does not replace {found[name]}: rename it"
            else:
                nobodys.add(name)
                left_out[name] = f"{value} of the distribution {who} would replace {found[name]}: rename one of them"
    return {name: value for name, value in found.items() if name not in nobodys}, left_out


def _points(distribution: Distribution) -> list[EntryPoint]:
    return [point for point in distribution.entry_points if point.group == GROUP]


def _distributions() -> Iterator[tuple[str, Distribution]]:
    """Each by its name; of one that is found twice the first, which is the one that imports reach."""
    seen = set()
    for each in distributions():
        try:
            name = str(each.metadata["Name"])
        except Exception as error:  # noqa: BLE001 - as above
            name = f"without a name ({_told(error)})"
        if name not in seen:
            seen.add(name)
            yield name, each


def _load(value: str) -> Callable[[], Backend]:
    module, _, attribute = value.partition(":")
    try:
        factory: Callable[[], Backend] = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # code of others: it may raise anything while it is imported
        raise _UnusableError(_told(error)) from error
    return factory


def _made(factory: Callable[[], Backend]) -> Backend:
    try:
        return factory()
    except (Exception, SystemExit) as error:  # as above
        raise _UnusableError(_told(error)) from error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
