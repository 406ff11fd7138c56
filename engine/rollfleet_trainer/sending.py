"""From a trainer's tensors to the engines of one attempt, by the fleet's backend.

What lasts over several updates is the line: connections, and the group of the processes at both ends. It is kept while
they stay the same, and torn down after every failure.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from rollfleet_protocol.engine_config import FleetIdentity
from rollfleet_trainer.client import GuardClient
from rollfleet_trainer.errors import NotPossible
from rollfleet_trainer.fan_out import Target
from rollfleet_trainer.looks import Seat
from rollfleet_trainer.push import Door, Push, group_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rollfleet_trainer.sources import Weighed
    from rollfleet_trainer.tensors import Sent

SENDERS = {  # classes of the modules of those names
    "gloo": "GlooSender",
    "hccl": "HcclSender",
    "ipc": "IpcSender",
    "shm": "ShmSender",
}
COLLECTIVE_S = 60.0  # of the forming of a group, and of a broadcast; less where the transfer's own deadline is near
ANSWER_S = 15.0  # beyond the transfer's deadline: a guard answers by then, with the reason
ADDRESS_VARIABLE = "POD_IP"  # by the downward API, where a pod has several addresses


class Sender(Protocol):
    """What a backend's module has for `update`."""

    def init(self) -> None: ...

    def send(
        self, tensors: Mapping[str, torch.Tensor], weight_version: str | None = None, sent: Sent | None = None
    ) -> str: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Fleet:
    """What a sender needs to know of a fleet."""

    identity: FleetIdentity
    backend: str
    ca: str  # PEM
    holder: str  # of the sender's Lease
    transfer_s: float


class Line:
    """The way to the engines of one group. close() when it has ended."""

    def __init__(
        self, fleet: Fleet, seats: Sequence[Seat], bearer: Callable[[str], str], address: str | None = None
    ) -> None:
        self.key = key_of(fleet, seats)
        self.group = group_name(fleet.holder, seats)
        self._fleet, self._seats, self._address = fleet, tuple(seats), address
        self._guards = [self._guard(seat, bearer) for seat in seats]
        self._doors = [Door(guard) for guard in self._guards]
        self._sender: Sender | None = None

    def _guard(self, seat: Seat, bearer: Callable[[str], str]) -> GuardClient:
        identity = self._fleet.identity
        audience = identity.audience(seat.pod_uid)
        return GuardClient(
            seat.url,
            lambda: bearer(audience),
            ca=self._fleet.ca,
            server_name=identity.control_server_name,
            timeout_s=self._fleet.transfer_s + ANSWER_S,
            name=seat.name,
            holder=self._fleet.holder,
        )

    def begin(self, version: int, may_send: Callable[[], None]) -> Push:
        """A push over this line."""
        return Push(version, self._seats, self._doors, self.group, may_send, self._cut, self._own_address)

    def _own_address(self) -> str:
        return self._address or own_address(self._seats)

    def _cut(self) -> None:
        for guard in self._guards:
            guard.cut()

    def send(self, push: Push, tensors: Iterator[Weighed], part_bytes: int, progress: Callable[[int], None]) -> str:
        """All of them, in parts. Returns their digest; after an error the line is of no use any more."""
        from rollfleet_trainer.sources import parts  # noqa: PLC0415 - needs torch
        from rollfleet_trainer.tensors import Sent  # noqa: PLC0415

        def tick(nbytes: int) -> None:
            push.took(nbytes)
            progress(push.sent_bytes)

        digest, sent = "", Sent()
        if self._sender is None:
            self._sender = self._made(push.doors)
            self._sender.init()
        for part, is_last in parts(tensors, tick, part_bytes):
            if not part:
                raise NotPossible("there are no tensors to send")
            push.more_follows = not is_last
            digest = self._sender.send(part, str(push.version), sent)
        push.finished = True
        return digest

    def _made(self, targets: Sequence[Target]) -> Sender:
        backend, options = self._fleet.backend, dict[str, Any](group=self.group)
        require_sender(backend)
        if backend in ("gloo", "hccl"):
            options["timeout_s"] = min(COLLECTIVE_S, self._fleet.transfer_s / 2)
        if backend == "gloo":
            options["address"] = self._own_address()
        try:
            module = importlib.import_module(f"rollfleet_trainer.{backend}")
        except ImportError as error:
            raise NotPossible(
                f"spec.weightTransfer.backend is {backend}, and this trainer lacks it: {error}"
            ) from error
        sender: Sender = getattr(module, SENDERS[backend])(targets, **options)
        return sender

    def close(self) -> None:
        """Let go of group and connections."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        for guard in self._guards:
            guard.close()


def require_sender(backend: str, ranks: int = 1) -> None:
    """NotPossible where `update` cannot send by this backend. `ranks`: of the trainer."""
    if not backend:
        raise NotPossible("the fleet's RolloutEngine has no spec.weightTransfer.backend, so it takes no pushes")
    told = f"spec.weightTransfer.backend is {backend!r}"
    if backend not in SENDERS:
        raise NotPossible(
            f"{told}, and update sends by {', '.join(SENDERS)} only: use begin, and send by that backend's own helpers"
        )
    if backend == "ipc" and ranks > 1:
        raise NotPossible(
            f"{told}: each rank of the trainer shares memory of its own NPU, and update speaks for one process only: "
            "use begin with ipc.IpcSender on rank 0, and ipc.IpcPeer on the others"
        )


def key_of(fleet: Fleet, seats: Iterable[Seat]) -> tuple[object, ...]:
    """What a line depends on: it is kept while this is the same."""
    return (fleet, tuple(seats))


def own_address(seats: Sequence[Seat]) -> str:
    """This process's address as the engines reach it: by $POD_IP, else by which way the first of them is reached."""
    if named := os.environ.get(ADDRESS_VARIABLE):
        return named
    host = urlsplit(seats[0].url).hostname or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as looking:
        looking.connect((host, 9))  # sends nothing
        return str(looking.getsockname()[0])
