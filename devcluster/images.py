"""Images without a registry and without a daemon: buildah builds them, containerd imports them."""

import configparser
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster.errors import InvalidInputError
from devcluster.paths import Paths
from devcluster.shell import run, step

BUILD_TIMEOUT_S = 3600.0
TRANSFER_TIMEOUT_S = 900.0
COMMAND_TIMEOUT_S = 60.0
KEEP_UNUSED_S = 14 * 86400.0
KEEP_LAYERS_S = 2 * 86400.0  # each change of a source file leaves some, of hundreds of MB
SYSTEM_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
IN_BUILD = "/run/devcluster"
CERTIFICATES_IN_BUILD = f"{IN_BUILD}/ca-certificates.crt"


@dataclass(frozen=True)
class Build:
    """One image to make. `volumes` are HOST:CONTAINER[:OPTIONS], seen by RUN steps and not kept in the image."""

    file: Path
    tag: str
    context: Path
    arguments: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()


def full_name(tag: str) -> str:
    """The name as kubelet and containerd complete it: docker.io/library/ where no registry, :latest where no tag."""
    first, slash, _ = tag.partition("/")
    has_registry = bool(slash) and ("." in first or ":" in first or first == "localhost")
    name = tag if has_registry else f"docker.io/{tag}" if slash else f"docker.io/library/{tag}"
    if not re.fullmatch(r"[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)+(:[A-Za-z0-9_.-]+)?", name):
        raise InvalidInputError(f"not an image name: {tag}", "Write it as NAME:TAG, in lower case.")
    return name if ":" in name.rsplit("/", 1)[1] else f"{name}:latest"


