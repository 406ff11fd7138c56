"""Trainers of examples/ that end by Ctrl-C or SIGTERM give the Lease back, as a container's first process too.

The API server is a stand-in over HTTP; nobody plays the operator, so they wait with a version asked for.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from devtools import trainer_packages, vllm_venv
from rollfleet_protocol.senders import MESSAGE_ANNOTATION, OFFERS_ANNOTATION
from tests.contract.process import ROOT
from tests.support.http_api import HttpApi, served
from tests.support.memory_api import fleet
from tests.support.tiny import tiny_model

START_S = 120.0  # torch and transformers
END_S = 60.0  # on a busy machine; a pod has terminationGracePeriodSeconds, 30
FIRST = ("unshare", "--fork", "--pid", "--kill-child")  # in a namespace of its own


@pytest.fixture
def api() -> Iterator[HttpApi]:
    with served(fleet(model={"servedName": "policy"})) as one:
        yield one


@pytest.fixture(scope="module")
def model() -> Path:
    if not vllm_venv.is_complete(vllm_venv.venv_path()):
        pytest.skip("no torch: `make vllm-venv` makes it")
    return tiny_model() / "base"


def command(example: str, model: Path, kubeconfig: Path) -> list[str]:
    python = str(vllm_venv.venv_path() / "bin" / "python")
    shared = ["--fleet", "rl/qwen", "--kubeconfig", str(kubeconfig), "--service-account", "grpo"]
    if example == "push":
        return [python, str(ROOT / "examples/push/trainer.py"), *shared, "--checkpoint", str(model)]
    endpoint = ["--endpoint", "http://127.0.0.1:9"]
    return [python, "-m", "examples.training.train", *shared, *endpoint, "--model", str(model)]


def started(words: list[str], folder: Path) -> subprocess.Popen[str]:
    paths = (ROOT, ROOT / "engine", ROOT / "kernels", trainer_packages.ensure())
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, paths)), "HOME": str(folder)}
    return subprocess.Popen(words, env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def can_be_first() -> bool:
    """Namespaces of processes take rights that not every machine gives."""
    return subprocess.run([*FIRST, "true"], capture_output=True, check=False).returncode == 0


def child_of(process: subprocess.Popen[str]) -> int:
    """Of unshare, which hands no signals on."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


@pytest.mark.parametrize("example", ["push", "training"])
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGTERM as first process"])
def test_who_is_asked_to_end_gives_the_lease_back(api: HttpApi, model: Path, example: str, how: str, tmp_path: Path):
    first = how.endswith("first process")
    if first and not can_be_first():
        pytest.skip("this machine gives no PID namespace")
    words = command(example, model, api.kubeconfig(tmp_path / "kubeconfig"))
    process = started([*FIRST, *words] if first else words, tmp_path)
    try:
        assert api.wait_offered(START_S), process.communicate(timeout=END_S)[1]
        number = signal.Signals[how.partition(" ")[0]]
        os.kill(child_of(process) if first else process.pid, number)
        said, errors = process.communicate(timeout=END_S)
    finally:
        process.kill()
    last = errors.splitlines()[-1]
    assert (process.returncode, said) == (130, ""), errors
    assert last.endswith("interrupted; the fleet's sender Lease is given back"), errors
    assert "Traceback" not in errors
    assert api.holder == ""
    assert OFFERS_ANNOTATION not in api.annotations
    assert api.annotations[MESSAGE_ANNOTATION]


def test_a_model_that_is_not_there_is_told_by_its_path(model: Path, tmp_path: Path):
    process = started(command("training", model.parent / "bse", tmp_path / "none"), tmp_path)
    _, errors = process.communicate(timeout=START_S)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == f"train: ValueError: --model {model.parent / 'bse'}: there is no such folder"
    assert "Repo id" not in errors
