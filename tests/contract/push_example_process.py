"""examples/push/trainer.py in a process of its own, as sdk_process: its API server is in memory, engines are real.

With two ranks (as torchrun starts them) the second one's process stands on another NPU, by STAND_IN_NPU.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from examples.push import trainer as example
from rollfleet_trainer import Update
from tests.contract.page_process import PAGE, Policy, execute
from tests.contract.sdk_process import Trainer, tensors_of
from tests.support.memory_api import POLICY_PATH
from tests.support.pages import blocks

SECOND_NPU = "0"


class Example(Trainer):
    """The script's own code from its command line on; only where the API server is, is told to it."""

    def update(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Begin; answers once the version is offered."""
        argv = ["--fleet", "rl/qwen", "--checkpoint", order["checkpoint"], "--host", "--step", order["step"]]
        argv += ["--checkpoints", order["volume"]] if "volume" in order else []
        arguments = example.parse(argv)
        self._start(lambda: self._pushed(arguments, several="ranks" in order))
        return self._offered()

    def page(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """docs/trainer.md's lines for who sends by this backend's sender; answers once the version is offered."""
        [block] = [each for each in blocks(PAGE, "python") if order["sender"] in each and "send_weights" not in each]
        names = {"fleet": self.fleet, "policy": Policy(tensors_of(order)), "step": order["step"], "log": print}

        def sent() -> Update:
            execute(block, names)
            update = names["begun"].update
            assert isinstance(update, Update)
            return update

        self._start(sent)
        return self._offered()

    def spec(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """What the WeightVersion asks for."""
        return dict(self.api.objects[POLICY_PATH]["spec"])

    def _pushed(self, arguments: Namespace, *, several: bool) -> Update:
        if not several:
            return example.push(self.fleet, arguments)
        update = example.push_with_peers(self.fleet, arguments)
        assert update is not None
        return update


def second(order: Mapping[str, Any]) -> subprocess.Popen[str]:
    """The other rank: by the script's main, which speaks to no cluster there."""
    environ = {**os.environ, **order["ranks"], "RANK": "1", "LOCAL_RANK": "1", "STAND_IN_NPU": SECOND_NPU}
    command = [sys.executable, example.__file__, "--fleet", "rl/qwen", "--checkpoint", order["checkpoint"], "--host"]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def main() -> None:
    """Orders in, answers out; what libraries print goes elsewhere."""
    answers, sys.stdout = sys.stdout, sys.stderr
    trainer: Example | None = None
    peer: subprocess.Popen[str] | None = None
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        if order["do"] == "open":
            trainer = Example(order, 0)
        elif order["do"] == "update" and "ranks" in order:
            peer = second(order)
            os.environ.update(order["ranks"] | {"RANK": "0", "LOCAL_RANK": "0"})
            answer = getattr(trainer, order["do"])(order)
        else:
            answer = getattr(trainer, order["do"])(order)
        if order["do"] == "result" and peer is not None:
            said, errors = peer.communicate(timeout=60)
            answer["peer"] = {"code": peer.returncode, "said": said.strip(), "errors": errors[-2000:]}
            peer = None
        print(json.dumps(answer, default=str), file=answers, flush=True)


if __name__ == "__main__":
    main()
