"""A trainer that pushes what it is told to, again and again: a process of its own under an interpreter that has torch.

A line of JSON on standard input per push, and lines of JSON for how far it is and what came of it. Tensors are those of
a checkpoint, so that what engines must answer under them is known. They are yielded one by one and sent in several
parts, as by a trainer that gathers shards: in the middle of a pass engines hold some of the old ones and some of the
new. `isWhole`: they are given as one mapping instead. `misnames` and `omits`: tensors that are wrong, or not there.
"""

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollfleet_trainer import RolloutFleet, TrainerError
from rollfleet_trainer.updates import Progress

PARTS = 4  # about
Order = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]


def tell(**words: Any) -> None:
    """A line for the test."""
    print(json.dumps(words), flush=True)


def tensors_of(folder: Path) -> Tensors:
    """All of a checkpoint's."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def passes(tensors: Tensors, pace_s: float) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """One pass for each attempt. The middle is told: the first part is with the engines, the last is not.

    From there on every tensor takes `pace_s`.
    """
    total = sum(each.nbytes for each in tensors.values())

    def one_pass() -> Iterator[tuple[str, torch.Tensor]]:
        gone, told = 0, False
        for name, tensor in tensors.items():
            if told:
                threading.Event().wait(pace_s)
            yield name, tensor.clone()
            gone += tensor.nbytes
            if not told and gone > total / 2:
                told = True
                tell(half=True)

    return one_pass


def push(fleet: RolloutFleet, order: Order) -> dict[str, Any]:
    """Once; how it ended."""
    began_s = time.monotonic()

    def progress(now: Progress) -> None:
        tell(phase=now.phase, attempt=now.attempt)

    wrong, missing = order.get("misnames", ()), order.get("omits", ())
    found = tensors_of(Path(order["folder"])).items()
    tensors = {f"{name}_" if name in wrong else name: tensor for name, tensor in found if name not in missing}
    given = tensors if order.get("isWhole") else passes(tensors, float(order["paceS"]))
    try:
        update = fleet.blocking.update(
            given,
            version=order["version"],
            recovery=order["recovery"],
            spec=order["spec"],
            on_progress=progress,
        )
    except TrainerError as error:
        ended: dict[str, Any] = {"ended": type(error).__name__, "text": str(error)}
    else:
        ended = {"ended": "Active", "version": update.version, "attempts": update.attempts}
    return ended | {"seconds": time.monotonic() - began_s}


def main() -> None:
    """Until standard input ends."""
    logging.basicConfig(level=logging.WARNING, format="trainer: %(asctime)s %(message)s")  # to standard error
    parser = argparse.ArgumentParser()
    parser.add_argument("--fleet", required=True)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--like", type=Path, required=True, help="checkpoint with tensors as large as those to push")
    arguments = parser.parse_args()
    total = sum(each.nbytes for each in tensors_of(arguments.like).values())
    fleet = RolloutFleet(arguments.fleet, arguments.kubeconfig, part_bytes=total // PARTS)
    with fleet.blocking:
        for line in sys.stdin:
            tell(**push(fleet, json.loads(line)))


if __name__ == "__main__":
    main()