def pip_options(files: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """pip's settings of this machine: its files, the later ones first in rank, then PIP_* (pip's own precedence)."""
    options: dict[str, str] = {}
    for text in files:
        parser = configparser.RawConfigParser()
        parser.read_string(text)
        options.update({key: value for section in parser.sections() for key, value in parser.items(section)})
    for name, value in environment.items():
        if name.startswith("PIP_") and name not in {"PIP_CONFIG_FILE", "PIP_CERT"}:
            options[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return options


def wheel_folders(options: Mapping[str, str]) -> dict[str, str]:
    """Local folders of wheels, each with the place where a build sees it: no path of the machine in an image."""
    folders = [word for word in options.get("find-links", "").split() if word.startswith("/")]
    return {folder: f"{IN_BUILD}/wheels-{number}" for number, folder in enumerate(folders)}


def pip_config(options: Mapping[str, str], *, certificates: bool) -> str:
    """A pip.conf for RUN steps, with this machine's files at the places where the build sees them."""
    kept = {key: value for key, value in options.items() if key != "cert"}
    if certificates:
        kept["cert"] = CERTIFICATES_IN_BUILD
    if "find-links" in kept:
        seen = wheel_folders(options)
        kept["find-links"] = "\n".join(seen.get(word, word) for word in kept["find-links"].split())
    continued = {key: value.replace("\n", "\n    ") for key, value in kept.items()}
    return "\n".join(["[global]", *(f"{key} = {value}" for key, value in sorted(continued.items()))]) + "\n"


def _pip_files(environment: Mapping[str, str]) -> list[str]:
    user = Path(environment.get("HOME") or Path.home())
    named = environment.get("PIP_CONFIG_FILE")
    places = [Path("/etc/pip.conf"), user / ".pip/pip.conf", user / ".config/pip/pip.conf"]
    return [path.read_text() for path in [*places, *([Path(named)] if named else [])] if path.is_file()]


def _certificates(environment: Mapping[str, str]) -> Path | None:
    named = [environment.get(name) for name in ("PIP_CERT", "SSL_CERT_FILE")]
    return next((path for path in [*(Path(n) for n in named if n), SYSTEM_CERTIFICATES] if path.is_file()), None)


def host_volumes(scratch: Path, environment: Mapping[str, str]) -> list[str]:
    """What lets a RUN step use this machine's way to the network: pip's settings, certificates, local wheel folders.

    Mounted and not passed as arguments, so that nothing of the machine ends up in a Dockerfile or an image.
    """
    options = pip_options(_pip_files(environment), environment)
    certificates = _certificates(environment)
    config = scratch / "pip.conf"
    config.write_text(pip_config(options, certificates=certificates is not None))
    volumes = [f"{config}:/etc/pip.conf:ro"]
    if certificates is not None:
        volumes.append(f"{certificates.resolve()}:{CERTIFICATES_IN_BUILD}:ro")
    wheels = wheel_folders(options).items()
    return volumes + [f"{folder}:{seen}:ro" for folder, seen in wheels if Path(folder).is_dir()]


def _buildah(paths: Paths, *arguments: object, timeout_s: float) -> str:
    storage = ["--root", paths.buildah / "storage", "--runroot", paths.buildah / "run", "--storage-driver", "overlay"]
    return run(["buildah", *storage, *arguments], timeout_s=timeout_s)


def _ctr(paths: Paths, *arguments: object, timeout_s: float) -> str:
    return run(["ctr", "--address", paths.containerd_socket, "--namespace", "k8s.io", *arguments], timeout_s=timeout_s)


def build_command(build: Build, identity: Path, volumes: Sequence[str]) -> list[str]:
    """Arguments of buildah; its layer cache is what makes an unchanged build quick."""
    command = ["bud", "--isolation", "chroot", "--layers", "--format", "oci", "--iidfile", str(identity)]
    command += ["--file", str(build.file), "--tag", full_name(build.tag)]
    command += [word for argument in build.arguments for word in ("--build-arg", argument)]
    command += [word for volume in [*volumes, *build.volumes] for word in ("--volume", volume)]
    return [*command, str(build.context)]


def build(paths: Paths, wanted: Build) -> Path:
    """Build an image and return its archive; both are kept, and made again only when the inputs have changed."""
    image = make(paths, wanted)
    with step(f"storing image {wanted.tag}"):
        return _archive(paths, wanted.tag, image)


def make(paths: Paths, wanted: Build) -> str:
    """Build an image and return its id, without an archive of it."""
    if not wanted.file.is_file():
        raise InvalidInputError(f"no such file: {wanted.file}")
    paths.images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="devcluster-") as scratch, step(f"building image {wanted.tag}"):
        identity = Path(scratch) / "id"
        command = build_command(wanted, identity, host_volumes(Path(scratch), os.environ))
        _buildah(paths, *command, timeout_s=BUILD_TIMEOUT_S)
        return identity.read_text().strip().removeprefix("sha256:")


def configuration(paths: Paths, tag: str) -> dict[str, Any]:
    """What an image that was built says of user, environment and entry point (OCI image specification, config)."""
    shown = _buildah(paths, "inspect", "--type", "image", full_name(tag), timeout_s=COMMAND_TIMEOUT_S)
    return dict(json.loads(shown)["OCIv1"]["config"])


@contextlib.contextmanager
def files(paths: Paths, tag: str) -> Iterator[Path]:
    """The files of an image that was built, as a folder. What is written there is thrown away."""
    container = _buildah(paths, "from", "--pull-never", full_name(tag), timeout_s=COMMAND_TIMEOUT_S).strip()
    try:
        yield Path(_buildah(paths, "mount", container, timeout_s=COMMAND_TIMEOUT_S).strip())
    finally:
        _buildah(paths, "rm", container, timeout_s=COMMAND_TIMEOUT_S)


def archive_name(tag: str, image: str) -> str:
    return f"{re.sub(r'[^a-z0-9.]+', '-', full_name(tag).lower())}@{image[:16]}.tar"


def _archive(paths: Paths, tag: str, image: str) -> Path:
    """One archive for each name: the older ones of the same name are of no more use."""
    target = paths.images / archive_name(tag, image)
    if not target.exists():
        unfinished = target.with_suffix(f".{os.getpid()}")
        push = ["push", "--quiet", "--disable-compression", image, f"oci-archive:{unfinished}:{full_name(tag)}"]
        _buildah(paths, *push, timeout_s=TRANSFER_TIMEOUT_S)
        unfinished.replace(target)
    os.utime(target)
    for other in paths.images.glob(f"{target.name.partition('@')[0]}@*"):
        if other != target:
            other.unlink(missing_ok=True)
    return target


def _loaded(paths: Paths) -> dict[str, str]:
    record = paths.home / "images.json"
    return json.loads(record.read_text()) if record.exists() else {}


def load(paths: Paths, tag: str, archive: Path) -> None:
    """Import an archive into the running cluster, unless that very image is there already."""
    name = full_name(tag)
    present = _ctr(paths, "images", "list", "--quiet", timeout_s=COMMAND_TIMEOUT_S).split()
    if _loaded(paths).get(name) == archive.name and name in present:
        return
    with step(f"loading {name}"):
        _ctr(paths, "images", "import", archive, timeout_s=TRANSFER_TIMEOUT_S)
    record = paths.home / "images.json"
    new = record.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps({**_loaded(paths), name: archive.name}, indent=1))
    new.replace(record)


def present(paths: Paths) -> list[str]:
    """Names of the images in the cluster, without the digests that containerd lists beside them."""
    names = _ctr(paths, "images", "list", "--quiet", timeout_s=COMMAND_TIMEOUT_S).split()
    return sorted(name for name in names if "@" not in name and not name.startswith("sha256:"))


def has_stale_layers(listed: str, now: float) -> bool:
    """Whether `buildah images --json` shows layers of an image that was replaced long ago."""
    return any(not image["names"] and now - image["created"] > KEEP_LAYERS_S for image in json.loads(listed) or [])


def prune(paths: Paths, now: float) -> None:
    """Drop archives that nothing has used for a while, and the layers of images that were replaced long ago."""
    for file in paths.images.glob("*"):
        if now - file.stat().st_mtime > KEEP_UNUSED_S:
            file.unlink()
    if has_stale_layers(_buildah(paths, "images", "--all", "--json", timeout_s=COMMAND_TIMEOUT_S), now):
        _buildah(paths, "rmi", "--prune", timeout_s=TRANSFER_TIMEOUT_S)
