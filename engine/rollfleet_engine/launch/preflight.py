"""Looks at the container before the engine is started. It judges nothing: that is for `plan`."""

import importlib.util
import json
import os
import shutil
import socket
import ssl
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rollfleet_engine.launch.asking import Asked, ask
from rollfleet_engine.launch.facts import ASCEND_PLUGIN, VERSIONED, EngineKind, Facts, Installation, Platform, Plugin
from rollfleet_engine.launch.look_ascend import look_at_devices, look_at_software, python_folders
from rollfleet_engine.launch.look_memory import look_at_memory
from rollfleet_engine.launch.look_model import look_at_model
from rollfleet_protocol.engine_config import EngineConfig

KIND_VARIABLE = "ROLLFLEET_ENGINE"
PYTHON_VARIABLE = "ROLLFLEET_ENGINE_PYTHON"  # the interpreter that has vLLM, where it is not the launcher's own
SIMULATED_RELEASE = "0.27.1"  # whose HTTP surface the simulator has
OWN_PACKAGES = ("rollfleet_engine", "rollfleet_protocol", "rollfleet_kernels")
ROOT = Path("/")
SHARED_MEMORY = "dev/shm"  # POSIX's place for shared memory, which vLLM's message queues use
_PROBE_TIMEOUT_S = 60.0  # a cold image pulls the interpreter from the network's disk
_IMPORT_TIMEOUT_S = 300.0  # torch and torch_npu, cold
# What vllm-ascend itself asks of the module before it takes the FA3 backend (vllm_ascend/platform.py).
_FLASH_ATTENTION = "from flash_attn_npu_v3 import flash_attn_with_kvcache"
_NEEDED_MODULES = ("cryptography", "jwt", "numpy", "pydantic", "rollfleet_engine.guard", "uvicorn")
# Runs in the engine's interpreter, which need not be ours. As text: by its path, the launcher's folder would be the
# first on the path of the interpreter that is asked.
_PROBE = Path(__file__).with_name("probe.py")


class UnknownEngineError(Exception):
    """ROLLFLEET_ENGINE names no engine of ours."""


def kind_of(environ: Mapping[str, str]) -> EngineKind:
    """Which engine this image starts."""
    value = environ.get(KIND_VARIABLE, EngineKind.VLLM.value)
    try:
        return EngineKind(value)
    except ValueError:
        allowed = ", ".join(kind.value for kind in EngineKind)
        raise UnknownEngineError(f"{KIND_VARIABLE} is {value!r}; it must be one of {allowed}") from None


def observe(config: EngineConfig, environ: Mapping[str, str], root: Path = ROOT) -> Facts:
    """One look at everything that `plan` asks for. Devices, driver, cgroup and caches are looked for below `root`."""
    kind = kind_of(environ)
    installation = _simulator() if kind is EngineKind.SIMULATOR else _vllm(config, environ)
    python_path = tuple(
        str(Path(entry).resolve()) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry
    )
    ascend = kind is EngineKind.VLLM and installation.platform is Platform.ASCEND
    return Facts(
        kind=kind,
        installation=installation,
        model=look_at_model(Path(config.model.path)),
        environ=dict(environ),
        own_paths=(*own_paths(), *(python_folders(root, python_path) if ascend else ())),
        python_path=python_path,
        has_compiler=shutil.which(environ.get("CXX") or "g++", path=environ.get("PATH")) is not None,
        checkpoints_error=_checkpoints_error(config.checkpoints_path),
        port_errors=_port_errors(config),
        tls_error=_tls_error(Path(config.tls_dir)) if config.leads else "",
        shared_memory_error=_write_error(root / SHARED_MEMORY),
        run_dir_error=_write_error(Path(config.run_dir)),
        cache_errors=look_at_caches(root, environ, installation.platform) if kind is EngineKind.VLLM else {},
        devices=look_at_devices(root, environ) if ascend else None,
        ascend=look_at_software(root, environ) if ascend else None,
        memory=look_at_memory(root),
    )


