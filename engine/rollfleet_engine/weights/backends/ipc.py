"""Backend ipc: tensors in the memory of the NPU that trainer and worker share, for colocated fleets.

A handle comes as JSON, is checked to the last value (rollfleet_protocol.ipc), and only numbers and bytes go on. What
vLLM's own HTTP client makes of it, a pickle, is read by vLLM's own class where the spec consents, and what comes out is
checked alike.

The mapping lives while its bytes are copied into the worker's own memory, and no longer: vLLM keeps tensors until their
layer is whole, and the trainer overwrites its buffer when the call is answered. Copying runs in a thread: opening a
handle, and waiting for a trainer's event, may hang.

Importing this needs vLLM-Ascend: elsewhere the registry leaves it out, and says so. Untested on hardware.
"""

from __future__ import annotations

import os
import pickle  # for the name of its error: vLLM's class does the reading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import ValidationError

from rollfleet_engine.weights.backends.base import Incoming, Seat
from rollfleet_engine.weights.backends.hanging import HangingError, within
from rollfleet_engine.weights.errors import PushError
from rollfleet_protocol.ipc import IpcInit, IpcUpdate, Region, plain_handles
from rollfleet_protocol.pushes import LONGEST_WORDS, TensorMeta
from rollfleet_transport.ipc import copied, npu_name, place, unpickled

CONSENT = "VLLM_ALLOW_INSECURE_SERIALIZATION"  # the launcher sets it where the spec consents, and refuses it elsewhere
# What unpickling raises of itself; what the pickled code raises is anything, and told by who called this backend.
_UNREADABLE = (
    *(pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, KeyError, TypeError, ValueError),
)


class IpcBackend:
    """Keeps Backend."""

    def __init__(self) -> None:
        self._joined: IpcInit | None = None

    def init(self, info: Mapping[str, Any], seat: Seat, deadline_s: float) -> None:
        """Only the words are checked: there is nothing to connect."""
        self._joined = IpcInit.model_validate(info)

    def announced(self, info: Mapping[str, Any]) -> tuple[TensorMeta, ...]:
        """As Backend says. Nothing is unpickled yet."""
        return tuple(IpcUpdate.model_validate(info).tensors())

    def receive(self, info: Mapping[str, Any], deadline_s: float) -> Iterator[Incoming]:
        """As Backend says. Tensors stay on the NPU."""
        joined = self._joined
        if joined is None:
            raise PushError("ipc: init_weight_transfer_engine comes first")
        update, ends = IpcUpdate.model_validate(info), time.monotonic() + deadline_s
        if update.ipc_handles_pickled is not None:
            update = _read(update)
        if update.packed is None and update.of_one_buffer != joined.packed:
            form = "one buffer" if update.of_one_buffer else "a tensor each"
            raise PushError(f"ipc: init said packed {joined.packed}, and the handles are of {form}")
        metas, done = update.tensors(), 0
        for region in _regions(update):
            own = _copied(region, ends, f"after {done} of {update.nbytes} bytes")
            for part in _parts(own, region.sizes):
                done += part.numel()
                yield Incoming(next(metas), part)

    def close(self) -> None:
        """Nothing is held between calls."""
        self._joined = None


def _regions(update: IpcUpdate) -> list[Region]:
    try:
        return list(update.regions(npu_name()))
    except ValueError as error:
        raise PushError(f"ipc: {error}") from error


def _copied(region: Region, ends: float, where: str) -> torch.Tensor:
    device, stream = place()
    try:
        return within(ends - time.monotonic(), "rollfleet-ipc-copy", lambda: copied(region, device, stream))
    except (RuntimeError, TypeError, HangingError) as error:  # TypeError: torch_npu takes other arguments
        cause = str(error).partition("\n")[0][:LONGEST_WORDS] or type(error).__name__
        raise PushError(f"ipc: {where}: the trainer's memory cannot be read: {cause}") from error


def _parts(own: torch.Tensor, sizes: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """One by one. Of a buffer each is copied: whoever keeps a small tensor would keep all of the buffer."""
    if len(sizes) == 1:
        yield own
        return
    start = 0
    for size in sizes:
        yield own[start : start + size].clone()
        start += size


def _read(update: IpcUpdate) -> IpcUpdate:
    """The same with handles as JSON has them."""
    if os.environ.get(CONSENT) != "1":
        cure = "send ipc_handles as JSON, or set spec.weightTransfer.insecureSerialization: Allowed"
        raise PushError(f"ipc: ipc_handles_pickled is refused: {cure}")
    words = update.model_dump(include={"names", "dtype_names", "shapes", "tensor_sizes"})
    try:
        return IpcUpdate.model_validate(words | {"ipc_handles": plain_handles(unpickled(update))})
    except _UNREADABLE as error:
        cause = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        raise PushError(f"ipc: ipc_handles_pickled: {cause[:LONGEST_WORDS]}") from error
