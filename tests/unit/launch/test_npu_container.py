"""From files to the plan: a container with NPUs made of folders, looked at and judged as a real one would be."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollfleet_engine.launch.__main__ import tell_guard
from rollfleet_engine.launch.facts import Platform
from rollfleet_engine.launch.plan import Plan, Refused, plan
from rollfleet_engine.launch.preflight import observe, own_paths
from rollfleet_protocol.engine_config import DEVICES_VARIABLE, HOST_ENV, EngineConfig
from rollfleet_protocol.state import Host
from tests.support.certificates import write_certificate
from tests.support.ports import free_port
from tests.unit.launch.conftest import build_config, write_safetensors

ASCEND = "usr/local/Ascend"
PYTHON = f"{ASCEND}/cann-9.1.0/python/site-packages"  # where CANN has modules, and where this container has all
DISTRIBUTIONS = {
    "vllm": "0.27.1+empty",
    "vllm-ascend": "0.25.2rc1.dev80",
    "torch": "2.10.0+cpu",
    "torch-npu": "2.10.0.post4",
    "triton-ascend": "3.2.2",
}


@dataclass
class Container:
    """Its root folder and environment; what is in them is for tests to change."""

    root: Path
    config: EngineConfig
    environ: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, text: str = "") -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def install(self, name: str, version: str) -> None:
        self.put(
            f"{PYTHON}/{name.replace('-', '_')}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        )

    def planned(self) -> Plan | Refused:
        facts = observe(self.config, self.environ, self.root)
        assert facts.platform is Platform.ASCEND
        return plan(self.config, facts)

    def causes(self) -> list[str]:
        found = self.planned()
        return [problem.cause for problem in found.problems] if isinstance(found, Refused) else []


@pytest.fixture
def container(tmp_path: Path) -> Container:
    """In which everything is right."""
    root, tls, model = tmp_path / "root", tmp_path / "tls", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    write_safetensors(model / "model.safetensors")
    write_certificate(tls, "qwen.rl.engine.rollfleet.io")
    config = build_config(
        model={"path": str(model), "servedName": "policy"},
        accelerator={"resourceName": "huawei.com/Ascend910", "perPod": 2},
        bindAddress="127.0.0.1",
        servingPort=free_port(),
        controlPort=free_port(),
        tlsDir=str(tls),
        runDir=str(tmp_path),
    )
    made = Container(root, config)
    for name in ("davinci4", "davinci5", "davinci_manager", "devmm_svm", "hisi_hdc"):
        made.put(f"dev/{name}")
    for folder in ("dev/shm", "tmp", "home"):
        (root / folder).mkdir(parents=True)
    made.put(f"{ASCEND}/driver/version.info", "Version=25.2.0\n")
    made.put(f"{ASCEND}/driver/lib64/driver/libascend_hal.so")
    made.put(f"{ASCEND}/cann-9.1.0/x86_64-linux/ascend_toolkit_install.info", "version=9.1.0\n")
    made.put("sys/fs/cgroup/memory.max", "max\n")
    for name, version in DISTRIBUTIONS.items():
        made.install(name, version)
    made.put(
        f"{PYTHON}/vllm_ascend.dist-info/entry_points.txt", "[vllm.platform_plugins]\nascend = vllm_ascend:register\n"
    )
    made.put(f"{PYTHON}/vllm_ascend/__init__.py")
    made.put(f"{PYTHON}/vllm_ascend/vllm_ascend_C.cpython-312-x86_64-linux-gnu.so")
    made.environ = {
        "PATH": os.environ["PATH"],
        "HOME": "/home",
        "PYTHONPATH": os.pathsep.join((*own_paths(), str(root / PYTHON))),
        "ROLLFLEET_ENGINE_PYTHON": sys.executable,
        "ASCEND_HOME_PATH": "/usr/local/Ascend/cann-9.1.0",
        "ASCEND_DOCKER_RUNTIME": "True",
        "ASCEND_VISIBLE_DEVICES": "4,5",
        DEVICES_VARIABLE: "Ascend910-4,Ascend910-5",
    }
    return made


def test_where_all_is_right_the_engine_is_planned(container: Container):
    found = container.planned()
    assert isinstance(found, Plan), found
    (warning,) = (each for each in found.warnings if "vllm-ascend" in each or "driver" in each)
    assert "a build between releases" in warning
    facts = observe(container.config, container.environ, container.root)
    seen, host = facts.shown(), facts.host()
    assert seen["platform"] == "Ascend"
    assert seen["npus"] == [4, 5]
    assert seen["cann"] == "9.1.0"
    assert seen["versions"] == DISTRIBUTIONS
    assert (host.platform, host.npus, host.software["CANN"]) == ("Ascend", (4, 5), "9.1.0")
    assert DISTRIBUTIONS.items() <= host.software.items()
    assert Host.model_validate_json(tell_guard(found, facts).env[HOST_ENV]) == host


def _remove(name: str) -> Callable[[Container], None]:
    return lambda container: (container.root / name).unlink()


def _set(**variables: str) -> Callable[[Container], None]:
    return lambda container: container.environ.update(variables)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda container: container.put("dev/davinci0"), ["annotation says 4,5", "0 may be another pod's"]),
        (_remove("dev/davinci4"), ["4 are missing"]),
        (_remove("dev/devmm_svm"), ["/dev/devmm_svm"]),
        (_remove(f"{ASCEND}/driver/lib64/driver/libascend_hal.so"), ["libascend_hal.so"]),
        (_set(ASCEND_VISIBLE_DEVICES="0,1"), ["ASCEND_VISIBLE_DEVICES says 0,1"]),
        (_set(ASCEND_RT_VISIBLE_DEVICES="0"), ["ASCEND_RT_VISIBLE_DEVICES is set"]),
        (_set(ASCEND_HOME_PATH="/none"), ["ASCEND_HOME_PATH"]),
        (lambda container: container.install("vllm-ascend", "0.24.0rc1"), ["goes with vLLM 0.24.0"]),
        (lambda container: container.install("torch", "2.9.0"), ["needs torch 2.10.0"]),
        (lambda container: container.put("home/.triton"), ["/home/.triton/cache"]),
        (
            lambda container: container.environ.update(PYTHONPATH=f"{container.environ['PYTHONPATH']}:/elsewhere"),
            ["PYTHONPATH holds /elsewhere"],
        ),
    ],
)
def test_each_fault_is_found(container: Container, change: Callable[[Container], None], words: list[str]):
    change(container)
    causes = container.causes()
    assert causes
    assert any(all(word in cause for word in words) for cause in causes), causes


def test_sleep_mode_asks_for_room(container: Container):
    container.config = container.config.model_copy(update={"sleep_mode": True})
    assert container.causes() == []
    container.put("sys/fs/cgroup/memory.max", "4")
    (cause,) = container.causes()
    assert "sleep level 1" in cause


def test_training_consistency_asks_for_fa3(container: Container):
    flags = {
        "enable_training_consistency": True,
        "enable_batch_invariant": True,
    }  # without rl_config it has the one with the other only
    container.config = EngineConfig.model_validate(container.config.model_dump() | {"rl_config": flags})
    container.put(f"{PYTHON}/batch_invariant_ops.py")
    (cause,) = container.causes()
    assert "No module named 'flash_attn_npu_v3'" in cause
    container.put(f"{PYTHON}/flash_attn_npu_v3.py", "def flash_attn_with_kvcache(): ...\n")
    assert container.causes() == []
