"""What the launcher sees of devices, driver, cgroups, caches and models: real files below a made-up root."""

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfleet_engine.launch.facts import AscendSoftware, Memory, Platform
from rollfleet_engine.launch.look_ascend import look_at_devices, look_at_software, python_folders
from rollfleet_engine.launch.look_memory import look_at_memory
from rollfleet_engine.launch.look_model import look_at_model
from rollfleet_engine.launch.preflight import ask_flash_attention, look_at_caches
from rollfleet_protocol.engine_config import DEVICES_VARIABLE
from tests.unit.launch.conftest import write_safetensors


def put(root: Path, name: str, text: str = "") -> Path:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_devices_of_a_container(tmp_path: Path):
    for name in ("davinci3", "davinci10", "davinci_manager", "devmm_svm", "hisi_hdc", "null", "davinci", "xdavinci1"):
        put(tmp_path, f"dev/{name}")
    found = look_at_devices(
        tmp_path,
        {
            DEVICES_VARIABLE: "Ascend910-3,Ascend910-10",
            "ASCEND_VISIBLE_DEVICES": "3,10",
            "ASCEND_RT_VISIBLE_DEVICES": "0",
            "ASCEND_DOCKER_RUNTIME": "True",
        },
    )
    assert found.numbers == (3, 10)
    assert found.managers == ("davinci_manager", "devmm_svm", "hisi_hdc")
    assert (found.announced, found.visible, found.remapped) == ("Ascend910-3,Ascend910-10", "3,10", "0")
    assert found.runtime
    assert found.closed == ()


def test_a_container_without_devices(tmp_path: Path):
    found = look_at_devices(tmp_path, {})
    assert (found.numbers, found.managers, found.announced) == ((), (), "")
    assert (found.visible, found.remapped, found.runtime) == (None, None, False)


def test_a_device_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path, "dev/davinci0")
    put(tmp_path, "dev/davinci1")
    # Root may open everything, so the kernel's answer to another user is put in its place.
    monkeypatch.setattr(os, "access", lambda path, _mode: not str(path).endswith("davinci1"))
    assert look_at_devices(tmp_path, {}).closed == ("/dev/davinci1",)


def test_driver_and_toolkit(tmp_path: Path):
    put(tmp_path, "usr/local/Ascend/driver/version.info", "Version=25.2.0\nascendhal_version=7.35.23\n")
    put(tmp_path, "usr/local/Ascend/driver/lib64/driver/libascend_hal.so")
    put(
        tmp_path,
        "usr/local/Ascend/cann-9.1.0/aarch64-linux/ascend_toolkit_install.info",
        "package_name=x\nversion=9.1.0\n",
    )
    found = look_at_software(tmp_path, {"ASCEND_HOME_PATH": "/usr/local/Ascend/cann-9.1.0"})
    assert found == AscendSoftware(cann="9.1.0", driver="25.2.0", has_libraries=True, toolkit_set=True)


def test_a_toolkit_that_no_variable_names(tmp_path: Path):
    put(tmp_path, "usr/local/Ascend/ascend-toolkit/latest/ascend_toolkit_install.info", "version=9.0.1\n")
    found = look_at_software(tmp_path, {})
    assert found == AscendSoftware(cann="9.0.1", driver="", has_libraries=False, toolkit_set=False)
    assert not look_at_software(tmp_path, {"ASCEND_HOME_PATH": "/none"}).toolkit_set


def test_only_canns_folders_pass_beside_ours(tmp_path: Path):
    cann = tmp_path / "usr/local/Ascend/cann-9.1.0/python/site-packages"
    beside = str(tmp_path / "usr/local/AscendX/site-packages")
    assert python_folders(tmp_path, (str(cann), beside, "/opt/rollfleet/site")) == (str(cann),)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"sys/fs/cgroup/memory.max": "1073741824\n"}, 2**30),
        ({"sys/fs/cgroup/memory.max": "max\n", "proc/meminfo": "MemTotal:       2097152 kB\n"}, 2**31),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "536870912\n"}, 2**29),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "proc/meminfo": "MemFree: 1 kB\nMemTotal:       4 kB\n",
            },
            4096,
        ),
        ({"sys/fs/cgroup/memory.max": "4294967296", "proc/meminfo": "MemTotal: 1048576 kB"}, 2**30),
        ({}, None),
        ({"sys/fs/cgroup/memory.max": "", "proc/meminfo": "MemTotal:"}, None),
        ({"sys/fs/cgroup/memory.max": "-5"}, None),
    ],
)
def test_memory_limits(tmp_path: Path, files: dict[str, str], limit: int | None):
    for name, text in files.items():
        put(tmp_path, name, text)
    assert look_at_memory(tmp_path) == Memory(limit=limit)


