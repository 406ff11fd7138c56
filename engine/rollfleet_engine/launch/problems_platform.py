"""What of devices, driver, versions and memory keeps an engine from starting, each with cause and remedy. Pure.

Checks of NPUs apply where vLLM would take its devices from vllm-ascend. All of them are untested on hardware.
"""

from collections.abc import Iterator

from rollfleet_engine.launch.chips import chips_of, spelt
from rollfleet_engine.launch.facts import MANAGER_DEVICES, AscendSoftware, Devices, EngineKind, Facts, Platform
from rollfleet_engine.launch.memory_needs import (
    GIB,
    MIB,
    largest_queue_bytes,
    needs_queues,
    queues_bytes,
    sleeping_bytes,
)
from rollfleet_engine.launch.versions import version_problems, version_warnings
from rollfleet_protocol.accelerators import AcceleratorProfile, profiles_of
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.termination import Problem

_DRIVER = "/usr/local/Ascend/driver"
_SHM = "/dev/shm"  # noqa: S108 - where POSIX shared memory lies


def platform_problems(config: EngineConfig, facts: Facts) -> Iterator[Problem]:
    """All of them, those of the installation first."""
    if facts.kind is EngineKind.SIMULATOR:
        return
    if facts.platform is Platform.ASCEND:
        yield from version_problems(facts.installation, facts.ascend)
        yield from _flash_attention(facts)
        if facts.ascend is not None and facts.devices is not None:
            yield from _software(facts.ascend, facts.devices)
            yield from _devices(config, facts.devices)
    yield from _shared_memory(config, facts)
    yield from _host_memory(config, facts)
    yield from _caches(facts)


def platform_warnings(config: EngineConfig, facts: Facts) -> Iterator[str]:
    """What may go well."""
    if facts.kind is EngineKind.SIMULATOR:
        return
    if facts.platform is Platform.ASCEND:
        yield from version_warnings(facts.installation, facts.ascend)
        if facts.ascend is not None and not facts.ascend.driver:
            yield f"the driver's version is not known: {_DRIVER}/version.info is not there"
    total = facts.memory.shared_total
    wanted = queues_bytes(config, facts)
    if total is not None and needs_queues(config, facts) and total < wanted:
        yield (
            f"{_SHM} has {total // MIB} MiB; vLLM's message queues may fill {wanted // MIB} MiB, and an engine that "
            "fills it up is killed by SIGBUS"
        )


def _flash_attention(facts: Facts) -> Iterator[Problem]:
    error = facts.installation.flash_attention_error
    if error:
        yield Problem(
            cause=f"training consistency needs flash_attn_npu_v3 with flash_attn_with_kvcache: {error}",
            remedy="look at the node's load and memory; the kubelet tries again"
            if facts.installation.flash_attention_may_pass
            else "install the package flash_attn_npu in the engine's image, or set enableTrainingConsistency: false",
            retry_may_cure=facts.installation.flash_attention_may_pass,
        )


def _software(ascend: AscendSoftware, devices: Devices) -> Iterator[Problem]:
    if not ascend.has_libraries:
        if devices.runtime:
            yield Problem(
                cause=f"libascend_hal.so is not below {_DRIVER}/lib64, and Ascend Docker Runtime made the container",
                remedy="install the NPU driver on the node, or mend the runtime's list of mounts (base.list)",
                retry_may_cure=True,
            )
        else:
            yield Problem(
                cause=f"libascend_hal.so is not below {_DRIVER}/lib64, and ASCEND_DOCKER_RUNTIME is not True",
                remedy="make Ascend Docker Runtime the node's runtime, or mount the node's driver at the same path",
            )
    if not ascend.toolkit_set:
        yield Problem(
            cause="CANN is not set up: ASCEND_HOME_PATH names no folder that is there",
            remedy="use an image made from vllm-ascend's by Dockerfile.engine, and keep its entry point",
        )


def _devices(config: EngineConfig, devices: Devices) -> Iterator[Problem]:
    if devices.remapped is not None:
        yield Problem(
            cause=f"ASCEND_RT_VISIBLE_DEVICES is set ({devices.remapped!r}): CANN would number the pod's NPUs by it",
            remedy="remove it from the image: the device plugin chooses the NPUs, and the engine takes all of them",
        )
    if not devices.numbers:
        yield _no_device(config, devices)
        return
    yield from _managers(config, devices)
    yield from _closed(devices)
    yield from _not_the_pods(config, devices)


