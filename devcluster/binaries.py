"""Programs built from the Go module proxy, once each, and kept in the cache under a key of all that goes into them."""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from devcluster import toolchain
from devcluster.errors import InvalidInputError
from devcluster.paths import GO_SOURCE, Paths
from devcluster.shell import run, say

BUILD_TIMEOUT_S = 3600.0  # a cold kube-apiserver takes minutes on two cores, more on a loaded machine
KEEP_UNUSED_S = 14 * 86400.0
KUBERNETES = "k8s.io/kubernetes"


@dataclass(frozen=True)
class Binary:
    """A program, the folder of the go.mod that pins it, and the package to build."""

    name: str
    module: str
    package: str
    version_of: str = ""  # the module whose version is stamped into it


# Judges CRDs as an API server does, for `make verify`; no part of a cluster.
CRD_CHECK = Binary("crdcheck", "crdcheck", ".")

BINARIES = (
    Binary("etcd", "controlplane", "go.etcd.io/etcd/server/v3"),
    *(
        Binary(name, "controlplane", f"k8s.io/kubernetes/cmd/{name}", version_of=KUBERNETES)
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
    ),
    Binary("ascend-device-plugin", "controlplane", "./cmd/ascend-device-plugin"),
    Binary("pause", "controlplane", "./cmd/pause"),
    Binary("coredns", "coredns", "."),
    Binary("helm", "helm", "helm.sh/helm/v4/cmd/helm"),
    CRD_CHECK,
)


def required_version(go_mod: str, module: str) -> str:
    """The version of a module that a go.mod names."""
    found = re.search(rf"^\s*(?:require\s+)?{re.escape(module)}\s+(v\S+)", go_mod, re.MULTILINE)
    if found is None:
        raise InvalidInputError(f"go.mod requires no {module}")
    return found.group(1)


def link_flags(go_mod: str, version_of: str) -> str:
    """Strip symbols; stamp Kubernetes' version, without which it reports v0.0.0 and Helm's kubeVersion checks fail."""
    if not version_of:
        return "-s -w"
    version = required_version(go_mod, version_of)
    major, minor, *_ = version.removeprefix("v").split(".")
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    stamps = [f"-X {package}.{name}={value}" for package in packages for name, value in values.items()]
    return " ".join(["-s", "-w", *stamps])


def cache_key(module: Path, go_version: str) -> str:
    """Changes with the pinned versions, our own Go code, the link flags and the compiler."""
    digest = hashlib.sha256(go_version.encode())
    go_mod = (module / "go.mod").read_text()
    for file in sorted(path for path in module.rglob("*") if path.suffix in {".mod", ".sum", ".go"}):
        digest.update(f"\n{file.relative_to(module)}\n".encode() + file.read_bytes())
    for binary in BINARIES:
        if binary.module == module.name:
            digest.update(f"\n{binary}{link_flags(go_mod, binary.version_of)}".encode())
    return digest.hexdigest()[:16]


def folder_of(paths: Paths, binary: Binary) -> Path:
    return paths.cache / "bin" / f"{binary.module}-{cache_key(GO_SOURCE / binary.module, toolchain.PINNED)}"


def _build(go: Path, binary: Binary, target: Path) -> None:
    module = GO_SOURCE / binary.module
    flags = link_flags((module / "go.mod").read_text(), binary.version_of)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}")
    # Without cgo the machine needs no C compiler, and has the same programs whether it has one or not.
    environment = {**os.environ, "GOTOOLCHAIN": "local", "GOWORK": "off", "CGO_ENABLED": "0"}
    command = [go, "build", "-mod=readonly", "-buildvcs=false", "-ldflags", flags, "-o", unfinished, binary.package]
    run(command, timeout_s=BUILD_TIMEOUT_S, cwd=module, env=environment)
    unfinished.replace(target)


def missing(paths: Paths, wanted: Sequence[Binary] = BINARIES) -> list[Binary]:
    return [binary for binary in wanted if not (folder_of(paths, binary) / binary.name).exists()]


def ensure(paths: Paths, wanted: Sequence[Binary] = BINARIES) -> Path:
    """Build what is missing, with a line for each, and return a folder that holds every program under its name."""
    to_build = missing(paths, wanted)
    if to_build:
        go = toolchain.ensure(paths)
        say(f"building {len(to_build)} programs (once; minutes if Go's own cache is cold)")
    for binary in to_build:
        start = time.monotonic()
        _build(go, binary, folder_of(paths, binary) / binary.name)
        say(f"  built {binary.name}: {time.monotonic() - start:.1f} s")
    return _linked(paths, wanted)


def _linked(paths: Paths, wanted: Sequence[Binary]) -> Path:
    """One folder for PATH, whose links follow the keys."""
    folder = paths.cache / "bin" / "current"
    folder.mkdir(parents=True, exist_ok=True)
    for binary in wanted:
        target = folder_of(paths, binary) / binary.name
        os.utime(target.parent)  # in use: pruning goes by age
        link = folder / binary.name
        if not link.is_symlink() or link.readlink() != target:
            new = folder / f".{binary.name}.{os.getpid()}"
            new.symlink_to(target)
            new.replace(link)
    return folder


def prune(paths: Paths, now: float) -> None:
    """Drop programs of older pins that nothing has used for a while."""
    current = {folder_of(paths, binary) for binary in BINARIES}
    for folder in (paths.cache / "bin").glob("*-*"):
        if folder not in current and now - folder.stat().st_mtime > KEEP_UNUSED_S:
            shutil.rmtree(folder)