def test_shared_memory_of_a_real_file_system(tmp_path: Path):
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = look_at_memory(tmp_path)
    assert found.shared_total is not None
    assert found.shared_free is not None
    assert 0 < found.shared_free <= found.shared_total


@given(limit=st.binary(max_size=64), node=st.binary(max_size=64))
def test_no_content_of_a_cgroup_file_is_too_odd(tmp_path_factory: pytest.TempPathFactory, limit: bytes, node: bytes):
    root = tmp_path_factory.mktemp("root")
    for name, content in (("sys/fs/cgroup/memory.max", limit), ("proc/meminfo", b"MemTotal:" + node)):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_bytes(content)
    found = look_at_memory(root).limit
    assert found is None or 0 < found < 2**77


def test_caches(tmp_path: Path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "home").mkdir()
    assert look_at_caches(tmp_path, {"HOME": "/home"}, Platform.CPU) == {}
    # A file where a folder must be: no user can write there, root neither.
    put(tmp_path, "home/.triton")
    put(tmp_path, "home/ascend")
    assert set(look_at_caches(tmp_path, {"HOME": "/home"}, Platform.CPU)) == {"/home/.triton/cache"}
    assert set(look_at_caches(tmp_path, {"HOME": "/home"}, Platform.ASCEND)) == {
        "/home/.triton/cache",
        "/home/ascend/log",
    }
    moved = {"HOME": "/home", "TRITON_CACHE_DIR": "/tmp/triton", "ASCEND_PROCESS_LOG_PATH": "/tmp/log"}
    assert look_at_caches(tmp_path, moved, Platform.ASCEND) == {}
    put(tmp_path, "cache")
    assert set(look_at_caches(tmp_path, moved | {"XDG_CACHE_HOME": "/cache"}, Platform.CPU)) == {"/cache/vllm"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_the_least_a_model_takes_counts_wide_floats_as_narrow_ones(model: Path):
    write_safetensors(model / "a.safetensors", "F32", 4096)
    write_safetensors(model / "b.safetensors", "BF16", 1000)
    assert look_at_model(model).least_bytes == 2048 + 1000


def test_files_that_an_index_does_not_name_do_not_count(model: Path):
    write_safetensors(model / "a.safetensors", nbytes=1000)
    write_safetensors(model / "consolidated.safetensors", nbytes=1000, missing=1)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    found = look_at_model(model)
    assert found.least_bytes == 1000
    assert found.cut_files == ()


def test_a_shard_shorter_than_its_header_says_is_cut(model: Path):
    write_safetensors(model / "a.safetensors", nbytes=1000, missing=1)
    found = look_at_model(model)
    (cut,) = found.cut_files
    assert "a.safetensors" in cut
    assert "cut off" in cut
    assert found.broken_files == ()


def test_a_pointer_of_git_lfs_is_no_weights(model: Path):
    (model / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    found = look_at_model(model)
    assert found.cut_files == ()
    assert "a.safetensors" in found.broken_files[0]


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1, "a": 2}', ""])
def test_a_config_that_is_no_json_object(model: Path, text: str):
    write_safetensors(model / "a.safetensors")
    (model / "config.json").write_text(text)
    assert "config.json" in look_at_model(model).config_error


@given(content=st.binary(max_size=256))
def test_no_content_of_a_shard_is_too_odd(tmp_path_factory: pytest.TempPathFactory, content: bytes):
    folder = tmp_path_factory.mktemp("model")
    (folder / "a.safetensors").write_bytes(content)
    (folder / "config.json").write_bytes(content)
    found = look_at_model(folder)
    assert found.is_folder
    assert found.error == ""
    assert len(found.cut_files) + len(found.broken_files) == 1


def _module(folder: Path, text: str) -> dict[str, str]:
    (folder / "flash_attn_npu_v3.py").write_text(text)
    return {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}


def test_the_operator_of_fa3_is_imported(tmp_path: Path):
    environ = _module(tmp_path, "def flash_attn_with_kvcache(): ...")
    assert ask_flash_attention(sys.executable, environ).error == ""
    environ = _module(tmp_path, "x = 1")
    assert "flash_attn_with_kvcache" in ask_flash_attention(sys.executable, environ).error
    environ = _module(tmp_path, "raise OSError('libascend_hal.so: cannot open shared object file')")
    broken = ask_flash_attention(sys.executable, environ)
    assert "libascend_hal.so" in broken.error
    assert not broken.may_pass
    assert "No module named 'flash_attn_npu_v3'" in ask_flash_attention(sys.executable, {}).error
    environ = _module(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    killed = ask_flash_attention(sys.executable, environ)
    assert "SIGKILL" in killed.error
    assert killed.may_pass
