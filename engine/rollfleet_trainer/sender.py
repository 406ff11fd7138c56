"""What senders of all backends have in common: the four phases at all engines, and how a push breaks off."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import torch

from rollfleet_protocol.pushes import LONGEST_WORDS, PACKED_BUFFER_BYTES
from rollfleet_trainer.errors import TrainerError, TransferError
from rollfleet_trainer.fan_out import FanOut, Target, given_up, group_size, settle
from rollfleet_trainer.said import Said
from rollfleet_trainer.taken import first_of, fits
from rollfleet_trainer.tensors import Sent, listed

NOTHING = "there are no tensors to send"


class Sender(ABC):
    """Sends to the engines of one group. A context manager: leaving it gives back what the transport took.

    `group` is the group's epoch, as the engines are told it; `buffer_bytes` bounds what is on its way at a time.
    """

    def __init__(self, targets: Sequence[Target], *, group: str = "", buffer_bytes: int = PACKED_BUFFER_BYTES) -> None:
        self._fan = FanOut(targets)
        self._size = group_size(targets)
        self._name = group
        self._buffer_bytes = buffer_bytes
        self._receiving: Sequence[Future[None]] = ()  # update_weights of every engine, while it runs beside the sending

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def init(self) -> None:
        """Phase 1. Needed at first, after a failure, and whenever an engine's process changed."""

    @abstractmethod
    def _joined(self) -> bool:
        """Whether init has done what sending needs."""

    @abstractmethod
    def _send(self, tensors: Mapping[str, torch.Tensor], sent: Sent) -> None:
        """Phase 3: all tensors to all engines, and into `sent`. RuntimeError where the transport fails."""

    @abstractmethod
    def _leave(self) -> None:
        """Give back what the transport took. Harmless when repeated."""

    def _init_info(self, target: Target) -> dict[str, Any]:
        """What init says to every engine, whatever the backend."""
        return {"group": self._name, "rank_offset": target.rank_offset, "world_size": self._size}

    def send(
        self, tensors: Mapping[str, torch.Tensor], weight_version: str | None = None, sent: Sent | None = None
    ) -> str:
        """Phases 2 to 4. Returns the version digest of what was sent, which every engine's workers agree to.

        sent: of a version that goes out in several parts, what went out before; this part is added to it.
        Raises TransferError with the engines' words, ValueError where there are no tensors, and whatever reading them
        raises. The engines are told of all: none of them waits for the rest.
        """
        if not self._joined():
            raise TransferError("there is no group: init comes first")
        if not tensors:
            self._break_off(NOTHING)
            raise ValueError(NOTHING)
        self._start(tensors)
        sent = Sent() if sent is None else sent
        try:
            self._send(tensors, sent)
        except Exception as error:
            self._break_off(f"{type(error).__name__}: {first_line(error)}")
            if isinstance(error, RuntimeError):
                settle(self._receiving)  # what the engines say of it is the better answer
                raise TransferError(f"sending broke off: {first_line(error)}") from error
            raise
        finally:
            self._receiving = ()
        digest = sent.digest()
        self._fan.all(lambda target: target.client.finish_weight_update(weight_version, digest))
        return digest

    def _start(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Phase 2. An engine that refuses it has left the group, and those that take it wait for nothing more."""
        try:
            coming = Said(listed(tensors))
            whole = fits(coming)
            told = coming if whole else first_of(coming)
            self._fan.all(lambda target: target.client.start_weight_update(told, whole=whole))
        except Exception as error:
            self._give_up_group()
            self._break_off(f"{type(error).__name__}: {first_line(error)}")
            raise

    def _give_up_group(self) -> None:
        """Leave it, where there is one: the engines have. Of no use before the next init."""
        self._receiving = ()

    def _update(self, info: Mapping[str, Any]) -> None:
        """Let every engine receive, in the background: what comes of it is in `_receiving`."""
        told = Said(info)
        self._receiving = self._fan.begin(lambda target: target.client.update_weights(told))

    def _require_takers(self) -> None:
        """RuntimeError where an engine has said that it takes no more: nobody else would end the sending."""
        if words := given_up(self._receiving):
            raise RuntimeError(f"an engine takes no more: {words}")

    def _break_off(self, why: str) -> None:
        """Tell every engine why. One that cannot be told, or has ended the transfer itself, has its own words."""
        words = why[:LONGEST_WORDS]
        for call in self._fan.begin(lambda target: target.client.abort_weight_update(words)):
            if (error := call.exception()) is not None and not isinstance(error, TrainerError):
                raise error

    def close(self) -> None:
        """Of no use any more."""
        self._leave()
        self._fan.close()


def first_line(error: BaseException) -> str:
    """torch adds a stack of addresses below its message."""
    return str(error).partition("\n")[0][:LONGEST_WORDS]
