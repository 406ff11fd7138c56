"""What a backend is: one per worker, made when a trainer's init names it, closed when it is broken or replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rollfleet_engine.weights.errors import PushError
from rollfleet_kernels.digest import DeviceBytes
from rollfleet_protocol.pushes import GroupInit, TensorMeta

HostBytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Seat:
    """Which worker this is."""

    worker: int  # among all workers of the engine: data-parallel index * (tensor * pipeline) + rank in that
    workers: int  # of the engine


def rank_of(backend: str, wanted: GroupInit, seat: Seat) -> int:
    """The worker's rank in the trainer's group. Raises PushError where the engine's ranks are not all in it."""
    last = wanted.rank_offset + seat.workers - 1
    if last >= wanted.world_size:
        ranks = f"this engine's ranks are {wanted.rank_offset} to {last}"
        raise PushError(f"{backend}: {ranks}, the group has {wanted.world_size}")
    return wanted.rank_offset + seat.worker


@dataclass(frozen=True)
class Incoming:
    """A tensor that has come. The bytes are the receiver's own: whoever gets them may keep them.

    What was received on an accelerator stays there, as a flat tensor of uint8 that its stream is done with.
    """

    meta: TensorMeta
    raw: HostBytes | DeviceBytes


class Backend(Protocol):
    """One worker's side of a transport. Blocking; every method ends within its deadline or raises PushError.

    `info` is the trainer's own dictionary, JSON and not to be trusted: pydantic.ValidationError where it is wrong.
    """

    def init(self, info: Mapping[str, Any], seat: Seat, deadline_s: float) -> None:
        """Join the trainer's group. Of the same group as before: nothing; of another: leave the old one first."""
        ...

    def announced(self, info: Mapping[str, Any]) -> tuple[TensorMeta, ...]:
        """Which tensors an update call brings; nothing has been received yet."""
        ...

    def receive(self, info: Mapping[str, Any], deadline_s: float) -> Iterator[Incoming]:
        """The tensors of one update call, in the order announced. Not finished: the backend is of no use any more."""
        ...

    def close(self) -> None:
        """Leave the group and give its communicator and memory back. Harmless when repeated."""
        ...
