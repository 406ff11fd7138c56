"""Makes a tiny random model and checkpoints of it, offline and the same every time.

    python -m rollfleet_engine.tools.tiny_model OUT --checkpoints 3 --seed 0

gives OUT/base and OUT/step-1 ... OUT/step-3: a Qwen3 of 2 layers with a tokenizer of printable ASCII, each folder a
whole model that vLLM starts from, with an expected.json: what greedy decoding of fixed prompts gives, as computed by
transformers in float32. Needs torch and transformers, which come with vLLM.

With --simulated the folders hold small files of random bytes in the same layout, for simulated engines; no torch then.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from rollfleet_engine.tools.checkpoint_files import RawTensor, write_checkpoint

BASE = "base"
SIMULATED_HIDDEN = 8
SIMULATED_LAYERS = 2
SIMULATED_VOCABULARY = 16


def folder_name(version: int) -> str:
    """Version 0 is the model that engines start from."""
    return BASE if version == 0 else f"step-{version}"


def simulated_shapes() -> dict[str, tuple[int, ...]]:
    """Names as in a Qwen3 checkpoint, with the smallest of shapes."""
    hidden, vocabulary = SIMULATED_HIDDEN, SIMULATED_VOCABULARY
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(SIMULATED_LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (hidden, hidden)
        for name in ("gate_proj", "up_proj", "down_proj"):
            shapes[f"{prefix}.mlp.{name}.weight"] = (hidden, hidden)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def make_simulated(out: Path, *, checkpoints: int, seed: int, shards: int = 1) -> None:
    """Folders for simulated engines: the layout of real ones, random bytes as weights."""
    for version in range(checkpoints + 1):
        numbers = random.Random(f"{seed}/{version}")  # noqa: S311 - weights, not secrets
        tensors = {
            name: RawTensor("F32", shape, numbers.randbytes(4 * _elements(shape)))
            for name, shape in simulated_shapes().items()
        }
        folder = out / folder_name(version)
        write_checkpoint(folder, tensors, shards)
        config = {"architectures": ["SimulatedForCausalLM"], "model_type": "simulated", "tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(description="make a tiny random model and checkpoints of it")
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoints", type=int, default=3, help="step-1 ... step-N beside base")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1, help="files per folder; more than one come with an index")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tied", action="store_true", help="the output head is the embedding and has no tensor")
    parser.add_argument("--simulated", action="store_true", help="for simulated engines: random bytes, no torch")
    arguments = parser.parse_args(argv)
    if arguments.simulated:
        make_simulated(arguments.out, checkpoints=arguments.checkpoints, seed=arguments.seed, shards=arguments.shards)
        return 0
    from rollfleet_engine.tools import tiny_qwen3  # noqa: PLC0415 - needs torch, which simulated engines do without

    options = tiny_qwen3.Options(
        checkpoints=arguments.checkpoints,
        seed=arguments.seed,
        shards=arguments.shards,
        dtype=arguments.dtype,
        tied=arguments.tied,
    )
    margin = tiny_qwen3.make(arguments.out, options)
    print(f"{arguments.out}: {arguments.checkpoints + 1} folders, smallest top-1 margin {margin:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
