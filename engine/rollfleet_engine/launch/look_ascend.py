"""Looks at NPUs, driver and CANN in a container. Untested on hardware; paths and names are from the sources named.

Sources: mind-cluster's ascend-device-plugin (pkg/common/constants.go) and ascend-docker-runtime (process.go,
base.list) for devices, variables and driver files; vllm-ascend's collect_env.py for where CANN writes its release.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from rollfleet_engine.launch.facts import MANAGER_DEVICES, AscendSoftware, Devices
from rollfleet_protocol.engine_config import DEVICES_VARIABLE

ASCEND_ROOT = "usr/local/Ascend"  # below the root folder: where driver and CANN are installed
VISIBLE_VARIABLE = "ASCEND_VISIBLE_DEVICES"
REMAPPED_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
RUNTIME_VARIABLE = "ASCEND_DOCKER_RUNTIME"
TOOLKIT_VARIABLE = "ASCEND_HOME_PATH"
_CHIP = re.compile(r"davinci([0-9]{1,4})")
# The driver's own library, through which all others reach the chips; its folder differs between releases.
_LIBRARY_FOLDERS = ("driver/lib64", "driver/lib64/driver", "driver/lib64/common")
_LIBRARY = "libascend_hal.so"
_TOOLKIT_FILES = ("ascend_toolkit_install.info", "x86_64-linux/ascend_toolkit_install.info",
                  "aarch64-linux/ascend_toolkit_install.info")  # fmt: skip
_VERSION_LINE = re.compile(r"^\s*version\s*=\s*(\S+)\s*$", re.IGNORECASE | re.MULTILINE)
_MOST_BYTES = 65536  # of a file with a version in it


def look_at_devices(root: Path, environ: Mapping[str, str]) -> Devices:
    """Device files below `root`, and the variables that speak of devices."""
    folder = root / "dev"
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError:  # no /dev at all: no device either
        names = set()
    chips = sorted(int(match[1]) for name in names if (match := _CHIP.fullmatch(name)))
    managers = tuple(name for name in MANAGER_DEVICES if name in names)
    files = [*(f"davinci{number}" for number in chips), *managers]
    return Devices(
        numbers=tuple(chips),
        managers=managers,
        closed=tuple(f"/dev/{name}" for name in files if not os.access(folder / name, os.R_OK | os.W_OK)),
        announced=environ.get(DEVICES_VARIABLE, ""),
        visible=environ.get(VISIBLE_VARIABLE),
        remapped=environ.get(REMAPPED_VARIABLE),
        runtime=environ.get(RUNTIME_VARIABLE, "").lower() == "true",
    )


def look_at_software(root: Path, environ: Mapping[str, str]) -> AscendSoftware:
    """Driver and CANN below `root`."""
    base = root / ASCEND_ROOT
    toolkit = environ.get(TOOLKIT_VARIABLE, "")
    folders = [root / toolkit.lstrip("/")] if toolkit else []
    folders.append(base / "ascend-toolkit/latest")
    files = [folder / name for folder in folders for name in _TOOLKIT_FILES]
    return AscendSoftware(
        cann=next((found for file in files if (found := _version_in(file))), ""),
        driver=_version_in(base / "driver/version.info"),
        has_libraries=any((base / folder / _LIBRARY).exists() for folder in _LIBRARY_FOLDERS),
        toolkit_set=bool(toolkit) and folders[0].is_dir(),
    )


def python_folders(root: Path, python_path: tuple[str, ...]) -> tuple[str, ...]:
    """The entries of PYTHONPATH that are CANN's own: torch_npu and its compiler import from there."""
    base = str((root / ASCEND_ROOT).resolve())
    return tuple(entry for entry in python_path if entry == base or entry.startswith(f"{base}/"))


def _version_in(file: Path) -> str:
    """What a file of lines NAME=VALUE says of its version; empty where it says nothing."""
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            found = _VERSION_LINE.search(opened.read(_MOST_BYTES))
    except OSError:
        return ""
    return found[1] if found else ""
