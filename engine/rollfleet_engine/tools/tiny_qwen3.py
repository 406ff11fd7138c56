"""A tiny random Qwen3 whose greedy output is known beforehand, whoever computes it.

Random weights alone make near-ties, which another order of summation decides the other way. So many prompts are tried,
and those are kept whose best token leads the second by a wide margin at every step, in every version, and whose first
token differs between all versions: one token of an answer tells which weights gave it. The rows of the head for
end-of-text and padding are zero, so that no answer ends early.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollfleet_engine.tools.checkpoint_files import RawTensor, write_checkpoint
from rollfleet_engine.tools.tiny_model import folder_name

EXPECTED = "expected.json"
# Printable ASCII and the line feed, so that every output is text that survives detokenising token by token.
ALPHABET = "\n" + "".join(chr(code) for code in range(0x20, 0x7F))
END, PAD = len(ALPHABET), len(ALPHABET) + 1
VOCABULARY = len(ALPHABET) + 2  # 98, which vLLM pads to 128: the padded case is always tested
POSITIONS = 2048
OUTPUT_TOKENS = 128
SHORT_PROMPT, LONG_PROMPT = 16, 200  # the long one fills a whole block (128 tokens on CPUs) of the prefix cache
PROMPTS = {SHORT_PROMPT: 6, LONG_PROMPT: 2}
CANDIDATES = {SHORT_PROMPT: 64, LONG_PROMPT: 32}
# Logits have a standard deviation near 1.7, and float32 engines agree to about 1e-5.
MIN_MARGIN = 2e-3
INITIALIZER_RANGE = 0.15
PROBE_TOKENS = 16
SEED_STRIDE = 1009  # versions of one seed must not meet those of another
SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Options:
    """What to make."""

    checkpoints: int = 3
    seed: int = 0
    shards: int = 1
    dtype: str = "float32"
    tied: bool = False


@dataclass(frozen=True)
class Answer:
    """Greedy continuation of one prompt, and how far its closest call was from a tie."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margin: float


def make(out: Path, options: Options) -> float:
    """Write base and checkpoints below `out`; the smallest margin of any expected token."""
    torch.set_num_threads(min(2, torch.get_num_threads()))
    versions = [_model(options, version) for version in range(options.checkpoints + 1)]
    answers = [chosen for length, count in PROMPTS.items() for chosen in _choose(versions, options.seed, length, count)]
    tokenizer = _tokenizer()
    for version, model in enumerate(versions):
        folder = out / folder_name(version)
        write_checkpoint(folder, _raw_tensors(model, options), options.shards)
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        mine = [per_version[version] for per_version in answers]
        expected = _expected(version, model, mine)
        (folder / EXPECTED).write_text(json.dumps(expected, indent=1), encoding="utf-8")
    return min(answer.margin for per_version in answers for answer in per_version)


def _model(options: Options, version: int) -> Any:
    torch.manual_seed(options.seed * SEED_STRIDE + version)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],  # left out, vLLM takes the folder for an embedding model
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        eos_token_id=END,
        pad_token_id=PAD,
        tie_word_embeddings=options.tied,
        initializer_range=INITIALIZER_RANGE,
        dtype=options.dtype,
    )
    model = Qwen3ForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight[END:] = 0
        # Norm weights start as ones; as random as the rest, a wrongly loaded one shows in the output.
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
        for parameter in model.parameters():  # to values that the written dtype holds
            parameter.copy_(parameter.to(getattr(torch, options.dtype)).to(torch.float32))
    return model


def _raw_tensors(model: Any, options: Options) -> dict[str, RawTensor]:
    dtype = getattr(torch, options.dtype)
    raw = {}
    for name, tensor in model.state_dict().items():
        if options.tied and name.startswith("lm_head."):
            continue
        data = tensor.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        raw[name] = RawTensor(SAFETENSORS_DTYPES[dtype], tuple(tensor.shape), data)
    return raw


def _choose(versions: list[Any], seed: int, length: int, count: int) -> list[list[Answer]]:
    """The best prompts of one length, each with its answer in every version."""
    generator = torch.Generator().manual_seed(seed * SEED_STRIDE + length)
    prompts = torch.randint(1, len(ALPHABET), (CANDIDATES[length], length), generator=generator)
    first = torch.stack([_first_tokens(model, prompts) for model in versions], dim=1).tolist()
    distinct = torch.tensor([len(set(tokens)) == len(versions) for tokens in first])
    fit = [list(each) for each in zip(*(_answers(model, prompts[distinct]) for model in versions), strict=True)]
    fit.sort(key=lambda each: -min(answer.margin for answer in each))
    if len(fit) < count or min(answer.margin for answer in fit[count - 1]) < MIN_MARGIN:
        raise RuntimeError(f"seed {seed}: fewer than {count} prompts of {length} tokens are far enough from ties")
    return fit[:count]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _first_tokens(model: Any, prompts: torch.Tensor) -> torch.Tensor:
    return model(prompts).logits[:, -1].argmax(dim=-1)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def _answers(model: Any, prompts: torch.Tensor) -> list[Answer]:
    output = model.generate(prompts, max_new_tokens=OUTPUT_TOKENS, do_sample=False, pad_token_id=PAD)
    length = prompts.shape[1]
    best = model(output).logits[:, length - 1 : -1].topk(2, dim=-1)
    margins = (best.values[..., 0] - best.values[..., 1]).amin(dim=1)
    tokens = output[:, length:]
    # Incremental and whole-sequence decoding sum in different orders: agreeing is part of being far from a tie.
    margins = torch.where((best.indices[..., 0] == tokens).all(dim=1), margins, torch.zeros(()))
    rows = zip(prompts.tolist(), tokens.tolist(), margins.tolist(), strict=True)
    return [Answer(tuple(prompt), tuple(answer), margin) for prompt, answer, margin in rows]


def _expected(version: int, model: Any, answers: list[Answer]) -> dict[str, Any]:
    probe = tuple((7 * step + 3) % len(ALPHABET) for step in range(PROBE_TOKENS))
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([probe])).logits[0], dim=-1)
    following = [float(logprobs[place, token]) for place, token in enumerate(probe[1:])]
    return {
        "version": version,
        "prompts": [
            {
                "prompt": _text(answer.prompt),
                "promptTokenIds": answer.prompt,
                "text": _text(answer.tokens),
                "tokenIds": answer.tokens,
                "margin": round(answer.margin, 6),
            }
            for answer in answers
        ],
        "probe": {"tokens": probe, "logprobs": following},
    }


def _text(tokens: tuple[int, ...]) -> str:
    return "".join(ALPHABET[token] for token in tokens)


def _tokenizer() -> Any:
    """One token per character; what is not in the alphabet reads as a question mark."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = {character: byte_level.pre_tokenize_str(character)[0][0] for character in ALPHABET}
    vocabulary = {names[character]: number for number, character in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<end>": END, "<pad>": PAD}, merges=[], unk_token="?"))  # noqa: S106 - a word of the vocabulary
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<pad>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")  # noqa: S106
    wrapped.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
    )
    return wrapped
