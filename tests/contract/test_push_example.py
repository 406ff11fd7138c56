"""examples/push/trainer.py as a user runs it, over every backend that runs without NPUs, to two guards at once.

hccl and ipc run over the stand-ins of vLLM-Ascend and torch_npu. The engines are simulators, started by hand as in
test_hccl.py; the test is the operator, as in sdk_scene.py.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools import vllm_venv
from rollfleet_protocol.state import WeightsState
from rollfleet_trainer.checkpoints import published
from tests.contract.client import STEP_TIMEOUT_S, Client, held
from tests.contract.conftest import SIMULATOR
from tests.contract.models import SimulatedModels
from tests.contract.process import ROOT, EngineProcess, Kind, Site, simulator
from tests.contract.sdk_scene import Process, Scene
from tests.contract.trainer import SUBJECT, UID
from tests.support.ports import free_port
from tests.support.stand_in import stand_in

SCRIPT = ROOT / "examples" / "push" / "trainer.py"
ENGINES = 2
BACKENDS = ("gloo", "shm", "hccl", "ipc")


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> SimulatedModels:
    return SimulatedModels(tmp_path_factory.mktemp("models-push"))


@pytest.fixture(scope="module")
def engines(backend: str, site: Site, simulated: SimulatedModels) -> Iterator[list[EngineProcess]]:
    venv = vllm_venv.venv_path()
    if not vllm_venv.is_complete(venv):
        pytest.skip(f"no torch: `make vllm-venv` makes {venv}")
    python = str(venv / "bin" / "python")
    colocated: dict[str, Any] = {"mode": "Colocated", "sleepMode": True} if backend in ("shm", "ipc") else {}
    made = [
        EngineProcess(
            Kind(SIMULATOR, {"ROLLFLEET_ENGINE": SIMULATOR}, stand_in()),
            site,
            f"push-example-{backend}-{place}",
            simulated.folder(0),
            simulated.root,
            command=lambda config: simulator(config, python=python),
            weightTransfer={"backend": backend},
            podUid=f"pod-{place}",
            **colocated,
        )
        for place in range(ENGINES)
    ]
    try:
        for each in made:
            each.wait_live()
        yield made
    finally:
        for each in made:
            each.stop()


class ExampleScene(Scene):
    """Of one backend."""

    def __init__(self, backend: str, process: Process, *given: Any) -> None:
        super().__init__(*given, process)
        self.backend = backend
        self.do = lambda what, **order: process.do(what, **(order | ({"backend": backend} if what == "open" else {})))

    def order(self, number: int, workers_of_the_last: int = 1) -> None:
        """Transfer: from here on the native routes are open to the trainer."""
        for place, operator in enumerate(self.operators):
            push = {"sender": {"subject": SUBJECT, "uid": UID}, "backend": self.backend, "workers": workers_of_the_last}
            push |= {"rankOffset": 1 + place, "worldSize": 1 + len(self.operators), "holder": self.holder}
            operator.do("transfer", self.epoch, version=number, push=push, deadlineSeconds=STEP_TIMEOUT_S)

    def begin(self, version: int, what: str = "update", **options: Any) -> int:
        """The script asks for a version, whose weights are this checkpoint's; its number."""
        told = self.do(what, checkpoint=str(self.models.folder(version)), step=f"{version}00", **options)
        self.holder = told["holder"]
        return int(told["version"])


@pytest.fixture
def scene(backend: str, engines: list[EngineProcess], site: Site, simulated: SimulatedModels) -> Iterator[ExampleScene]:
    # ipc's stand-in takes a class from vLLM, which would log to the answers
    process = Process("tests.contract.push_example_process", *stand_in(), VLLM_CONFIGURE_LOGGING="0")
    one = ExampleScene(backend, process, engines, site, simulated)
    one.open()
    yield one
    one.close()
    process.close()


def serves(scene: ExampleScene, number: int, version: int) -> None:
    for engine, operator in zip(scene.engines, scene.operators, strict=True):
        assert held(operator.state()) == (WeightsState.VERIFIED, number, scene.models.digest(version))
        client = Client(engine)
        answer = client.complete(scene.models.short_prompt, scene.models.longest_answer)
        client.close_client()
        assert (answer.status, answer.version) == (200, number)
        assert answer.text == scene.models.answer(version, scene.models.short_prompt)


