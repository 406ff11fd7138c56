"""Which engines are asked: a few of a large fleet, or those that are named."""

from dataclasses import dataclass

from rollfleet_cli.errors import NotPossibleError
from rollfleet_operator.ports import Manifest

SAMPLE = 3  # engines; each with all of its ranks


@dataclass(frozen=True)
class Chosen:
    """Of how many, and by what rule."""

    pods: tuple[Manifest, ...]
    present: int
    how: str


def choose(pods: tuple[Manifest, ...], names: tuple[str, ...], *, everything: bool) -> Chosen:
    """By name where there are names, else all, or SAMPLE spread over the fleet's names."""
    alive = tuple(pod for pod in pods if not pod["metadata"].get("deletionTimestamp"))
    if not alive:
        raise NotPossibleError("the fleet has no engine: no pod of it is there")
    if names:
        return Chosen(tuple(_named(alive, name) for name in dict.fromkeys(names)), len(alive), "by name")
    if everything or len(alive) <= SAMPLE:
        return Chosen(alive, len(alive), "all")
    places = sorted({round(index * (len(alive) - 1) / (SAMPLE - 1)) for index in range(SAMPLE)})
    return Chosen(tuple(alive[place] for place in places), len(alive), f"a sample of {SAMPLE}; --all asks all")


def _named(pods: tuple[Manifest, ...], name: str) -> Manifest:
    """By the pod's name, or by the part of it that its successors keep: FLEET-ENGINE."""
    found = [pod for pod in pods if name == pod["metadata"]["name"] or pod["metadata"]["name"].startswith(f"{name}-")]
    if len(found) != 1:
        known = ", ".join(str(pod["metadata"]["name"]) for pod in pods[:20])
        raise NotPossibleError(f"{len(found)} engines are called {name!r}; there are: {known}")
    return found[0]
