"""Backend hccl by itself, over the stand-in of vLLM-Ascend: `python -m tests.vllm.hccl_scenes SCENE`, with torch.

Each scene is a function below; what it prints is what the test compares.
"""

import json
import os
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import torch
from vllm_ascend.distributed.device_communicators.pyhccl_wrapper import MISSING, HCCLLibrary

from rollfleet_engine.weights.backends.base import Seat
from rollfleet_engine.weights.backends.hccl import HcclBackend
from rollfleet_engine.weights.errors import PushError
from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import Target
from rollfleet_trainer.hccl import HcclSender
from rollfleet_transport.hccl import Communicator, new_id

DEADLINE_S = 2.0


class Engine:
    """Keeps SyncClient over a backend in this process, and what came."""

    def __init__(self, rank_offset: int = 1) -> None:
        self.backend = HcclBackend()
        self.came: dict[str, torch.Tensor] = {}
        self.told = ""
        self.deadline_s = 20.0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._do(lambda: self.backend.init(init_info, Seat(0, 1), self.deadline_s))

    def start_weight_update(self, tensors: dict[str, Any] | None = None, *, whole: bool = True) -> None:
        self.came = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._do(lambda: self._receive(update_info))

    def _receive(self, update_info: dict[str, Any]) -> None:
        for each in self.backend.receive(update_info, self.deadline_s):
            assert isinstance(each.raw, torch.Tensor)
            self.came[each.meta.name] = each.raw

    def finish_weight_update(self, weight_version: str | None = None, digest: str | None = None) -> None: ...

    def abort_weight_update(self, reason: str) -> None:
        self.told = reason

    def _do(self, call: Callable[[], None]) -> None:
        try:
            call()
        except PushError as error:
            raise TransferError(error.message) from error


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def tell(call: Callable[[], object]) -> None:
    """How long it took to fail, and how."""
    began = time.monotonic()
    try:
        call()
    except (PushError, TransferError) as error:
        print(f"{time.monotonic() - began:.2f} {error}")
    else:
        sys.exit("it did not fail")


def every_form() -> None:
    """Odd sizes before wide elements, a scalar, strides, more than a buffer; two engines; buffers of every size."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "bf16": torch.randn(5, 7, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "strided": torch.randn(16, 8, generator=generator).t()[::2],
        "bool": torch.tensor([True, False, True]),
        "large": torch.randn(3000, generator=generator),
        "parameter": torch.nn.Parameter(torch.randn(4, generator=generator)),
    }
    engines = [Engine(), Engine()]
    targets = [Target(engine, rank, 1) for rank, engine in enumerate(engines, 1)]
    for size in (4 << 10, 8 << 10, 1 << 20):
        with HcclSender(targets, buffer_bytes=size) as sender:
            sender.init()
            for _ in range(2):
                assert sender.send(tensors).startswith("sha256:")
                for engine in engines:
                    assert list(engine.came) == list(tensors)
                    assert all(bytes_of(engine.came[name]) == bytes_of(each) for name, each in tensors.items()), size
    print("the same bytes")


def nobody_joins() -> None:
    """The trainer's id is good, and the trainer does not come: the join ends by its deadline."""
    identity = new_id(0)
    info = {"hccl_id": b64encode(identity).decode(), "rank_offset": 1, "world_size": 2}
    backend = HcclBackend()
    tell(lambda: backend.init(info, Seat(0, 1), DEADLINE_S))
    # Now it comes: whoever joined too late has nobody who wants the communicator, and gives it back.
    forming = threading.Thread(target=lambda: formed.append(Communicator(identity, 0, 2, 0)), daemon=True)
    formed: list[Communicator] = []
    forming.start()
    forming.join(10)
    log = os.environ["ROLLFLEET_TEST_HCCL_LOG"]
    ends = time.monotonic() + 10
    while time.monotonic() < ends:
        with open(log, encoding="utf-8") as file:  # noqa: PTH123 - a script
            if "destroy" in file.read():
                print("given back")
                return
        time.sleep(0.05)


def no_engine_joins() -> None:
    """An engine that refuses ends the trainer's waiting at once; one that is silent does up to the trainer's own."""

    class Refusing(Engine):
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            raise TransferError("engine-0: not today")

    class Silent(Engine):
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            threading.Event().wait(DEADLINE_S + 1)

    for engine in (Refusing(), Silent()):
        sender = HcclSender([Target(engine, 1, 1)], timeout_s=DEADLINE_S)
        tell(sender.init)
        print(json.dumps(engine.told))
        sender.close()


def silent_trainer() -> None:
    """It joins, and sends nothing: the receiver ends by its deadline, and the backend can be used again."""
    engine = Engine()
    sender = HcclSender([Target(engine, 1, 1)])
    sender.init()
    update = {"names": ["a"], "dtype_names": ["uint8"], "shapes": [[1 << 20]]}
    tell(lambda: list(engine.backend.receive(update, DEADLINE_S)))
    tell(lambda: list(engine.backend.receive(update, DEADLINE_S)))
    again = Engine()
    with HcclSender([Target(again, 1, 1)]) as other:
        other.init()
        other.send({"a": torch.ones(7)})
    print(bytes_of(again.came["a"]) == bytes_of(torch.ones(7)))


def hanging_destroy() -> None:
    """The library does not come back from leaving a group: neither a join nor an update waits beyond its deadline."""
    ended = threading.Event()

    class Full(Engine):
        def _receive(self, update_info: dict[str, Any]) -> None:
            incoming = self.backend.receive(update_info, DEADLINE_S)
            next(incoming)
            began = time.monotonic()
            incoming.close()  # the model takes no more
            print(f"{time.monotonic() - began:.2f}")
            ended.set()

    engines = [Engine(), Full()]
    senders = [HcclSender([Target(engine, 1, 1)]) for engine in engines]
    for sender in senders:
        sender.init()
    senders[0].send({"a": torch.ones(1)})  # what digests is compiled now
    HCCLLibrary.hcclCommDestroy = lambda *_: threading.Event().wait()  # type: ignore[method-assign]
    info = {"hccl_id": b64encode(new_id(0)).decode(), "rank_offset": 1, "world_size": 2}
    tell(lambda: engines[0].backend.init(info, Seat(0, 1), DEADLINE_S))
    threading.Thread(target=lambda: senders[1].send({"a": torch.ones(1), "b": torch.ones(1)}), daemon=True).start()
    ended.wait(60)


def wrong_ranks() -> None:
    """More workers than the group has places."""
    info = {"hccl_id": b64encode(new_id(0)).decode(), "rank_offset": 2, "world_size": 3}
    tell(lambda: HcclBackend().init(info, Seat(0, 2), DEADLINE_S))


def no_library() -> None:
    """libhccl.so is not there."""
    identity = b64encode(new_id(0)).decode()
    os.environ[MISSING] = "1"
    info = {"hccl_id": identity, "rank_offset": 1, "world_size": 2}
    tell(lambda: HcclBackend().init(info, Seat(0, 1), DEADLINE_S))
    tell(HcclSender([Target(Engine(), 1, 1)]).init)


SCENES = {
    "every-form": every_form,
    "nobody-joins": nobody_joins,
    "no-engine-joins": no_engine_joins,
    "silent-trainer": silent_trainer,
    "hanging-destroy": hanging_destroy,
    "wrong-ranks": wrong_ranks,
    "no-library": no_library,
}

if __name__ == "__main__":
    SCENES[sys.argv[1]]()
    sys.stdout.flush()
    os._exit(0)  # a thread in torch that wakes up while Python ends would abort the process
