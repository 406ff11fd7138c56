"""What the Dockerfiles and the chart must agree on."""

import re
from pathlib import Path

import pytest

from rollfleet_operator.api.crd import ROLLOUT_ENGINE, build_schema
from rollfleet_operator.core.objects.pod import HOME, RUN_DIR, TLS_DIR
from tests.support.helm import render

ROOT = Path(__file__).parents[2]
IMAGE = {"image": {"repository": "registry.example/rollfleet-operator"}}


def instructions(name: str) -> list[str]:
    """Lines with continuations joined, without comments."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line]


def last(name: str, keyword: str) -> str:
    return [line for line in instructions(name) if line.startswith(f"{keyword} ")][-1].removeprefix(f"{keyword} ")


def test_operators_user_is_the_charts() -> None:
    (pod,) = [o["spec"]["template"]["spec"] for o in render(IMAGE) if o["kind"] == "Deployment"]
    user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert last("Dockerfile.operator", "USER") == user
    assert last("Dockerfile.router", "USER") == user
    assert pod["containers"][0].get("command") is None, "the image's own entry point is used"


@pytest.mark.parametrize("name", ["Dockerfile.operator", "Dockerfile.engine", "Dockerfile.router"])
def test_base_can_be_chosen(name: str) -> None:
    lines = instructions(name)
    assert lines[0].startswith("ARG BASE")
    assert {line for line in lines if line.startswith("FROM ")} <= {"FROM ${BASE} AS build", "FROM ${BASE}"}


@pytest.mark.parametrize("name", ["Dockerfile.operator", "Dockerfile.engine", "Dockerfile.router"])
def test_a_default_base_is_pinned_by_a_tag(name: str) -> None:
    first = instructions(name)[0]
    assert re.fullmatch(r"ARG BASE=[a-z0-9./-]+/[a-z0-9./-]+:[A-Za-z0-9._-]+", first)
    assert not first.endswith(":latest")


def test_engines_home_is_the_one_that_the_pod_mounts() -> None:
    environment = dict(re.findall(r"(\w+)=(\S+)", last("Dockerfile.engine", "ENV")))
    assert environment["HOME"] == HOME
    assert environment["XDG_CACHE_HOME"].startswith(f"{HOME}/")
    assert environment["PYTHONPATH"].startswith("/opt/rollfleet/site${PYTHONPATH:")
    assert last("Dockerfile.engine", "ENTRYPOINT") == '["/opt/rollfleet/entrypoint"]'
    entrypoint = (ROOT / "engine/rollfleet_engine/launch/entrypoint.sh").read_text()
    assert entrypoint.splitlines()[-1] == "exec python3 -m rollfleet_engine.launch", "the launcher must be PID 1"


@pytest.mark.parametrize(
    "path", [HOME, RUN_DIR, TLS_DIR, "/rollfleet/model", "/rollfleet/checkpoints", "/opt/rollfleet"]
)
def test_no_extra_volume_may_cover_what_is_ours(path: str) -> None:
    """The rule of the CRD, in Python's regular expressions: the same meaning as RE2's here."""
    extra = build_schema(ROLLOUT_ENGINE)["properties"]["spec"]["properties"]["volumes"]["properties"]["extra"]
    rules = extra["items"]["properties"]["mountPath"]["x-kubernetes-validations"]
    (pattern,) = [rule["rule"].split("'")[1] for rule in rules if "cover" in rule["message"]]
    for covered in (path, f"{path}/below"):
        assert re.search(pattern, covered)
    for free in ("/data", "/rollfleet-other", "/usr/local/lib", "/root/.cache/venv"):
        assert not re.search(pattern, free)
