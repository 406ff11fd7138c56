"""Where things lie. The state of the cluster is thrown away by `down`; the cache is what was costly to make."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import InvalidInputError

SOURCE = Path(__file__).resolve().parent
GO_SOURCE = SOURCE / "go"

# A Unix socket's path may have 107 bytes (unix(7)); containerd adds ".ttrpc" to its own.
LONGEST_HOME = 107 - len("/containerd/containerd.sock.ttrpc")


@dataclass(frozen=True)
class Paths:
    """The folders of one cluster."""

    home: Path
    cache: Path

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def pki(self) -> Path:
        return self.home / "pki"

    @property
    def config(self) -> Path:
        return self.home / "config"

    @property
    def containerd_socket(self) -> Path:
        return self.home / "containerd" / "containerd.sock"

    @property
    def containerd_state(self) -> Path:
        return self.home / "containerd" / "state"

    @property
    def kubelet_root(self) -> Path:
        return self.home / "kubelet"

    @property
    def kubeconfig(self) -> Path:
        return self.home / "kubeconfig"

    @property
    def plan(self) -> Path:
        """The components to run, for the supervisor."""
        return self.home / "plan.json"

    @property
    def status(self) -> Path:
        """What the supervisor sees."""
        return self.home / "status.json"

    @property
    def host_before(self) -> Path:
        """The kernel settings as they were before the first `up`."""
        return self.home / "host-before.json"

    @property
    def lock(self) -> Path:
        """Held while the cluster is being changed."""
        return self.home / "lock"

    @property
    def build_lock(self) -> Path:
        """Held while something is being built: a long build must not keep `down` waiting."""
        return self.cache / "lock"

    @property
    def images(self) -> Path:
        """Archives of images, ready to be imported."""
        return self.cache / "images"

    @property
    def buildah(self) -> Path:
        return self.cache / "buildah"


def from_environment(environment: Mapping[str, str]) -> Paths:
    """DEVCLUSTER_HOME and DEVCLUSTER_CACHE, or the XDG folders."""
    user = Path(environment.get("HOME") or Path.home())
    state = Path(environment.get("XDG_STATE_HOME") or user / ".local" / "state")
    cache = Path(environment.get("XDG_CACHE_HOME") or user / ".cache")
    return Paths(
        home=_checked(Path(environment.get("DEVCLUSTER_HOME") or state / "rollfleet" / "devcluster")),
        cache=_checked(Path(environment.get("DEVCLUSTER_CACHE") or cache / "rollfleet" / "devcluster")),
    )


def _checked(folder: Path) -> Path:
    """Without links in it, since the kernel tells mounts by their real paths."""
    if not folder.is_absolute():
        raise InvalidInputError(f"not an absolute path: {folder}", "Set DEVCLUSTER_HOME and DEVCLUSTER_CACHE in full.")
    real = folder.resolve()
    if len(os.fsencode(real)) > LONGEST_HOME:
        raise InvalidInputError(
            f"too long for the sockets in it (over {LONGEST_HOME} bytes): {real}",
            "Set DEVCLUSTER_HOME and DEVCLUSTER_CACHE to shorter paths.",
        )
    return real
