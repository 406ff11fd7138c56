"""Push one version of the weights to the engines of a fleet: `python trainer.py --backend hccl --fleet fleet.json ...`.

The same script for every backend: hccl and ipc on NPUs (untested on hardware), gloo and shm on CPUs. It stands where a
training loop would: `weights` is the step's result, everything below it is what the loop does to bring it to the fleet.
No object of this release asks for a push, so what a loop will read from a WeightVersion's status is given in a file:

    {"serverName": "qwen.rl.engine.rollfleet.io", "caFile": "ca.pem",
     "engines": [{"name": "qwen-0", "url": "https://10.0.0.7:8001", "tokenFile": "qwen-0.token",
                  "rankOffset": 1, "workers": 8}]}

Token files are read again before every call: tokens live 15 minutes at most. Needs rollfleet[trainer], torch and
safetensors; hccl and ipc vLLM-Ascend as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollfleet_trainer.client import GuardClient
from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import Target
from rollfleet_trainer.sender import Sender

BACKENDS = {  # imported only when asked for: each needs something else
    "gloo": "rollfleet_trainer.gloo:GlooSender",
    "hccl": "rollfleet_trainer.hccl:HcclSender",
    "ipc": "rollfleet_trainer.ipc:IpcSender",
    "shm": "rollfleet_trainer.shm:ShmSender",
}
ON_NPU = ("hccl", "ipc")
FLEET_VARIABLE = "ROLLFLEET_FLEET"


def weights(checkpoint: Path, device: str) -> dict[str, torch.Tensor]:
    """What a training step gives: whole tensors, under the names of the model's checkpoint, in its dtypes."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        found |= load_file(file, device=device)
    if not found:
        raise ValueError(f"{checkpoint} has no *.safetensors")
    return found


def targets(fleet: dict[str, Any], folder: Path, timeout_s: float) -> list[Target]:
    """A client for each engine's guard. Files are relative to where the fleet's own file lies."""
    ca = (folder / fleet["caFile"]).read_text(encoding="utf-8")

    def client(engine: dict[str, Any]) -> GuardClient:
        token = _reader(folder / engine["tokenFile"])
        name = engine["name"]
        return GuardClient(engine["url"], token, ca=ca, server_name=fleet["serverName"], timeout_s=timeout_s, name=name)

    return [Target(client(engine), engine["rankOffset"], engine["workers"]) for engine in fleet["engines"]]


def _reader(file: Path) -> Callable[[], str]:
    return lambda: file.read_text(encoding="utf-8").strip()


def sender(arguments: argparse.Namespace, engines: Sequence[Target]) -> Any:
    """The backend's, with what it needs beside the engines."""
    module, _, name = BACKENDS[arguments.backend].partition(":")
    made: Callable[..., Sender] = getattr(import_module(module), name)
    options: dict[str, Any] = {"group": arguments.group, "buffer_bytes": arguments.buffer_mib << 20}
    if arguments.backend == "gloo":
        return made(engines, arguments.address, timeout_s=arguments.timeout / 2, **options)
    if arguments.backend == "hccl":
        return made(engines, timeout_s=arguments.timeout / 2, **options)
    if arguments.backend == "ipc" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return one_of_several(options, engines)
    return made(engines, **options)


def one_of_several(options: dict[str, Any], engines: Sequence[Target]) -> Any:
    """Of ipc under torchrun: a rank on each NPU that has a worker. The first speaks to the engines for all."""
    ipc = import_module("rollfleet_trainer.ipc")
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank():
        return ipc.IpcPeer(ipc.GroupRanks(), buffer_bytes=options["buffer_bytes"])
    return ipc.IpcSender(engines, ranks=ipc.GroupRanks(), **options)


def push(arguments: argparse.Namespace) -> dict[str, Any]:
    """All phases; what came of it. The operator has closed and armed the engines, and named us as the sender."""
    fleet = json.loads(arguments.fleet.read_text(encoding="utf-8"))
    engines = targets(fleet, arguments.fleet.parent, arguments.timeout)
    began = time.monotonic()
    with sender(arguments, engines) as sending:
        tensors = weights(arguments.checkpoint, "npu" if arguments.backend in ON_NPU and not arguments.host else "cpu")
        sending.init()
        digest = sending.send(tensors, str(arguments.version))
    return {"version": arguments.version, "digest": digest, "seconds": round(time.monotonic() - began, 3)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """What a training loop would know by itself."""
    parser = argparse.ArgumentParser(description="push one version of the weights to the engines of a fleet")
    default = os.environ.get(FLEET_VARIABLE)
    parser.add_argument("--backend", choices=sorted(BACKENDS), required=True)
    parser.add_argument("--fleet", type=Path, default=default, required=not default, help=f"or {FLEET_VARIABLE}")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of safetensors: stands for the step")
    parser.add_argument("--version", type=int, required=True, help="the version that the operator has armed")
    parser.add_argument("--address", default="127.0.0.1", help="gloo: this process's, as the engines reach it")
    parser.add_argument("--group", default="", help="the group's epoch: an init of the same one keeps its communicator")
    parser.add_argument("--buffer-mib", type=int, default=64, help="of each buffer, 64 by default")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a call; below the transfer's deadline")
    parser.add_argument(
        "--host", action="store_true", help="hccl, ipc: keep the tensors on the host, and copy one by one"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """A line of JSON for what was pushed; or why not, and 1."""
    arguments = parse(argv)
    try:
        print(json.dumps(push(arguments)), flush=True)
    except (TransferError, ValueError, KeyError, OSError, ImportError) as error:
        print(f"push: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
