"""The engine's image: the launcher runs for any user with an empty home, and says what it does or what keeps it."""

import dataclasses
import json
import sys
import time
from pathlib import Path

import pytest

from devcluster import images
from devcluster.paths import Paths
from devtools.tiny_models import tiny_model
from rollfleet_protocol.engine_config import ENGINE_CONFIG_ENV, EngineConfig
from tests.images.conftest import BASE, ROOT
from tests.support.certificates import write_certificate
from tests.support.containers import Container, Image, Pod, run

NOBODY_KNOWN = 70007
HOME, RUN = "/var/lib/rollfleet", "/run/rollfleet"
EMPTY = (HOME, RUN, "/tmp")
START_S = 60.0
_LOOK_S = 0.05


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "fleet": {"namespace": "rl", "name": "qwen", "uid": "f-1"},
            "operator": {"subject": "system:serviceaccount:rollfleet-system:rollfleet-operator", "uid": "o-1"},
            "model": {"path": "/rollfleet/model/base", "servedName": "policy"},
        }
    )


def environ(config: EngineConfig, **more: str) -> dict[str, str]:
    return {ENGINE_CONFIG_ENV: config.model_dump_json(by_alias=True), **more}


def test_users_and_environment(engine_image: Image):
    assert "\nrollfleet:x:65532:65532:" in (engine_image.files / "etc/passwd").read_text()
    assert engine_image.environ["PYTHONPATH"] == "/opt/rollfleet/site"
    caches = ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "ASCEND_PROCESS_LOG_PATH")
    assert all(engine_image.environ[name].startswith(f"{HOME}/") for name in caches)


def test_anybody_may_write_its_caches(engine_image: Image, tmp_path: Path):
    """In the image itself, without an emptyDir: `docker run --user`."""
    code = (
        "import os, pathlib; [pathlib.Path(os.environ[n], 'x').mkdir(parents=True) for n in ('HOME', 'XDG_CACHE_HOME')]"
    )
    assert run(engine_image, Pod(NOBODY_KNOWN, command=["python3", "-c", code], read_only=False), tmp_path) == (0, "")


def test_a_trainer_runs_in_it(engine_image: Image, tmp_path: Path):
    """Jobs of examples/ use it as their image, and so does a trainer that shares the engine's container."""
    code = (
        "import kubernetes.aio, aiohttp, httpx, numba; from rollfleet_trainer import RolloutFleet; RolloutFleet('a/b')"
    )
    assert run(engine_image, Pod(NOBODY_KNOWN, command=["python3", "-c", code]), tmp_path) == (0, "")


def test_without_a_configuration_it_says_what_is_missing(engine_image: Image, tmp_path: Path):
    code, said = run(engine_image, Pod(NOBODY_KNOWN, empty=EMPTY), tmp_path)
    assert code == 78, said
    assert f"{ENGINE_CONFIG_ENV} is not set" in json.loads(said.splitlines()[0])["cause"]


def test_problems_are_told_in_the_termination_message(engine_image: Image, config: EngineConfig, tmp_path: Path):
    """A base without vLLM, no model, no certificate: all at once."""
    message = tmp_path / "message"
    message.touch()
    message.chmod(0o666)
    pod = Pod(NOBODY_KNOWN, environ(config), empty=EMPTY, written={"/dev/termination-log": message})
    code, said = run(engine_image, pod, tmp_path)
    assert code == 78, said
    told = json.loads(message.read_text())
    causes = " ".join(problem["cause"] for problem in told["problems"])
    assert told["exitCode"] == 78
    assert all(
        words in causes for words in ("vLLM is not installed", "does not exist", "tls.crt", "/dev/shm has 64 MiB")
    )
    assert all(problem["remedy"] for problem in told["problems"])


