"""The operator's image: small, without torch, and content with any user and a root file system that it cannot write."""

from pathlib import Path

from devcluster import images
from devcluster.paths import Paths
from tests.images.conftest import BASE, OPERATOR, ROOT
from tests.support.containers import Image, Pod, run

NOBODY_KNOWN = 70007  # has no entry in /etc/passwd
MB = 1_000_000
LIMIT_BYTES = 150 * MB  # as it is stored and pulled
OWN_BYTES = 160 * MB  # of what we add to the base, unpacked


def test_it_is_small(operator_image: Image, paths: Paths):
    archive = images.build(paths, images.Build(ROOT / "Dockerfile.operator", OPERATOR, ROOT, (BASE,)))
    assert 10 * MB < archive.stat().st_size < LIMIT_BYTES
    own = sum(file.lstat().st_size for file in (operator_image.files / "opt/rollfleet").rglob("*"))
    assert 0 < own < OWN_BYTES


def test_it_is_not_root(operator_image: Image):
    assert operator_image.configuration["User"] == "65532:65532"


def test_it_holds_no_engine(operator_image: Image, tmp_path: Path):
    names = ["torch", "vllm", "numba", "numpy", "uvicorn", "triton"]
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    pod = Pod(NOBODY_KNOWN, command=["/opt/rollfleet/bin/python", "-c", code])
    assert run(operator_image, pod, tmp_path) == (0, "[]\n")


def test_the_command_line_works_for_anybody_with_a_read_only_root(operator_image: Image, tmp_path: Path):
    code, said = run(operator_image, Pod(NOBODY_KNOWN, command=["rollfleet", "--help"]), tmp_path)
    assert code == 0
    assert "bump" in said


def test_the_operator_starts_for_anybody_with_a_read_only_root(operator_image: Image, tmp_path: Path):
    """As far as it gets without an API server: it says so, and ends."""
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    arguments = [
        "--all-namespaces",
        "--operator-namespace",
        "rollfleet-system",
        "--service-account",
        "rollfleet-operator",
        "--router-image",
        "registry.example/router:1",
    ]
    command = [*operator_image.command, *arguments]
    code, said = run(operator_image, Pod(NOBODY_KNOWN, environ, command, empty=["/tmp"]), tmp_path)
    assert code == 1, said
    assert "the operator cannot run" in said
    assert "Traceback" not in said
