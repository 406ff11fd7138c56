"""What the machine must have. On Debian, root installs what is missing; elsewhere the error names the command."""

import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

from devcluster.configs import CNI_PLUGINS
from devcluster.errors import MissingPrerequisiteError
from devcluster.shell import run, step

# A program or file, and the Debian package that brings it.
RUNTIME: Mapping[str, str] = {
    "containerd": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
    str(CNI_PLUGINS / "host-local"): "containernetworking-plugins",
    "nft": "nftables",
    "ip": "iproute2",
    "mount": "mount",
    "umount": "mount",
    "openssl": "openssl",
}
IMAGES: Mapping[str, str] = {"buildah": "buildah", "mmdebstrap": "mmdebstrap"}
APT_TIMEOUT_S = 900.0


def missing_packages(needed: Mapping[str, str]) -> list[str]:
    """The packages of the programs that are not there, each once."""
    found = {name: Path(name).exists() if name.startswith("/") else bool(shutil.which(name)) for name in needed}
    return sorted({package for name, package in needed.items() if not found[name]})


def os_release(text: str) -> dict[str, str]:
    """/etc/os-release as a mapping (os-release(5))."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key: value.strip("\"'") for key, _, value in pairs}


def debian_suite() -> str:
    """The codename of this machine's Debian."""
    release = os_release(Path("/etc/os-release").read_text())
    if release.get("ID") != "debian" or not release.get("VERSION_CODENAME"):
        raise MissingPrerequisiteError(
            f"the base image is made of the machine's own Debian; this is {release.get('PRETTY_NAME', 'unknown')}",
            "Run devcluster on Debian 12 or newer.",
        )
    return release["VERSION_CODENAME"]


def check_machine() -> None:
    """Root on Linux: namespaces, mounts and network interfaces need both."""
    if platform.system() != "Linux":
        raise MissingPrerequisiteError(f"devcluster runs on Linux, not on {platform.system()}")
    if os.geteuid() != 0:
        raise MissingPrerequisiteError(
            "devcluster must run as root", "Run it with sudo, or in a virtual machine as root."
        )


def ensure(needed: Mapping[str, str]) -> None:
    """Install what is missing, or say which command would."""
    packages = missing_packages(needed)
    if not packages:
        return
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", *packages]
    if not shutil.which("apt-get"):
        raise MissingPrerequisiteError(
            f"not installed: {', '.join(packages)}", f"On Debian: apt-get install {' '.join(packages)}"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with step(f"installing {', '.join(packages)}"):
        run(["apt-get", "update", "-q"], timeout_s=APT_TIMEOUT_S, env=environment)
        run(install, timeout_s=APT_TIMEOUT_S, env=environment)
    still = missing_packages(needed)
    if still:
        raise MissingPrerequisiteError(f"still missing after the installation: {', '.join(still)}")
