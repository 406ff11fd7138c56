"""Models and checkpoints of the contract suite, with what each of them must answer."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from rollfleet_engine.simulator.model import following_logprobs, greedy
from rollfleet_engine.simulator.tokens import decode, encode
from rollfleet_engine.tools.tiny_model import folder_name, make_simulated
from rollfleet_engine.weights.coverage import read_model_tensors
from rollfleet_engine.weights.staging import stage_checkpoint
from tests.contract.client import PROBE_TOKENS
from tests.support import tiny

SHARDS = 2


def digest_of(folder: Path) -> str:
    """A checkpoint's digest, computed here."""
    staged = stage_checkpoint(folder, ".", read_model_tensors(folder), confined=False)
    staged.close()
    return staged.digest


class Models(ABC):
    """Folders base, step-1, step-2, step-3 below `root`, where tests may add damaged copies."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, version: int) -> Path:
        """A version's checkpoint."""
        return self.root / folder_name(version)

    def digest(self, version: int) -> str:
        """A version's digest."""
        return digest_of(self.folder(version))

    def damaged(self, version: int, how: Callable[[Path], str]) -> tuple[str, str]:
        """A copy of a checkpoint with something wrong: its name, and the file or tensor that a message must name."""
        name = f"{folder_name(version)}-{how.__name__}"
        copy = self.root / name
        if copy.exists():
            shutil.rmtree(copy)
        shutil.copytree(self.folder(version), copy)
        return name, how(copy)

    @property
    @abstractmethod
    def short_prompt(self) -> str:
        """A prompt of a few tokens."""

    @property
    @abstractmethod
    def long_prompt(self) -> str:
        """One that fills a block of the prefix cache."""

    @property
    @abstractmethod
    def longest_answer(self) -> int:
        """Tokens of an answer that are known, of either prompt."""

    @abstractmethod
    def answer(self, version: int, prompt: str) -> str:
        """The only right answer, `longest_answer` tokens of it."""

    @abstractmethod
    def probe(self, version: int) -> tuple[float, ...] | None:
        """Log-probabilities of PROBE_TOKENS where they are known beforehand."""


class SimulatedModels(Models):
    """Random bytes; answers by the simulator's own function."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        make_simulated(root, checkpoints=3, seed=7, shards=SHARDS)

    short_prompt = "What is the answer?"
    long_prompt = "The same long prefix. " * 10
    longest_answer = 200

    def answer(self, version: int, prompt: str) -> str:
        return decode(greedy(self.digest(version), encode(prompt), self.longest_answer))

    def probe(self, version: int) -> tuple[float, ...] | None:
        return following_logprobs(self.digest(version), PROBE_TOKENS)


class TinyModels(Models):
    """A tiny real model; answers as transformers computed them when it was made."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        shutil.copytree(tiny.tiny_model("--checkpoints", "3", "--shards", str(SHARDS)), root, dirs_exist_ok=True)
        prompts = tiny.expected(self.folder(0))["prompts"]
        self._short = min(prompts, key=lambda each: len(each["promptTokenIds"]))["prompt"]
        self._long = max(prompts, key=lambda each: len(each["promptTokenIds"]))["prompt"]

    @property
    def short_prompt(self) -> str:
        return str(self._short)

    @property
    def long_prompt(self) -> str:
        return str(self._long)

    longest_answer = 128

    def answer(self, version: int, prompt: str) -> str:
        prompts = tiny.expected(self.folder(version))["prompts"]
        return str(next(each["text"] for each in prompts if each["prompt"] == prompt))

    def probe(self, version: int) -> tuple[float, ...] | None:
        return None
