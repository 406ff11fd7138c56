"""Move a fleet to the weights that this process holds: `python trainer.py --fleet rl/qwen --checkpoint step-1 ...`

The same script for every backend; which one it is says the fleet: hccl and ipc on NPUs (untested on hardware), gloo
and shm on CPUs. It stands where a training loop would: `weights` is the step's result, `push` is what the loop does to
bring it to the fleet. What the fleet and the trainer's ServiceAccount need is in docs/trainer.md.

Needs rollfleet[trainer], torch and safetensors; hccl and ipc vLLM-Ascend as well.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollfleet_trainer import ProgressLine, RolloutFleet, TrainerError, Update

FLEET_VARIABLE = "ROLLFLEET_FLEET"


def weights(checkpoint: Path, device: str) -> dict[str, torch.Tensor]:
    """What a training step gives: whole tensors, under the names of the model's checkpoint, in its dtypes."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        found |= load_file(file, device=device)
    if not found:
        raise ValueError(f"{checkpoint} has no *.safetensors")
    return found


def device(arguments: argparse.Namespace) -> str:
    """Where the step's result lies."""
    there = torch.accelerator.is_available()  # torch may have been built for one that this machine lacks
    return str(torch.accelerator.current_accelerator()) if there and not arguments.host else "cpu"


def push(fleet: RolloutFleet, arguments: argparse.Namespace) -> Update:
    """Ask for the next version and send it; what came of it."""
    update = fleet.blocking.update(
        weights(arguments.checkpoint, device(arguments)), step=arguments.step, on_progress=ProgressLine()
    )
    if arguments.checkpoints is not None:  # a stored copy: for engines that come later, and to go back to
        fleet.blocking.publish(weights(arguments.checkpoint, "cpu"), arguments.checkpoints, step=arguments.step)
    return update


def push_with_peers(fleet: RolloutFleet, arguments: argparse.Namespace) -> Update | None:
    """By ipc under torchrun: a rank on each NPU that has a worker, with all tensors. Rank 0 alone has an Update."""
    from rollfleet_trainer.ipc import GroupRanks, IpcPeer, IpcSender  # noqa: PLC0415 - the other backends need it not

    if hasattr(torch, "npu"):
        torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=arguments.timeout))
    try:
        tensors = weights(arguments.checkpoint, device(arguments))
        if torch.distributed.get_rank():
            peer = IpcPeer(GroupRanks())
            peer.init()  # waits for rank 0, which waits until all engines are ready
            peer.send(tensors)
            return None
        begun = fleet.begin(step=arguments.step, on_progress=ProgressLine())
        with begun as u, IpcSender([u.as_target], group=u.group, ranks=GroupRanks()) as sender:
            sender.init()
            sender.send(tensors, str(u.version))
        return begun.update
    finally:
        torch.distributed.destroy_process_group()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """What a training loop would know by itself."""
    parser = argparse.ArgumentParser(description="move a fleet to the weights that this process holds")
    default = os.environ.get(FLEET_VARIABLE)
    parser.add_argument("--fleet", default=default, required=not default, help=f"namespace/name; or {FLEET_VARIABLE}")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of safetensors: stands for the step")
    parser.add_argument("--step", default="", help="a label of this version")
    parser.add_argument("--checkpoints", type=Path, help="the fleet's volumes.checkpoints here: publish a copy there")
    parser.add_argument("--kubeconfig", type=Path, help="outside of the cluster; else the pod's ServiceAccount")
    parser.add_argument("--service-account", help="outside of the cluster: as whom to send")
    parser.add_argument("--address", help="gloo: this process's, as the engines reach it; else POD_IP, or found")
    parser.add_argument("--timeout", type=float, default=1800.0, help="ipc: seconds that ranks wait for each other")
    parser.add_argument("--host", action="store_true", help="keep the tensors on the host, and copy one by one")
    return parser.parse_args(argv)


def told(update: Update | None) -> dict[str, Any]:
    """A line for who started it."""
    if update is None:
        return {}
    return {"version": update.version, "digest": update.digest, "pausedSeconds": update.paused_s}


def heed_signals() -> None:
    """SIGTERM as Ctrl-C, which gives the Lease back: the kernel gives a container's first process no other one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background ignores it
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def main(argv: Sequence[str] | None = None) -> int:
    """A line of JSON for what was pushed; or why not, and 1; or 130 where it was interrupted."""
    heed_signals()
    arguments = parse(argv)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    try:
        fleet = RolloutFleet(
            arguments.fleet,
            arguments.kubeconfig,
            service_account=arguments.service_account,
            address=arguments.address,
        )
        with fleet.blocking:
            update = push_with_peers(fleet, arguments) if several else push(fleet, arguments)
    except (TrainerError, ValueError, OSError, ImportError) as error:
        print(f"push: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("push: interrupted; the fleet's sender Lease is given back", file=sys.stderr)
        return 128 + signal.SIGINT
    print(json.dumps(told(update)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
