"""The two images that everything else stands on: the pause container and a small Debian with Python."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from devcluster import images, prerequisites
from devcluster.configs import PAUSE_IMAGE
from devcluster.paths import Paths
from devcluster.shell import run, step

# libnuma1 and libgomp1: vLLM's CPU engine loads both, and without libnuma fails far from the cause.
PACKAGES = ("python3", "python3-venv", "ca-certificates", "libnuma1", "libgomp1")
ROOTFS_TIMEOUT_S = 900.0


def base_image() -> str:
    """The name to give as BASE to a Dockerfile."""
    return f"docker.io/rollfleet-devcluster/base:{prerequisites.debian_suite()}"


def _rootfs_file(paths: Paths) -> Path:
    suite = prerequisites.debian_suite()
    key = hashlib.sha256(" ".join([suite, *PACKAGES]).encode()).hexdigest()[:16]
    return paths.cache / "base" / f"{suite}-{key}.tar"


def _make_rootfs(paths: Paths) -> None:
    """The files of a minimal Debian of this machine's suite; made once for each list of packages."""
    target = _rootfs_file(paths)
    if target.exists():
        return
    suite = prerequisites.debian_suite()
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{os.getpid()}.tar")
    with step(f"making a Debian {suite} base (once)"):
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, unfinished]
        run(command, timeout_s=ROOTFS_TIMEOUT_S)
    unfinished.replace(target)


def _sources(paths: Paths, binaries: Path) -> dict[str, tuple[Path, str]]:
    """Of each image its one input and its Dockerfile."""
    return {
        PAUSE_IMAGE: (binaries / "pause", 'FROM scratch\nCOPY input /pause\nENTRYPOINT ["/pause"]\n'),
        base_image(): (_rootfs_file(paths), "FROM scratch\nADD input /\n"),
    }


def made(paths: Paths, binaries: Path) -> dict[str, Path]:
    """Archives of the images that the cluster itself brings, by name, as far as they are there."""
    found = {}
    for tag, (source, dockerfile) in _sources(paths, binaries).items():
        record = _record(paths, source, dockerfile)
        archive = paths.images / record.read_text() if record.exists() else None
        if archive is not None and archive.exists():
            found[tag] = archive
            for file in (record, archive):
                os.utime(file)  # in use: pruning goes by age
    return found


def missing(paths: Paths, binaries: Path) -> set[str]:
    return _sources(paths, binaries).keys() - made(paths, binaries).keys()


def ensure(paths: Paths, binaries: Path) -> dict[str, Path]:
    """Make what is missing."""
    _make_rootfs(paths)
    to_make = missing(paths, binaries)
    for tag, (source, dockerfile) in _sources(paths, binaries).items():
        if tag in to_make:
            _make(paths, tag, source, dockerfile)
    return made(paths, binaries)


def _record(paths: Paths, source: Path, dockerfile: str) -> Path:
    """Where the name of the archive that was made of this very input is noted: no need to ask buildah."""
    if not source.exists():
        return paths.images / "none.made"
    real = source.resolve()
    inputs = f"{dockerfile}{real}{real.stat().st_size}{real.stat().st_mtime_ns}"
    return paths.images / f"{hashlib.sha256(inputs.encode()).hexdigest()[:16]}.made"


def _make(paths: Paths, tag: str, source: Path, dockerfile: str) -> None:
    with tempfile.TemporaryDirectory(prefix="devcluster-") as scratch:
        context = Path(scratch)
        shutil.copy(source.resolve(), context / "input")
        (context / "Dockerfile").write_text(dockerfile)
        archive = images.build(paths, images.Build(context / "Dockerfile", tag, context))
    _record(paths, source, dockerfile).write_text(archive.name)
