"""One worker's side of a trainer's pushes: the backend that init named, and what has come of the running update.

Used by vLLM's workers and by the simulator's, so both check and digest alike.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from pydantic import ValidationError

from rollfleet_engine.weights.backends.base import Backend, HostBytes, Incoming, Seat
from rollfleet_engine.weights.backends.registry import make
from rollfleet_engine.weights.coverage import ModelTensors, require_all_came, require_known
from rollfleet_engine.weights.errors import PushError
from rollfleet_kernels.digest import Buffer, DeviceBytes, Lanes, TensorDigest, lanes_on_device, version_digest
from rollfleet_protocol.pushes import TensorMeta

Digest = Callable[[Buffer, int], Lanes]  # of a piece that starts at this word of its tensor


class Receiving:
    """Made once per worker. Raises PushError, and CheckpointError(CoverageFailed) for tensors that do not fit."""

    def __init__(self, model: Callable[[], ModelTensors], seat: Seat, digest: Digest) -> None:
        self._model = model
        self._seat = seat
        self._digest = digest
        self._name = ""
        self._backend: Backend | None = None
        self._received: list[TensorDigest] = []
        self.bytes = 0

    @property
    def received(self) -> tuple[TensorDigest, ...]:
        """What has come since the start."""
        return tuple(self._received)

    def init(self, name: str, info: Mapping[str, Any], deadline_s: float) -> None:
        """Join by this backend; another one that was in use is closed first."""
        if name != self._name or self._backend is None:
            self.close()
            self._backend, self._name = make(name), name
        with _reading(name):
            self._backend.init(info, self._seat, deadline_s)

    def start(self) -> None:
        """A new update: what came of an older one counts no more."""
        self._received, self.bytes = [], 0

    def receive(self, info: Mapping[str, Any], deadline_s: float) -> Generator[Incoming]:
        """One update call: names, dtypes and shapes are compared with the model before the first byte is taken."""
        if self._backend is None:
            raise PushError("no backend: init_weight_transfer_engine comes first")
        whole = False
        try:
            with _reading(self._name):
                metas = self._backend.announced(info)
            require_known({meta.name: (meta.dtype, meta.shape) for meta in metas}, self._model())
            self._require_new(metas)
            for incoming in self._backend.receive(info, deadline_s):
                meta = incoming.meta
                self._received.append(TensorDigest(meta.name, meta.dtype, meta.shape, self._lanes(incoming.raw)))
                self.bytes += meta.nbytes
                yield incoming
            whole = True
        finally:
            if not whole:
                self.close()

    def _lanes(self, raw: HostBytes | DeviceBytes) -> Lanes:
        return self._digest(raw, 0) if isinstance(raw, np.ndarray) else lanes_on_device(raw, self._digest)

    def _require_new(self, metas: tuple[TensorMeta, ...]) -> None:
        came = {tensor.name for tensor in self._received}
        for meta in metas:
            if meta.name in came:
                raise PushError(f"tensor {meta.name} is sent twice in one update")
            came.add(meta.name)

    def finish(self) -> str:
        """Version digest of all that came; the model's every tensor must be among it."""
        require_all_came({tensor.name for tensor in self._received}, self._model())
        return version_digest(self._received)

    def close(self) -> None:
        """Leave the group, so that nobody waits for this worker."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()


@contextmanager
def _reading(backend: str) -> Iterator[None]:
    """What a trainer sent in a wrong form becomes a PushError that names the field."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PushError(f"{backend}: {f'{where}: ' if where else ''}{first['msg']}") from error
