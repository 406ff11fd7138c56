"""What the launcher sees of a real file system, real sockets and real interpreters."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rollfleet_engine
from rollfleet_engine.launch.facts import EngineKind
from rollfleet_engine.launch.look_model import look_at_model
from rollfleet_engine.launch.preflight import KIND_VARIABLE, UnknownEngineError, kind_of, observe, own_paths
from tests.support.ports import free_port
from tests.unit.launch.conftest import write_safetensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_safetensors(folder / "model-1.safetensors")
    return folder


@pytest.fixture
def config(make_config, model: Path, tmp_path: Path):
    tls = tmp_path / "tls"
    tls.mkdir()
    return make_config(
        model={"path": str(model), "servedName": "policy"},
        bindAddress="127.0.0.1",
        servingPort=free_port(),
        controlPort=free_port(),
        tlsDir=str(tls),
        runDir=str(tmp_path),
        checkpointsPath=str(tmp_path / "none"),
    )


def test_kinds():
    assert kind_of({}) is EngineKind.VLLM
    assert kind_of({KIND_VARIABLE: "simulator"}) is EngineKind.SIMULATOR
    with pytest.raises(UnknownEngineError, match="sglang"):
        kind_of({KIND_VARIABLE: "sglang"})


def test_model_folder(model: Path):
    assert look_at_model(model / "none").exists is False
    assert look_at_model(model / "config.json").is_folder is False
    whole = look_at_model(model)
    assert whole.has_config
    assert whole.weight_files == ("model-1.safetensors",)
    assert not whole.missing_files
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert look_at_model(model).missing_files == ("model-2.safetensors",)
    index.write_text("{}")
    assert "weight_map" in look_at_model(model).error
    index.write_text("{")
    assert look_at_model(model).error


def test_a_listener_on_a_port_is_seen(config):
    with socket.socket() as other:
        other.bind(("127.0.0.1", config.serving_port))
        other.listen(1)
        errors = observe(config, {KIND_VARIABLE: "simulator"}).port_errors
    assert set(errors) == {config.serving_port}
    assert "in use" in errors[config.serving_port]
    assert not observe(config, {KIND_VARIABLE: "simulator"}).port_errors


def test_certificate_files(config):
    look = lambda: observe(config, {KIND_VARIABLE: "simulator"}).tls_error  # noqa: E731
    assert look() == "tls.crt not found"
    Path(config.tls_dir, "tls.crt").write_text("x")
    assert look() == "tls.key not found"
    Path(config.tls_dir, "tls.key").write_text("x")
    assert "do not load" in look()


def test_folders(config):
    facts = observe(config, {KIND_VARIABLE: "simulator", "PYTHONPATH": "/evil:/x/../y"})
    assert facts.checkpoints_error == "No such file or directory"
    assert facts.shared_memory_error == ""
    assert facts.run_dir_error == ""
    assert facts.python_path == ("/evil", "/y")
    wrong = config.model_copy(update={"run_dir": "/proc/none"})
    assert observe(wrong, {KIND_VARIABLE: "simulator"}).run_dir_error


def test_an_interpreter_without_vllm_is_asked(config):
    environ = {"PYTHONPATH": os.pathsep.join(own_paths()), "PATH": os.environ["PATH"]}
    installation = observe(config, environ).installation
    assert installation.python == sys.executable
    assert installation.error == ""
    assert installation.release == ""
    assert "uvicorn" not in installation.missing_modules
    nothing = observe(config, environ | {"ROLLFLEET_ENGINE_PYTHON": "/none/python"}).installation
    assert "No such file" in nothing.error


def test_own_paths_hold_our_packages():
    assert any(Path(path, "rollfleet_engine").is_dir() for path in own_paths())


# The modules under test, wherever they were imported from.
MODULES = str(Path(rollfleet_engine.__file__).parents[1])


def _launch(environ: dict[str, str], tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], dict]:
    log = tmp_path / "termination-log"
    done = subprocess.run(
        [sys.executable, "-m", "rollfleet_engine.launch"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": MODULES, "ROLLFLEET_TERMINATION_LOG": str(log)} | environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done, json.loads(log.read_text())


def test_a_broken_configuration_ends_with_78(tmp_path: Path):
    done, message = _launch({"ROLLFLEET_ENGINE_CONFIG": '{"fleet": 1}'}, tmp_path)
    assert done.returncode == 78
    assert message["exitCode"] == 78
    assert "ROLLFLEET_ENGINE_CONFIG at fleet" in message["problems"][0]["cause"]
    assert json.loads(done.stdout.splitlines()[0])["event"] == "problem"


def test_what_a_retry_may_cure_ends_with_75(config, tmp_path: Path):
    environ = {"ROLLFLEET_ENGINE_CONFIG": config.model_dump_json(by_alias=True), KIND_VARIABLE: "simulator"}
    done, message = _launch(environ, tmp_path)
    assert done.returncode == 75, done.stdout
    assert [problem["cause"].split(":")[1].strip() for problem in message["problems"]] == ["tls.crt not found"]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["event"] == "preflight"
    assert seen["versions"] == {"rollfleet-simulator": "0.27.1"}
    assert seen["modelBytes"] == 8
    assert "npus" not in seen
