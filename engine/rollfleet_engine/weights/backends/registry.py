"""Which backends there are: entry points of the group `rollfleet.weight_backends`, name -> a class that keeps Backend.

Ours are found without metadata too: a source tree on PYTHONPATH has none. A name that two lead to different places is
nobody's: it is never guessed which one was meant, so a name of ours cannot be taken over. What is installed beside us
is code and metadata of others: whatever it raises is told under its name, and stops nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions

from rollfleet_engine.weights.backends.base import Backend
from rollfleet_engine.weights.errors import PushError

GROUP = "rollfleet.weight_backends"
OURS: Mapping[str, str] = {
    "gloo": "rollfleet_engine.weights.backends.gloo:GlooBackend",
    "shm": "rollfleet_engine.weights.backends.shm:ShmBackend",
}


@dataclass(frozen=True)
class Survey:
    """What is installed."""

    usable: tuple[str, ...]  # can be imported here, in order
    left_out: Mapping[str, str]  # name -> why not, in the words of whatever failed


def survey() -> Survey:
    """Every backend that is installed, imported to see whether it can be. Never raises."""
    found, left_out = _installed()
    usable = []
    for name, value in sorted(found.items()):
        try:
            _load(value)
        except _UnusableError as error:
            left_out[name] = str(error)
        else:
            usable.append(name)
    return Survey(tuple(usable), left_out)


def make(name: str) -> Backend:
    """A backend of this name. Raises PushError with the names that there are, or with why this one cannot run here."""
    found, left_out = _installed()
    if name in left_out:
        raise PushError(f"backend {name} is left out: {left_out[name]}; there are {_names(survey().usable)}")
    if name not in found:
        raise PushError(f"no backend {name!r}: there are {_names(found)}")
    try:
        return _made(_load(found[name]))
    except _UnusableError as error:
        raise PushError(f"backend {name} cannot run here: {error}; there are {_names(survey().usable)}") from error


def usable_names() -> tuple[str, ...]:
    """Those that can be imported here, in order."""
    return survey().usable


class _UnusableError(Exception):
    """Code of a backend's module, or its class, failed: in its own words."""


def _installed() -> tuple[dict[str, str], dict[str, str]]:
    """Name -> where it leads, and name -> why it is left out. A broken distribution stands there under its own name."""
    found, left_out = dict(OURS), dict[str, str]()
    for who, each in _distributions():
        try:
            points = [(point.name, point.value) for point in _points(each)]
        except Exception as error:  # noqa: BLE001 - metadata of others: each way of being broken raises another type
            left_out[who] = f"metadata of the distribution {who}: {_told(error)}"
            continue
        for name, value in points:
            if found.setdefault(name, value) != value:
                left_out[name] = f"{value} of the distribution {who} would replace {found[name]}: rename one of them"
    for name in left_out:
        found.pop(name, None)
    return found, left_out


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


def _names(names: Mapping[str, str] | tuple[str, ...]) -> str:
    return ", ".join(sorted(names)) or "none"
