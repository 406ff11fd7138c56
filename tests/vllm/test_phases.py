"""A phase that fails in whatever way is recorded: a worker that raises would leave the answers of others in their
queues, where they are taken for answers to the next call."""

from __future__ import annotations

import json
import os
import subprocess

from devtools import vllm_venv
from devtools.tiny_models import ROOT, source_path

PROGRAM = """
import json, sys
from types import SimpleNamespace
import rollfleet_engine.vllm.transfer_engine as module

def fail(*_):
    raise MemoryError("no room")

one = object.__new__(module.RollfleetWeightTransferEngine)
one.model = one.model_config = None
one._copy, one._expected = None, {"a": 1}
one._receiving = SimpleNamespace(start=lambda: None, close=lambda: None, finish=lambda: "sha256:d")
one.reset_weight_update_target = lambda: None
for phase, broken in json.loads(sys.argv[1]):
    module.abandon = module.finalize_layerwise_reload = module.process_tied = lambda *_: None
    module.keep_unloadable = lambda _: None
    module.initialize_layerwise_reload = lambda _: None
    module.compare_layers, module.loaded_layers = lambda *_: [], len
    setattr(module, broken, fail)
    one._report = module.Report(started=True, digest="sha256:d")
    getattr(one, phase)()
    print("report", json.dumps(one.report()))
"""
BROKEN = {
    ("start_weight_update", "initialize_layerwise_reload"): "layers could not be made ready for new weights",
    ("finish_weight_update", "compare_layers"): "the update cannot be finished",
    ("finish_weight_update", "keep_unloadable"): "the update cannot be finished",
    ("finish_weight_update", "finalize_layerwise_reload"): "the update cannot be finished",
    ("finish_weight_update", "process_tied"): "the update cannot be finished",
    ("reset", "abandon"): "an update could not be put away",
}


def test_no_phase_raises() -> None:
    command = [str(vllm_venv.ensure() / "bin" / "python"), "-c", PROGRAM, json.dumps(list(BROKEN))]
    environment = os.environ | {"PYTHONPATH": source_path()}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = [line.removeprefix("report ") for line in ended.stdout.splitlines() if line.startswith("report ")]
    for line, words in zip(told, BROKEN.values(), strict=True):
        report = json.loads(line)
        assert report["finished"] is False
        assert report["failure"] == {"reason": "TransferFailed", "message": f"{words}: MemoryError: no room"}
