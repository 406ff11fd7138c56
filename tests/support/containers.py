"""Containers from built images, run by runc as a kubelet's runtime would: no capabilities, no network but loopback."""

import json
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.log_lines import whole_lines

KILL_S = 20.0


@dataclass(frozen=True)
class Image:
    """A built image: its files as a folder, and what it says of itself."""

    files: Path
    configuration: Mapping[str, Any]

    @property
    def environ(self) -> dict[str, str]:
        return dict(each.split("=", 1) for each in self.configuration["Env"])

    @property
    def command(self) -> list[str]:
        """Entry point and arguments, as the image has them."""
        return [*(self.configuration.get("Entrypoint") or ()), *(self.configuration.get("Cmd") or ())]


@dataclass(frozen=True)
class Pod:
    """What a pod's spec adds to an image."""

    user: int
    environ: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()  # in place of the image's own
    empty: Sequence[str] = ()  # emptyDirs, which any user may write (kubelet: mode 0777)
    mounts: Mapping[str, Path] = field(default_factory=dict)  # container path -> host path, read-only
    written: Mapping[str, Path] = field(default_factory=dict)  # the same, to be written
    shared_memory: str = "64m"
    read_only: bool = True


class Container:
    """A running container; stop() when done."""

    def __init__(self, image: Image, pod: Pod, folder: Path) -> None:
        """`folder` takes the bundle, runc's state and what the container prints."""
        folder.mkdir(parents=True, exist_ok=True)
        self.name = f"rollfleet-{uuid.uuid4().hex[:12]}"
        self._root = folder / "runc"
        self._output = folder / "output"
        (folder / "config.json").write_text(json.dumps(_bundle(image, pod, _empty_dirs(pod, folder))))
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                ["runc", "--root", self._root, "run", "--bundle", folder, self.name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """Lines of JSON that it printed."""
        return [json.loads(line) for line in whole_lines(self.output()) if line.startswith("{")]

    def wait(self, timeout_s: float) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def signal(self, name: str) -> None:
        """As the kubelet does: to the container's first process."""
        self._runc("kill", self.name, name, check=True)

    def stop(self) -> None:
        if self.process.poll() is None:
            self._runc("kill", self.name, "KILL", check=False)
            self.process.wait(KILL_S)
        self._runc("delete", "--force", self.name, check=False)

    def _runc(self, *words: str, check: bool) -> None:
        subprocess.run(
            ["runc", "--root", self._root, *words], check=check, capture_output=True, timeout=KILL_S, text=True
        )


def run(image: Image, pod: Pod, folder: Path, timeout_s: float = 60.0) -> tuple[int, str]:
    """Exit code and output of a container that ends by itself."""
    container = Container(image, pod, folder)
    try:
        return container.wait(timeout_s), container.output()
    finally:
        container.stop()


def _empty_dirs(pod: Pod, folder: Path) -> dict[str, Path]:
    """As the kubelet makes them: folders of the host with mode 0777, whatever the umask."""
    made = {path: folder / f"empty-{number}" for number, path in enumerate(pod.empty)}
    for source in made.values():
        source.mkdir()
        source.chmod(0o777)
    return made


def _bundle(image: Image, pod: Pod, empty: Mapping[str, Path]) -> dict[str, Any]:
    """The OCI runtime specification's config.json."""
    environ = image.environ | dict(pod.environ)
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": pod.user, "gid": pod.user},
            "args": list(pod.command or image.command),
            "env": [f"{name}={value}" for name, value in environ.items()],
            "cwd": image.configuration.get("WorkingDir") or "/",
            "capabilities": {kind: [] for kind in ("bounding", "effective", "permitted", "inheritable", "ambient")},
            "noNewPrivileges": True,
        },
        "root": {"path": str(image.files), "readonly": pod.read_only},
        "hostname": "engine-0-0",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            _tmpfs("/dev", "nosuid", "mode=755"),
            _tmpfs("/dev/shm", "nosuid", "mode=1777", f"size={pod.shared_memory}"),
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "nodev", "ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["nosuid", "ro"]},
            *(_bind(path, source, "ro") for path, source in pod.mounts.items()),
            *(_bind(path, source, "rw") for path, source in {**empty, **pod.written}.items()),
        ],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
            "maskedPaths": ["/proc/kcore", "/sys/firmware"],
        },
    }


def _tmpfs(path: str, *options: str) -> dict[str, Any]:
    return {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": list(options)}


def _bind(path: str, source: Path, mode: str) -> dict[str, Any]:
    return {"destination": path, "type": "bind", "source": str(source), "options": ["rbind", mode]}
