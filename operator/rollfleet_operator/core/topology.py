"""Ranks of a weight transfer: the trainer is rank 0, engines follow in the order of their ordinals.

Inside an engine the worker of data-parallel index d has rank_offset + d * (tensor * pipeline) + its rank in that (the
rule of vLLM's weight transfer, shared facts on the engine); world_size counts all of an engine's workers.
"""

from collections.abc import Iterable
from dataclasses import dataclass

TRAINER_RANKS = 1


@dataclass(frozen=True)
class Place:
    """An engine's ranks: rank_offset .. rank_offset + world_size - 1."""

    name: str
    rank_offset: int
    world_size: int


def place(worlds: Iterable[tuple[str, int]]) -> tuple[Place, ...]:
    """Places in the order given. A world below 1 is a fault of whoever reported it."""
    places: list[Place] = []
    offset = TRAINER_RANKS
    for name, size in worlds:
        if size < 1:
            raise ValueError(f"{name} reports a world of {size} workers; at least 1 is needed")
        places.append(Place(name, offset, size))
        offset += size
    return tuple(places)


def world_size(places: tuple[Place, ...]) -> int:
    """Ranks of the whole group, the trainer included."""
    return TRAINER_RANKS + sum(each.world_size for each in places)
