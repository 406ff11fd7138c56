"""The torch reference of the digest, under the torch that engines run."""

from __future__ import annotations

import os
import subprocess

from devtools import vllm_venv
from devtools.tiny_models import ROOT, source_path

CHECK = """
import json, sys
import numpy as np, torch
from rollfleet_kernels.digest import EmptyInputError, lanes, lanes_torch

for case in json.load(open(sys.argv[1]))["lanes"]:
    if case["wordOffset"] == 0:
        raw = torch.frombuffer(bytearray(bytes.fromhex(case["hex"]) * case.get("times", 1)), dtype=torch.uint8)
        assert [f"{lane:016x}" for lane in lanes_torch(raw)] == case["lanes"], case["name"]
generator = torch.Generator().manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool):
    for shape in ((), (1,), (3,), (5, 7), (64, 33), (2, 3, 4)):
        tensor = (torch.randn(shape, generator=generator) * 50).to(dtype)
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert lanes_torch(tensor) == lanes(raw), (dtype, shape)
strided = torch.randn(16, 16, generator=generator).t()[::2]
assert lanes_torch(strided) == lanes(strided.contiguous().view(-1).view(torch.uint8).numpy())
try:
    lanes_torch(torch.empty(0))
except EmptyInputError:
    print("agreed")
"""


def test_torch_agrees_with_known_answers_and_the_compiled_kernel() -> None:
    interpreter = vllm_venv.ensure() / "bin" / "python"
    known = ROOT / "tests" / "unit" / "kernels" / "known_answers.json"
    done = subprocess.run(
        [str(interpreter), "-c", CHECK, str(known)],
        env=os.environ | {"PYTHONPATH": source_path()},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.strip() == "agreed", done.stderr
