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


def _rootfs(paths: Paths) -> Path:
    """The files of a minimal Debian of this machine's suite; made once for each list of packages."""
    suite = prerequisites.debian_suite()
    key = hashlib.sha256(" ".join([suite, *PACKAGES]).encode()).hexdigest()[:16]
    target = paths.cache / "base" / f"{suite}-{key}.tar"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{os.getpid()}.tar")
        with step(f"making a Debian {suite} base (once)"):
            command = [
                "mmdebstrap",
                "--quiet",
                "--variant=minbase",
                f"--include={','.join(PACKAGES)}",
                suite,
                unfinished,
            ]
            run(command, timeout_s=ROOTFS_TIMEOUT_S)
        unfinished.replace(target)
    return target


def ensure(paths: Paths, binaries: Path) -> dict[str, Path]:
    """Archives of the images that the cluster itself brings, by name."""
    sources = {
        PAUSE_IMAGE: (binaries / "pause", 'FROM scratch\nCOPY input /pause\nENTRYPOINT ["/pause"]\n'),
        base_image(): (_rootfs(paths), "FROM scratch\nADD input /\n"),
    }
    return {tag: _ensure(paths, tag, source, dockerfile) for tag, (source, dockerfile) in sources.items()}


def _ensure(paths: Paths, tag: str, source: Path, dockerfile: str) -> Path:
    """Skip buildah altogether when the archive made of this very input is there."""
    real = source.resolve()
    stamp = hashlib.sha256(f"{dockerfile}{real}{real.stat().st_size}{real.stat().st_mtime_ns}".encode()).hexdigest()[
        :16
    ]
    record = paths.images / f"{stamp}.made"
    if record.exists() and (paths.images / record.read_text()).exists():
        for file in (record, paths.images / record.read_text()):
            os.utime(file)  # in use: pruning goes by age
        return paths.images / record.read_text()
    with tempfile.TemporaryDirectory(prefix="devcluster-") as scratch:
        context = Path(scratch)
        shutil.copy(real, context / "input")
        (context / "Dockerfile").write_text(dockerfile)
        archive = images.build(paths, images.Build(context / "Dockerfile", tag, context))
    record.write_text(archive.name)
    return archive