def test_the_script_brings_versions_to_every_engine_and_stores_a_copy(scene: ExampleScene, tmp_path: Path) -> None:
    for version in (1, 2):
        number = scene.begin(version, volume=str(tmp_path))
        scene.succeed(number, version)
        update = scene.do("result")["update"]
        assert (update["version"], update["digest"]) == (number, scene.models.digest(version))
        assert update["digest_source"] == "Trainer"
        assert scene.do("spec")["recovery"] == {"checkpoint": {"path": f"step-{version}00"}}
        serves(scene, number, version)
    assert [each.digest for each in published(tmp_path)] == [scene.models.digest(version) for version in (1, 2)]


@pytest.mark.parametrize(("backend", "sender"), [("gloo", "GlooSender"), ("shm", "ShmSender")], indirect=["backend"])
def test_the_page_s_lines_for_who_sends_by_a_sender_of_ours(scene: ExampleScene, sender: str) -> None:
    """As docs/trainer.md shows them."""
    for version in (1, 2):
        number = scene.begin(version, "page", sender=sender)
        scene.succeed(number, version)
        update = scene.do("result")["update"]
        assert (update["digest"], update["digest_source"]) == (scene.models.digest(version), "Trainer")
        serves(scene, number, version)


@pytest.mark.parametrize("backend", ["gloo", "shm"], indirect=True)
def test_a_trainer_with_a_group_ends_well_without_close(
    backend: str, engines: list[EngineProcess], site: Site, simulated: SimulatedModels
) -> None:
    """tests/process/test_ended_trainers.py has the Lease; here group and connections are let go of."""
    process = Process("tests.contract.push_example_process", *stand_in())
    one = ExampleScene(backend, process, engines, site, simulated)
    one.open()
    one.succeed(one.begin(1), 1)
    assert one.do("result")["update"]["digest"] == simulated.digest(1)
    assert process.close() == 0
    for operator in one.operators:
        operator.close_client()


@pytest.mark.parametrize("backend", ["ipc"], indirect=True)
def test_a_trainer_of_several_ranks_has_one_on_each_npu(scene: ExampleScene) -> None:
    """As torchrun starts them. The engines' workers are on the second one's NPU here, which speaks to nobody."""
    port = free_port()
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "STAND_IN_NPU": "7"}
    number = scene.begin(3, ranks=ranks)
    scene.succeed(number, 3)
    result = scene.do("result")
    assert result["update"]["digest"] == scene.models.digest(3)
    assert (result["peer"]["code"], result["peer"]["said"]) == (0, "{}"), result["peer"]["errors"]
    serves(scene, number, 3)


def test_what_is_wrong_is_a_line_on_the_error_stream_and_the_end(tmp_path: Path) -> None:
    """By the script's own command line."""
    venv = vllm_venv.venv_path()
    if not vllm_venv.is_complete(venv):
        pytest.skip(f"no torch: `make vllm-venv` makes {venv}")
    command = [str(venv / "bin" / "python"), str(SCRIPT), "--fleet", "rl/qwen", "--checkpoint", str(tmp_path)]
    path = f"{ROOT / 'engine'}:{ROOT / 'kernels'}"
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"push: ValueError: {tmp_path} has no *.safetensors"


BUILT_FOR_ANOTHER = """
import torch
torch.accelerator.current_accelerator = lambda *_: torch.device("cuda")  # by its build; is_available looks for a driver
from examples.push.trainer import device, parse
print(device(parse(["--fleet", "rl/qwen", "--checkpoint", "step-1"])))
"""


def test_a_torch_that_was_built_for_an_accelerator_runs_where_there_is_none() -> None:
    venv = vllm_venv.venv_path()
    if not vllm_venv.is_complete(venv):
        pytest.skip(f"no torch: `make vllm-venv` makes {venv}")
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{ROOT / 'engine'}:{ROOT / 'kernels'}"}
    command = [str(venv / "bin" / "python"), "-c", BUILT_FOR_ANOTHER]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "cpu", done.stderr