def test_a_simulated_engine_starts_for_anybody_with_an_empty_home(
    engine_image: Image, config: EngineConfig, tmp_path: Path
):
    model = tiny_model(Path(sys.executable), "--simulated", "--checkpoints", "3", "--shards", "2")
    tls = tmp_path / "tls"
    tls.mkdir()
    write_certificate(tls, config.fleet.control_server_name)
    for file in tls.iterdir():
        file.chmod(0o644)
    pod = Pod(
        NOBODY_KNOWN,
        environ(config, ROLLFLEET_ENGINE="simulator"),
        empty=EMPTY,
        mounts={"/rollfleet/model": model, "/etc/rollfleet/tls": tls},
    )
    container = Container(engine_image, pod, tmp_path / "bundle")
    try:
        _until_it_serves(container)
        plan, seen = container.events()[:2]
        assert (plan["event"], plan["engine"]) == ("plan", "simulator")
        assert (seen["event"], seen["platform"]) == ("preflight", "CPU")
        container.signal("TERM")
        container.wait(START_S)
        ended = container.events()[-1]
        assert (ended["event"], ended["askedToStop"], ended["killedAfterGrace"]) == ("engine-ended", True, False)
    finally:
        container.stop()


def _until_it_serves(container: Container) -> None:
    deadline = time.monotonic() + START_S
    while "Application startup complete" not in container.output():
        assert container.process.poll() is None, container.output()
        assert time.monotonic() < deadline, container.output()
        time.sleep(_LOOK_S)


def test_canns_environment_is_set_up_where_the_base_has_it(engine_image: Image, tmp_path: Path):
    """As CANN's own images do in their entry point: the launcher then sees what the file sets."""
    cann = tmp_path / "Ascend"
    for name, words in (
        ("ascend-toolkit/set_env.sh", "export ROLLFLEET_ENGINE=toolkit"),
        ("cann-9.1.0/share/info/ascendnpu-ir/bin/set_env.sh", "export ROLLFLEET_ENGINE=$ROLLFLEET_ENGINE+compiler"),
        ("nnal/atb/set_env.sh", "export ROLLFLEET_ENGINE=$ROLLFLEET_ENGINE+nnal$1"),
    ):
        file = cann / name
        file.parent.mkdir(parents=True)
        file.write_text(f"{words}\n")
    config = json.dumps({"fleet": {"namespace": "a", "name": "b", "uid": "c"},
                         "operator": {"subject": "s", "uid": "u"},
                         "model": {"path": "/m", "servedName": "m"}})  # fmt: skip
    pod = Pod(
        NOBODY_KNOWN, {ENGINE_CONFIG_ENV: config}, empty=EMPTY, mounts={"/usr/local/Ascend": cann}, read_only=False
    )
    code, said = run(engine_image, pod, tmp_path / "bundle")
    assert code == 78
    assert "ROLLFLEET_ENGINE is 'toolkit+compiler+nnal--cxx_abi=1'" in said
    command = [*engine_image.command, "python3", "-c", "import os; print(os.environ['ROLLFLEET_ENGINE'])"]
    code, said = run(engine_image, dataclasses.replace(pod, command=command), tmp_path / "trainer")
    assert (code, said.strip()) == (0, "toolkit+compiler+nnal--cxx_abi=1"), "examples/hccl starts its trainer so"


def test_what_the_base_has_in_pythonpath_stays(paths: Paths, tmp_path: Path):
    """The Dockerfile's own instruction on a base that sets PYTHONPATH, as CANN's does."""
    text = (ROOT / "Dockerfile.engine").read_text()
    (line,) = [each for each in text.splitlines() if each.startswith("ENV PYTHONPATH=")]
    (tmp_path / "Dockerfile").write_text(
        f"ARG BASE\nFROM ${{BASE}}\nENV PYTHONPATH=/usr/local/Ascend/python\n{line.removesuffix(chr(92)).rstrip()}\n"
    )
    tag = "rollfleet/pythonpath:tested"
    images.make(paths, images.Build(tmp_path / "Dockerfile", tag, tmp_path, (BASE,)))
    found = images.configuration(paths, tag)["Env"]
    assert "PYTHONPATH=/opt/rollfleet/site:/usr/local/Ascend/python" in found
