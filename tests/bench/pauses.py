"""`make bench-pauses`: what digest and coverage take of a pause of real vLLM on the CPU.

python -m tests.bench.pauses [-n ROUNDS] [--layers N]

Updates from checkpoints of a Qwen3 whose layers are as wide as those of Qwen3-0.6B, in float32, 50 MiB each, by turns
with digest and coverage and without them; the product has no such switch, the benchmark's own worker extension has
(unchecked_worker.py). A pause is here what the guard calls while the gate is closed: pause, vLLM's four phases as the
adapter records them, dropping of caches, resuming, and the probe. Ends with 1 where they are above a tenth of it.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from devtools.tiny_models import ROOT
from rollfleet_engine.tools.checkpoint_files import RawTensor, write_checkpoint
from tests.support.tiny import source_path, tiny_model
from tests.support.vllm_engine import VllmEngine

MOST_SHARE = 0.1
HIDDEN, INTERMEDIATE, HEADS, KEYS, HEAD = 1024, 3072, 16, 8, 128
PARTS = ("pause", "init", "start", "update", "finish", "reset_caches", "resume", "probe")
PROBE_TOKENS = [1, 2, 3, 5, 7, 11]


def shapes(layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Of a Qwen3's checkpoint."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, HIDDEN)}
    for layer in range(layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        found |= {
            f"{attention}.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{attention}.k_proj.weight": (KEYS * HEAD, HIDDEN),
            f"{attention}.v_proj.weight": (KEYS * HEAD, HIDDEN),
            f"{attention}.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{attention}.q_norm.weight": (HEAD,),
            f"{attention}.k_norm.weight": (HEAD,),
            f"{mlp}.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{mlp}.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{mlp}.down_proj.weight": (HIDDEN, INTERMEDIATE),
            f"model.layers.{layer}.input_layernorm.weight": (HIDDEN,),
            f"model.layers.{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocabulary, HIDDEN)}


def write_model(tiny: Path, folder: Path, layers: int, seed: int) -> int:
    """The tiny model's tokenizer and configuration with wider layers, and random weights; their bytes."""
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "head_dim": HEAD,
        "layer_types": ["full_attention"] * layers,
        "max_window_layers": layers,
    }
    (folder / "config.json").write_text(json.dumps(config | sizes), encoding="utf-8")
    numbers, tensors = np.random.default_rng(seed), {}
    for name, shape in shapes(layers, config["vocab_size"]).items():
        values = numbers.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        tensors[name] = RawTensor("F32", shape, values.tobytes())
    write_checkpoint(folder, tensors, shards=2)
    return sum(len(tensor.data) for tensor in tensors.values())


def one_update(engine: VllmEngine, checkpoint: Path, version: int, *, checked: bool) -> dict[str, float]:
    """Seconds of each part of the pause."""
    seconds: dict[str, float] = {}

    def timed(name: str, **arguments: Any) -> Any:
        began = time.perf_counter()
        answer = engine.call(name, **arguments)
        seconds[name] = time.perf_counter() - began
        return answer

    engine.call("workers", method="leave_out", arguments=[not checked])
    timed("pause")
    done = engine.call("update", path=str(checkpoint), version=version)  # stages too, which is before the pause
    seconds |= done["phase_seconds"]
    timed("reset_caches")
    timed("resume")
    timed("probe", tokens=PROBE_TOKENS)
    return {name: seconds[name] for name in PARTS}


def measure(rounds: int, layers: int, root: Path) -> tuple[int, dict[bool, list[dict[str, float]]]]:
    """Bytes of the weights, and the pauses of both sides in every round after the first, checked ones under True."""
    tiny = tiny_model("--checkpoints", "3", "--shards", "2") / "base"
    size = 0
    for name, seed in (("base", 0), ("step-1", 1), ("step-2", 2)):
        size = write_model(tiny, root / name, layers, seed)
    paths = {"PYTHONPATH": f"{source_path()}{os.pathsep}{ROOT}"}
    extension = {"worker_extension_cls": "tests.bench.unchecked_worker.UncheckedExtension"}
    pauses: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with VllmEngine(root / "base", root / "vllm.log", paths, **extension) as engine:
        for place in range(rounds + 1):  # the first one warms up
            for which, checked in enumerate((True, False) if place % 2 else (False, True)):
                version = 2 * place + which + 1
                pause = one_update(engine, root / f"step-{1 + version % 2}", version, checked=checked)
                if place:
                    pauses[checked].append(pause)
    return size, pauses


def main() -> int:
    """0 where digest and coverage take a tenth of the pause or less."""
    parser = argparse.ArgumentParser(prog="tests.bench.pauses", description="digest and coverage inside a pause")
    parser.add_argument("-n", "--rounds", type=int, default=40)
    parser.add_argument("--layers", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        size, pauses = measure(arguments.rounds, arguments.layers, Path(root))
    print(f"{size >> 20} MiB, {arguments.rounds} rounds; seconds, median (min to max), with the checks and without")
    for name in PARTS:
        print(f"  {name:<13} {told(pauses, lambda each, name=name: each[name])}")  # type: ignore[misc]
    print(f"  {'whole pause':<13} {told(pauses, lambda each: sum(each.values()))}")
    totals = {checked: [sum(each.values()) for each in found] for checked, found in pauses.items()}
    shares = [1 - less / more for more, less in zip(totals[True], totals[False], strict=True)]
    share = statistics.median(shares)
    low, high = statistics.quantiles(shares, n=4)[::2]
    print(f"digest and coverage are {share:.1%} of the pause (half of the rounds: {low:.1%} to {high:.1%})")
    return 0 if share <= MOST_SHARE else 1


def told(pauses: dict[bool, list[dict[str, float]]], value: Callable[[dict[str, float]], float]) -> str:
    """Both sides of one figure."""
    sides = [[value(each) for each in pauses[checked]] for checked in (True, False)]
    return "   ".join(f"{statistics.median(each):8.4f} ({min(each):.4f} to {max(each):.4f})" for each in sides)


if __name__ == "__main__":
    sys.exit(main())