def look_at_caches(root: Path, environ: Mapping[str, str], platform: Platform) -> dict[str, str]:
    """Why nothing can be written where engines write, by folder as the container names it; those that can are left out.

    /tmp holds vLLM's sockets (envs.py, VLLM_RPC_BASE_PATH), its cache the compiled graphs, Triton's the kernels; CANN
    logs below HOME unless told otherwise.
    """
    home = environ.get("HOME", "/").rstrip("/")
    cache = environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    wanted = {
        environ.get("TMPDIR") or "/tmp",  # noqa: S108 - where the engine itself looks
        environ.get("VLLM_CACHE_ROOT") or f"{cache}/vllm",
        environ.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache",
    }
    if platform is Platform.ASCEND:
        wanted.add(environ.get("ASCEND_PROCESS_LOG_PATH") or f"{home}/ascend/log")
    found = {folder: _write_error(_nearest(root / folder.lstrip("/"))) for folder in sorted(wanted)}
    return {folder: error for folder, error in found.items() if error}


def _nearest(folder: Path) -> Path:
    """The folder itself, or the one that it would be made in."""
    return next((each for each in (folder, *folder.parents) if each.exists()), folder)


def own_paths() -> tuple[str, ...]:
    """The folders that hold rollfleet's packages."""
    specs = (importlib.util.find_spec(name) for name in OWN_PACKAGES)
    origins = {str(Path(spec.origin).resolve().parent.parent) for spec in specs if spec is not None and spec.origin}
    return tuple(sorted(origins))


def _simulator() -> Installation:
    return Installation(python=sys.executable, distribution="rollfleet-simulator", release=SIMULATED_RELEASE)


def _vllm(config: EngineConfig, environ: Mapping[str, str]) -> Installation:
    python = environ.get(PYTHON_VARIABLE) or sys.executable
    command = [python, "-c", _PROBE.read_text(encoding="utf-8"), ",".join(_NEEDED_MODULES), ",".join(VERSIONED)]
    asked = ask(command, _PROBE_TIMEOUT_S, environ)
    if asked.error:
        return Installation(python=python, error=asked.error, error_may_pass=asked.may_pass)
    try:
        answer = json.loads(asked.output)
    except ValueError as error:
        return Installation(python=python, error=f"it printed something else than the answer: {error}")
    has_npus = ASCEND_PLUGIN in answer["platforms"]
    wants_fa3 = has_npus and config.rl_config.training_consistency
    fa3 = ask_flash_attention(python, environ) if wants_fa3 else None
    return Installation(
        python=python,
        distribution=answer["distribution"],
        release=answer["release"],
        platforms=tuple(answer["platforms"]),
        plugin=Plugin(**answer["plugin"]),
        tool_parsers=tuple(answer["tool_parsers"]),
        missing_modules=tuple(answer["missing"]),
        versions=answer["versions"],
        flash_attention_error=None if fa3 is None else fa3.error,
        flash_attention_may_pass=fa3 is not None and fa3.may_pass,
    )


def ask_flash_attention(python: str, environ: Mapping[str, str]) -> Asked:
    """Whether FA3's operator can be imported. Takes as long as importing torch_npu does."""
    return ask([python, "-c", _FLASH_ATTENTION], _IMPORT_TIMEOUT_S, environ)


def _checkpoints_error(path: str | None) -> str:
    if path is None:
        return ""
    try:
        next(Path(path).iterdir(), None)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _port_errors(config: EngineConfig) -> dict[int, str]:
    found = {}
    wanted = {config.serving_port, config.control_port} if config.leads else set()
    if config.nodes is not None and config.leads:
        wanted |= {config.nodes.meeting_port, config.nodes.master_port}
    for port in wanted:
        family = socket.AF_INET6 if ":" in config.bind_address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the servers do it: connections that linger after a restart are no hindrance, a listener is.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.bind_address, port))
                probe.listen(1)
            except OSError as error:
                found[port] = error.strerror or str(error)
    return found


def _tls_error(folder: Path) -> str:
    certificate, key = folder / "tls.crt", folder / "tls.key"
    for file in (certificate, key):
        if not file.is_file():
            return f"{file.name} not found"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        return f"certificate and key do not load: {error}"
    return ""


def _write_error(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        return error.strerror or str(error)
    return ""