def _no_device(config: EngineConfig, devices: Devices) -> Problem:
    if config.accelerator is None:
        return Problem(
            cause="no NPU in the container: the fleet asks for none (spec.accelerator.perPod is 0)",
            remedy="set spec.accelerator.perPod, or use an image with vLLM for the CPU",
        )
    asked = f"{config.accelerator.per_pod} of {config.accelerator.resource_name}"
    if devices.visible is not None and not devices.runtime:
        return Problem(
            cause=f"no /dev/davinci<N> in the container, which was given {asked}: ASCEND_VISIBLE_DEVICES is set "
            f"({devices.visible!r}), but Ascend Docker Runtime did not make this container",
            remedy="make Ascend Docker Runtime the node's runtime, or let the device plugin mount devices without it",
        )
    return Problem(
        cause=f"no /dev/davinci<N> in the container, which was given {asked}",
        remedy="look at the device plugin's log on the node; set spec.accelerator.resourceName to the resource of NPUs",
        retry_may_cure=True,
    )


def _managers(config: EngineConfig, devices: Devices) -> Iterator[Problem]:
    needed = [name for name in MANAGER_DEVICES if not (name == "devmm_svm" and _is_a5(config))]
    missing = [f"/dev/{name}" for name in needed if name not in devices.managers]
    if missing:
        yield Problem(
            cause=f"NPUs are there, but not {', '.join(missing)}, without which no process can use them",
            remedy="use the device plugin or Ascend Docker Runtime of the driver's release: they mount these together",
        )


def _is_a5(config: EngineConfig) -> bool:
    """The 950 family has no devmm_svm (ascend-docker-runtime, process.go)."""
    asked = config.accelerator
    if asked is None:
        return False
    return asked.profile is AcceleratorProfile.A5 or profiles_of(asked.resource_name) == (AcceleratorProfile.A5,)


def _closed(devices: Devices) -> Iterator[Problem]:
    if devices.closed:
        yield Problem(
            cause=f"this user may not open {', '.join(devices.closed)}",
            remedy="run as root, or as the user or group that owns the driver on the node (HwHiAiUser, mostly 1000)",
        )


def _not_the_pods(config: EngineConfig, devices: Devices) -> Iterator[Problem]:
    seen = frozenset(devices.numbers)
    sources = (
        ("the pod's annotation says", chips_of(devices.announced)),
        ("ASCEND_VISIBLE_DEVICES says", None if devices.visible is None else chips_of(devices.visible)),
    )
    for words, wanted in sources:
        if wanted is None:
            continue
        if seen - wanted:
            yield Problem(
                cause=f"the container has NPUs {spelt(seen)}, and {words} {spelt(wanted)}: "
                f"{spelt(seen - wanted)} may be another pod's",
                remedy="mount no devices by hand, set no ASCEND_VISIBLE_DEVICES in the image, and run unprivileged",
            )
        elif wanted - seen:
            yield Problem(
                cause=f"the container has NPUs {spelt(seen)}, and {words} {spelt(wanted)}: {spelt(wanted - seen)} "
                "are missing",
                remedy="look at these chips with npu-smi on the node, and at the device plugin's log",
                retry_may_cure=True,
            )
    asked = 0 if config.accelerator is None else config.accelerator.per_pod
    if chips_of(devices.announced) is None and len(seen) < asked:
        yield Problem(
            cause=f"the container has NPUs {spelt(seen)}, and spec.accelerator.perPod asks for {asked}",
            remedy="look at the device plugin's log; give spec.accelerator.resourceName the resource of whole NPUs",
            retry_may_cure=True,
        )


def _shared_memory(config: EngineConfig, facts: Facts) -> Iterator[Problem]:
    total, free = facts.memory.shared_total, facts.memory.shared_free
    wanted = largest_queue_bytes(config, facts)
    if total is None or free is None or free >= wanted or not needs_queues(config, facts):
        return
    if total < wanted:
        yield Problem(
            cause=f"{_SHM} has {total // MIB} MiB; one of vLLM's message queues takes {-(-wanted // MIB)} MiB",
            remedy="mount an emptyDir with medium Memory on /dev/shm, without or with a larger sizeLimit",
        )
    else:
        yield Problem(
            cause=f"{_SHM} has {free // MIB} of {total // MIB} MiB free; one of vLLM's message queues takes "
            f"{-(-wanted // MIB)} MiB",
            remedy="delete the pod: engines that were killed have left their queues there",
        )


def _host_memory(config: EngineConfig, facts: Facts) -> Iterator[Problem]:
    limit, wanted = facts.memory.limit, sleeping_bytes(config, facts)
    if limit is not None and limit < wanted:
        yield Problem(
            cause=f"host memory is {limit / GIB:.1f} GiB; sleep level 1, which callers get by default, moves the "
            f"weights there, at least {wanted / GIB:.1f} GiB, and the kernel would kill the engine",
            remedy=f"raise spec.resources.limits.memory well above {wanted / GIB:.0f} GiB, or take larger nodes",
        )


def _caches(facts: Facts) -> Iterator[Problem]:
    for folder, error in sorted(facts.cache_errors.items()):
        yield Problem(
            cause=f"nothing can be written in {folder}: {error}",
            remedy="leave HOME and the cache variables as image and operator set them, or give the pod's disk room",
            retry_may_cure="space" in error or "quota" in error,
        )
