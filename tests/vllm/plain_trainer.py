"""A trainer that updates one vLLM server without a guard as vLLM's examples do, and may leave out or die.

python -m tests.vllm.plain_trainer URL CHECKPOINT [--omit WORD] [--die]: status 0: all
calls were answered by 200.
"""

import argparse
import os
from typing import Any

from tests.bench.loops_trainer import Group, InSequence, Tensors, tensors_of
from tests.vllm.plain_words import DIED


class Dying(InSequence):
    """Its process ends when half of the tensors are there."""

    def send(self, client: Any, group: Group, tensors: Tensors) -> None:
        super().send(client, group, dict(list(tensors.items())[: len(tensors) // 2]))
        os._exit(DIED)


def main() -> None:
    """One update."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("checkpoint")
    parser.add_argument("--omit", help="tensors whose name has this word are not sent")
    parser.add_argument("--die", action="store_true", help="when half of the tensors are there")
    arguments = parser.parse_args()
    tensors = tensors_of(arguments.checkpoint)
    if arguments.omit:
        tensors = {name: each for name, each in tensors.items() if arguments.omit not in name}
    (Dying if arguments.die else InSequence)([arguments.url]).update(tensors)


if __name__ == "__main__":
    main()
