"""Which backends there are: entry points of the group `rollfleet.weight_backends`, name -> a class that keeps Backend.

Ours are found without metadata too: a source tree on PYTHONPATH has none. Nobody can replace them: a name that is ours
and leads elsewhere is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from rollfleet_engine.weights.backends.base import Backend
from rollfleet_engine.weights.errors import PushError

GROUP = "rollfleet.weight_backends"
OURS: Mapping[str, str] = {
    "gloo": "rollfleet_engine.weights.backends.gloo:GlooBackend",
    "shm": "rollfleet_engine.weights.backends.shm:ShmBackend",
}


def known() -> dict[str, EntryPoint]:
    """Every backend that is installed, by name."""
    ours = {name: EntryPoint(name, value, GROUP) for name, value in OURS.items()}
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        own = ours.get(point.name, point)
        if own.value != point.value:
            raise PushError(f"backend {point.name}: {point.value} would replace {own.value}; give yours another name")
        found[point.name] = point
    return found | ours


def make(name: str) -> Backend:
    """A backend of this name. Raises PushError with the names that there are, or with why this one cannot run here."""
    points = known()
    if name not in points:
        raise PushError(f"no backend {name!r}: there are {', '.join(sorted(points))}")
    module, _, attribute = points[name].value.partition(":")
    try:
        factory: Callable[[], Backend] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        usable = ", ".join(usable_names()) or "none"
        raise PushError(f"backend {name} cannot run here: {error}; there are {usable}") from error
    return factory()


def usable_names() -> tuple[str, ...]:
    """Those that can be imported here, in order."""
    return tuple(sorted(name for name, point in known().items() if _loads(point)))


def _loads(point: EntryPoint) -> bool:
    module, _, attribute = point.value.partition(":")
    try:
        return hasattr(import_module(module), attribute)
    except ImportError:
        return False
