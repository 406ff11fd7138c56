"""The refusals of our CRDs by an API server's own code, without one; tests/integration has the server itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devtools import check_crds
from rollfleet_operator.api.generate import dump_yaml
from tests.support.bad_objects import BAD_FLEETS, BAD_VERSIONS, fleet, version
from tests.support.pages import our_objects

ROOT = Path(__file__).parents[2]
CRDS = [str(file) for file in sorted((ROOT / "crds").glob("*.yaml"))]
EXAMPLES = sorted(
    file for file in (ROOT / "examples").rglob("*.yaml") if "apiVersion: rollfleet.io/" in file.read_text()
)
Made = Callable[[], dict[str, Any]]


@pytest.mark.parametrize("make", [lambda: fleet("rl"), lambda: version("rl")], ids=["fleet", "version"])
def test_the_objects_that_are_spoilt_below_are_legal(make: Made, tmp_path: Path) -> None:
    file = tmp_path / "object.yaml"
    file.write_text(dump_yaml(make()))
    assert check_crds.run(CRDS, str(file)).stderr == ""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: str(file.relative_to(ROOT)))
def test_examples_are_taken(example: Path) -> None:
    assert check_crds.run(CRDS, str(example)).stderr == ""


def test_examples_in_folders_are_among_them() -> None:
    assert {"hccl", "ipc"} <= {file.parent.name for file in EXAMPLES}


def test_what_pages_show_is_taken(tmp_path: Path) -> None:
    shown = [(where, document) for where, document in our_objects() if where.endswith(".md")]
    assert len({where for where, _ in shown}) > 1
    file = tmp_path / "objects.yaml"
    file.write_text("---\n".join(dump_yaml(document) for _, document in shown))
    assert check_crds.run(CRDS, str(file)).stderr == "", [where for where, _ in shown]


@pytest.mark.parametrize(
    ("make", "cases"),
    [(lambda: fleet("rl"), BAD_FLEETS), (lambda: version("rl"), BAD_VERSIONS)],
    ids=["fleet", "version"],
)
def test_every_bad_object_is_refused_by_field(make: Made, cases: dict[str, Any], tmp_path: Path) -> None:
    documents = []
    for change, _ in cases.values():
        documents.append(make())
        change(documents[-1])
    file = tmp_path / "objects.yaml"
    file.write_text("---\n".join(map(dump_yaml, documents)))
    said = check_crds.run(CRDS, str(file)).stderr.splitlines()
    for number, (case, (_, words)) in enumerate(cases.items()):
        about = [line for line in said if f"document {number}: " in line]
        assert any(words in line for line in about), (case, words, about)
