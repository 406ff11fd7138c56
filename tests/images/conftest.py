"""The images, built for real from the Dockerfiles on devcluster's base, without a cluster."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from devcluster import base, images, lifecycle
from devcluster.paths import Paths, from_environment
from tests.support.containers import Image

ROOT = Path(__file__).resolve().parents[2]
OPERATOR, ENGINE = "rollfleet/operator:tested", "rollfleet/engine:tested"
BASE = f"BASE={base.base_image()}" if Path("/etc/debian_version").exists() else ""


@pytest.fixture(scope="session")
def paths() -> Paths:
    if platform.system() != "Linux" or os.geteuid() != 0:
        pytest.skip("building and running images needs root on Linux")
    found = from_environment(os.environ)
    lifecycle.build(found)
    return found


@contextmanager
def _image(paths: Paths, file: str, tag: str) -> Iterator[Image]:
    with lifecycle.locked(paths.build_lock):
        images.make(paths, images.Build(ROOT / file, tag, ROOT, (BASE,)))
    with images.files(paths, tag) as files:
        yield Image(files, images.configuration(paths, tag))


@pytest.fixture(scope="session")
def operator_image(paths: Paths) -> Iterator[Image]:
    with _image(paths, "Dockerfile.operator", OPERATOR) as image:
        yield image


@pytest.fixture(scope="session")
def engine_image(paths: Paths) -> Iterator[Image]:
    with _image(paths, "Dockerfile.engine", ENGINE) as image:
        yield image
