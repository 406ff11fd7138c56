"""The Go compiler: the machine's own if it is new enough, else the pinned one from the module proxy of GOPROXY."""

import base64
import hashlib
import os
import platform
import re
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path

from devcluster.errors import CommandFailedError, MissingPrerequisiteError
from devcluster.paths import Paths
from devcluster.shell import run, step

PINNED = "1.26.8"
LEAST = (1, 26)
USUAL_PLACES = (Path("/usr/local/go/bin/go"), Path("/usr/lib/go-1.26/bin/go"))
DOWNLOAD_TIMEOUT_S = 120.0

# Go's own checksum of the module golang.org/toolchain (golang.org/x/mod/sumdb/dirhash, "h1"), by GOARCH.
CHECKSUMS = {
    "amd64": "h1:ZOmGe1OnfREDMIdb1Qi4G9JSuDPBLGExZMQ4nis1RXM=",
    "arm64": "h1:sYL/O6MqS68ML0kjsQ36WoYIpJqkw60TxizWUYUKQMc=",
}
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def parse_version(text: str) -> tuple[int, int]:
    """`go version go1.26.8 linux/amd64` as (1, 26)."""
    found = re.search(r"go(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def _new_enough(go: Path) -> bool:
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    return parse_version(run([go, "version"], timeout_s=30, env=environment)) >= LEAST


def find(paths: Paths) -> Path | None:
    on_path = shutil.which("go")
    places = [Path(on_path)] if on_path else []
    candidates = [*places, *USUAL_PLACES, _installed(paths) / "bin" / "go"]
    return next((go for go in candidates if go.exists() and _new_enough(go)), None)


def _installed(paths: Paths) -> Path:
    return paths.cache / f"go-{PINNED}"


def ensure(paths: Paths) -> Path:
    """A Go that is new enough, fetched if the machine has none."""
    found = find(paths)
    if found is not None:
        return found
    with step(f"fetching Go {PINNED}"):
        _install(paths)
    return _installed(paths) / "bin" / "go"


def proxies(environment: Mapping[str, str]) -> list[str]:
    """The module proxies of GOPROXY, in order; `direct` and `off` are no places to fetch from."""
    listed = re.split(r"[,|]", environment.get("GOPROXY", ""))
    return [url.strip().rstrip("/") for url in listed if url.strip().startswith(("http://", "https://"))]


def module_hash(archive: zipfile.ZipFile) -> str:
    """Go's h1 checksum of a module's zip: the hash of the sorted list of its files' hashes."""
    lines = (f"{hashlib.sha256(archive.read(name)).hexdigest()}  {name}\n" for name in sorted(archive.namelist()))
    return "h1:" + base64.b64encode(hashlib.sha256("".join(lines).encode()).digest()).decode()


def _install(paths: Paths) -> None:
    architecture = MACHINES.get(platform.machine(), "")
    if architecture not in CHECKSUMS:
        raise MissingPrerequisiteError(
            f"no Go {PINNED} is pinned for {platform.machine()}", f"Install Go {PINNED} by hand."
        )
    version = f"v0.0.1-go{PINNED}.linux-{architecture}"
    paths.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=paths.cache) as scratch:
        file = Path(scratch) / "go.zip"
        _download(f"golang.org/toolchain/@v/{version}.zip", file)
        with zipfile.ZipFile(file) as archive:
            if module_hash(archive) != CHECKSUMS[architecture]:
                raise CommandFailedError(f"the Go {PINNED} that was fetched is not the pinned one", "Check GOPROXY.")
            archive.extractall(scratch)
        unpacked = Path(scratch) / f"golang.org/toolchain@{version}"
        for folder in (unpacked / "bin", unpacked / "pkg" / "tool"):
            for program in (path for path in folder.rglob("*") if path.is_file()):
                program.chmod(0o755)  # a module's zip carries no modes
        unpacked.rename(_installed(paths))


def _download(name: str, target: Path) -> None:
    failures = []
    for proxy in proxies(os.environ):
        try:
            with (
                urllib.request.urlopen(f"{proxy}/{name}", timeout=DOWNLOAD_TIMEOUT_S) as answer,  # noqa: S310 - proxies() are http(s)
                target.open("wb") as out,
            ):
                shutil.copyfileobj(answer, out)
                return
        except (OSError, urllib.error.URLError) as error:
            failures.append(f"{proxy}: {error}")
    raise MissingPrerequisiteError(
        f"Go {PINNED} could not be fetched: {'; '.join(failures) or 'the environment variable GOPROXY names no proxy'}",
        f"Install Go {'.'.join(map(str, LEAST))} or newer and put it on PATH, or set GOPROXY.",
    )
