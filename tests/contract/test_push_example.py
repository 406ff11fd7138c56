"""examples/push/trainer.py as a user runs it, over every backend that runs without NPUs, to two guards at once.

hccl and ipc run over the stand-ins of vLLM-Ascend and torch_npu. The engines are simulators, started by hand as in
test_hccl.py.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools import vllm_venv
from rollfleet_protocol.state import OperationStatus, WeightsState
from tests.contract.client import STEP_TIMEOUT_S, Client, Operator, held, operation_of
from tests.contract.conftest import SIMULATOR
from tests.contract.models import SimulatedModels
from tests.contract.process import ROOT, EngineProcess, Kind, Site, free_ports, simulator
from tests.contract.trainer import SUBJECT, UID

STAND_IN = ROOT / "tests" / "support" / "ascend"
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
            Kind(SIMULATOR, {"ROLLFLEET_ENGINE": SIMULATOR}, (STAND_IN,)),
            site,
            f"push-example-{backend}-{place}",
            simulated.folder(0),
            simulated.root,
            command=lambda config: simulator(config, python=python),
            weightTransfer={"backend": backend},
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


@pytest.fixture(scope="module")
def operators(engines: list[EngineProcess], site: Site) -> Iterator[list[Operator]]:
    made = [Operator(each, site) for each in engines]
    yield made
    for each in made:
        each.close_client()


def armed(operators: list[Operator], backend: str, version: int) -> int:
    """Every engine closed and armed, and told who sends: the operator's part."""
    epoch = max(each.next_epoch() for each in operators)
    for each in operators:
        each.close(epoch, version)
        each.do("arm", epoch)
    for place, each in enumerate(operators):
        push = {"sender": {"subject": SUBJECT, "uid": UID}, "backend": backend, "workers": 1}
        push |= {"rankOffset": 1 + place, "worldSize": 1 + len(operators)}
        each.do("transfer", epoch, version=version, push=push, deadlineSeconds=STEP_TIMEOUT_S)
    return epoch


def fleet_file(folder: Path, engines: list[EngineProcess], operators: list[Operator], site: Site) -> Path:
    """As a user writes it down from the fleet's status."""
    (folder / "ca.pem").write_bytes(site.authority.pem)
    listed = []
    for place, (engine, operator) in enumerate(zip(engines, operators, strict=True)):
        (folder / f"engine-{place}.token").write_text(operator.make_token(subject=SUBJECT, uid=UID) + "\n")
        row = {"name": f"engine-{place}", "url": engine.control_url, "tokenFile": f"engine-{place}.token"}
        listed.append(row | {"rankOffset": 1 + place, "workers": 1})
    server = engines[0].config.fleet.control_server_name
    file = folder / "fleet.json"
    file.write_text(json.dumps({"serverName": server, "caFile": "ca.pem", "engines": listed}))
    return file


def begin(
    fleet: Path, backend: str, checkpoint: Path, version: int, **more: str
) -> tuple[list[str], dict[str, str], Path]:
    """Command, environment and folder of one process."""
    command = [str(vllm_venv.venv_path() / "bin" / "python"), str(SCRIPT), "--backend", backend, "--host"]
    command += ["--checkpoint", str(checkpoint), "--version", str(version), "--timeout", "40"]
    path = f"{ROOT / 'engine'}:{ROOT / 'kernels'}:{STAND_IN}"
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "ROLLFLEET_FLEET": str(fleet)}
    environ["VLLM_CONFIGURE_LOGGING"] = "0"  # ipc's stand-in takes a class from vLLM, which would log to the answers
    return command, environ | more, fleet.parent


def run(fleet: Path, backend: str, checkpoint: Path, version: int) -> subprocess.CompletedProcess[str]:
    command, environ, folder = begin(fleet, backend, checkpoint, version)
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_the_script_brings_a_version_to_every_engine(
    engines: list[EngineProcess],
    operators: list[Operator],
    site: Site,
    simulated: SimulatedModels,
    backend: str,
    tmp_path: Path,
) -> None:
    fleet = fleet_file(tmp_path, engines, operators, site)
    for version in (1, 2):
        epoch = armed(operators, backend, version)
        done = run(fleet, backend, simulated.folder(version), version)
        assert done.returncode == 0, done.stderr[-3000:]
        told = json.loads(done.stdout)
        assert (told["version"], told["digest"]) == (version, simulated.digest(version))
        for engine, operator in zip(engines, operators, strict=True):
            state = operator.state()
            assert operation_of(state).status is OperationStatus.SUCCEEDED
            operator.verify(epoch, version, told["digest"])
            state = operator.do("open", epoch, version=version, digest=told["digest"])
            assert held(state) == (WeightsState.VERIFIED, version, simulated.digest(version))
            client = Client(engine)
            answer = client.complete(simulated.short_prompt, simulated.longest_answer)
            client.close_client()
            assert (answer.status, answer.version) == (200, version)
            assert answer.text == simulated.answer(version, simulated.short_prompt)


@pytest.mark.parametrize("backend", ["ipc"], indirect=True)
def test_a_trainer_of_several_ranks_has_one_on_each_npu(
    engines: list[EngineProcess],
    operators: list[Operator],
    site: Site,
    simulated: SimulatedModels,
    backend: str,
    tmp_path: Path,
) -> None:
    """As torchrun starts them. The engines' workers are on the second one's NPU here, which speaks to nobody."""
    fleet = fleet_file(tmp_path, engines, operators, site)
    epoch, digest = armed(operators, backend, 3), simulated.digest(3)
    [port] = free_ports(1)
    ranks = []
    for rank, npu in ((0, "7"), (1, "0")):
        group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "STAND_IN_NPU": npu}
        group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command, environ, folder = begin(fleet, backend, simulated.folder(3), 3, **group)
        process = subprocess.Popen(
            command, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        ranks.append(process)
    for process in ranks:
        told, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-3000:]
        assert json.loads(told)["digest"] == digest
    for operator in operators:
        assert operation_of(operator.state()).status is OperationStatus.SUCCEEDED
        operator.verify(epoch, 3, digest)
        state = operator.do("open", epoch, version=3, digest=digest)
        assert held(state) == (WeightsState.VERIFIED, 3, digest)


def test_what_the_engines_refuse_is_told_with_their_names(
    engines: list[EngineProcess],
    operators: list[Operator],
    site: Site,
    simulated: SimulatedModels,
    backend: str,
    tmp_path: Path,
) -> None:
    """Nobody has armed them: no call is taken, and the script ends with 1."""
    done = run(fleet_file(tmp_path, engines, operators, site), backend, simulated.folder(3), 3)
    assert done.returncode == 1
    assert "push: TransferError: " in done.stderr
    assert "engine-0: init_weight_transfer_engine: " in done.stderr
    assert "does not control this engine" in done.stderr
