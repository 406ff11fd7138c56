"""Sender of backend ipc: tensors go through a buffer on the NPU that trainer and engine share, a bufferful per call.

A worker reads from the NPU that it is on, so a rank of the trainer must be there with all tensors: rank 0, which speaks
to the engines, as IpcSender, every other one as IpcPeer. They go through a push in rounds: what fails on one of them is
raised on all, and none waits for the rest.

Each call has a buffer of its own, described by a handle of its own: torch_npu counts one reader of each description,
and gives the buffer back to its cache when that one has let go. Nothing but the buffer is shared. Untested on hardware.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch

from rollfleet_protocol.pushes import LONGEST_WORDS, PACKED_BUFFER_BYTES
from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import Target, settle
from rollfleet_trainer.sender import Sender, first_line
from rollfleet_trainer.tensors import Sent, listed, loads, nbytes
from rollfleet_transport.ipc import buffer_of, described, finish_device_work, npu_name


class Ranks(Protocol):
    """The trainer's own ranks, each on its NPU. Rank 0 speaks to the engines."""

    def gather(self, text: str) -> list[str]:
        """What each rank said, in their order. All call it at the same place; bounded by the group's own timeout."""
        ...


class OneRank:
    """A trainer of one process."""

    def gather(self, text: str) -> list[str]:
        """Its own."""
        return [text]


class GroupRanks:
    """The ranks of a group of torch.distributed; without one, of the default group.

    torch pickles what ranks of one group tell each other this way, as everything else that uses the group.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def gather(self, text: str) -> list[str]:
        """By all_gather_object."""
        found: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(found, text, group=self._group)
        return [str(each) for each in found]


class _Rounds:
    """What all ranks do together."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.over = False  # all have heard of a failure: nobody waits for another round

    def all(self, act: Callable[[], Any], about: Any = None) -> list[Any]:
        """What it gave on each rank, once all are through; what failed on one of them is raised on all."""
        done, failed = None, None
        try:
            done = act()
        except Exception as error:  # noqa: BLE001 - the others wait and must hear of it; it is raised again below
            failed = error
        said = {"done": done, "failed": "" if failed is None else _words(failed), "about": about}
        heard = [json.loads(text) for text in self._ranks.gather(json.dumps(said))]
        found = failed or _failure(heard)
        if found is not None:
            self.over = True
            raise found
        return [each["done"] for each in heard]

    def tell(self, error: Exception) -> None:
        """In place of a round, where the others have not heard of it."""
        if not self.over:
            self._ranks.gather(json.dumps({"failed": _words(error)}))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:LONGEST_WORDS]


def _failure(heard: Sequence[Mapping[str, Any]]) -> Exception | None:
    for rank, each in enumerate(heard):
        if each["failed"]:
            return TransferError(f"rank {rank} of the trainer: {each['failed']}")
    if any(each["about"] != heard[0]["about"] for each in heard):
        return TransferError("the trainer's ranks disagree about names, dtypes or shapes of the tensors")
    return None


def _nothing() -> None:
    """Of a rank that only waits for the others."""


class IpcSender(Sender):
    """As Sender says, to engines on the trainer's own NPUs.

    At most `buffer_bytes` of NPU memory are used, or as much as the largest tensor takes, on the NPU that is current.
    `ranks`: of a trainer with several, each of the others has an IpcPeer.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        group: str = "",
        buffer_bytes: int = PACKED_BUFFER_BYTES,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(targets, group=group, buffer_bytes=buffer_bytes)
        self._rounds = _Rounds(ranks or OneRank())

    def init(self) -> None:
        """Phase 1: there is nothing to form, and ranks are compared."""
        packed = {"packed": True}
        self._rounds.all(
            lambda: self._fan.all(
                lambda target: target.client.init_weight_transfer_engine(packed | self._init_info(target))
            )
        )

    def _joined(self) -> bool:
        return True  # the engines say where it was not called

    def send(
        self, tensors: Mapping[str, torch.Tensor], weight_version: str | None = None, sent: Sent | None = None
    ) -> str:
        """As Sender says; the other ranks are told how it ended."""
        self._rounds.over = False
        try:
            digest = super().send(tensors, weight_version, sent)
        except Exception as error:
            self._rounds.tell(error)
            raise
        self._rounds.all(lambda: digest)
        return digest

    def _send(self, tensors: Mapping[str, torch.Tensor], sent: Sent) -> None:
        for names in loads(tensors, self._buffer_bytes):
            self._send_load({name: tensors[name] for name in names}, sent)

    def _send_load(self, load: Mapping[str, torch.Tensor], sent: Sent) -> None:
        info, kept = listed(load), list[torch.Tensor]()  # a buffer, until every worker has copied it
        told = self._rounds.all(lambda: _share(load, kept, sent), info)
        handles = {npu: handle for each in told for npu, handle in each.items()}
        info |= {"ipc_handles": handles, "tensor_sizes": [nbytes(tensor) for tensor in load.values()]}
        self._rounds.all(lambda: self._call(info))

    def _call(self, info: Mapping[str, Any]) -> None:
        self._update(info)
        settle(self._receiving)

    def _leave(self) -> None:
        """Nothing is held between calls."""


class IpcPeer:
    """Any other rank of the trainer: shares its NPU's buffers, and calls nobody. As IpcSender otherwise."""

    def __init__(self, ranks: Ranks, *, buffer_bytes: int = PACKED_BUFFER_BYTES) -> None:
        self._rounds = _Rounds(ranks)
        self._buffer_bytes = buffer_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held between calls."""

    def init(self) -> None:
        """While rank 0 does."""
        self._rounds.all(_nothing)

    def send(self, tensors: Mapping[str, torch.Tensor], _weight_version: str | None = None) -> str:
        """While rank 0 does, with the same tensors. Returns the digest of what that one sent."""
        for names in loads(tensors, self._buffer_bytes):
            load, kept = {name: tensors[name] for name in names}, list[torch.Tensor]()
            self._rounds.all(lambda load=load, kept=kept: _share(load, kept), listed(load))  # type: ignore[misc]
            self._rounds.all(_nothing)
        return str(self._rounds.all(_nothing)[0])


def _share(load: Mapping[str, torch.Tensor], kept: list[torch.Tensor], sent: Sent | None = None) -> dict[str, Any]:
    """Fill a buffer, keep it, and describe it: this rank's NPU -> handle."""
    buffer = buffer_of(sum(nbytes(each) for each in load.values()))
    kept.append(buffer)
    start = 0
    for name, tensor in load.items():
        part = buffer[start : start + nbytes(tensor)]
        part.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        if sent is not None:
            sent.add(name, tensor, part)
        start += nbytes(tensor)
    finish_device_work()
    return {npu_name(): described(buffer)}
