"""What the pages name exists: files and headings of links, files in the text, modules, targets of make."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollfleet_engine.launch.facts import ModelFolder
from rollfleet_engine.launch.plan import Plan, Refused, plan
from rollfleet_operator.api.crd import KINDS, build_schema
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.core.objects.pod import engine_config
from tests.support.builders import make_settings
from tests.support.pages import ALL_PAGES, PAGES, ROOT, anchors, name_of, objects, prose, recipes
from tests.support.schemas import Schema
from tests.unit.launch.conftest import NEW_ASCEND, OLD_ASCEND, build_facts, on_npu

LINK = re.compile(r"\]\(([^)\s]+)\)")
TARGET = re.compile(r"(?:`|^)make ([a-z][a-z0-9-]*)", re.MULTILINE)
MODULE = re.compile(r"python3? -m ((?:devcluster|devtools|examples|tests|rollfleet_\w+)[\w.]*)")
WRITTEN_FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|md|yaml|go|tpl|txt)")
OF_OTHERS = ("vllm/", "vllm_ascend/", "torch_npu/", "docs/source/", "docs/en/", "pkg/", "component/", "csrc/")
TOP = ("operator", "engine", "kernels", "engine/rollfleet_engine", "operator/rollfleet_operator", ".")
CODE = ("operator", "engine", "kernels", "devcluster", "devtools", "examples", "tests")
SCHEMAS = [build_schema(kind) for kind in KINDS]
OF_ANY_NAME = ("spec.engine.additionalConfig.", "spec.engine.compilationConfig.", "spec.resources.limits.")
DECLARED = set(re.findall(r"(?m)^([a-z0-9-]+):", (ROOT / "Makefile").read_text()))
TOLD_BY_HELP = set(re.findall(r"(?m)^([a-z0-9-]+):.*## \S", (ROOT / "Makefile").read_text()))


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page))):
        if link.startswith(("https://", "http://")):
            continue
        file, _, heading = link.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), link
        assert not heading or heading in anchors(there), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    written = {found for quoted in re.findall(r"`([^`\n]+)`", prose(page)) for found in WRITTEN_FILE.findall(quoted)}
    for file in written:
        if file.startswith(OF_OTHERS) or f"/{file}" in prose(page):  # below an absolute path: of a container
            continue
        assert any((top / file).exists() for top in (page.parent, *(ROOT / top for top in TOP))), file


def test_the_code_map_names_modules_that_are_there() -> None:
    """Also those of a folder that the row has named."""
    present = {file.name for top in CODE for file in (ROOT / top).rglob("*.py")}
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", prose(ROOT / "docs" / "code-map.md")))
    assert len(named) > 100
    assert named <= present


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_targets_and_modules_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    assert set(TARGET.findall(text)) <= TOLD_BY_HELP
    for module in MODULE.findall(text):
        place = module.replace(".", "/")
        found = [f"{place}.py", f"{place}/__main__.py"]
        assert any((ROOT / top / file).exists() for top in TOP for file in found), module


def fields(schema: Schema, path: str) -> Iterator[str]:
    """Paths of spec and status without indices; below a map nobody can say."""
    yield path
    for name, child in schema.get("properties", {}).items():
        yield from fields(child, f"{path}.{name}" if path else name)
    if "items" in schema:
        yield from fields(schema["items"], path)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fields_that_are_named_are_in_the_api(page: Path) -> None:
    known = {path for schema in SCHEMAS for path in fields(schema, "")}
    text = re.sub(r"jsonpath='[^']*'", "", prose(page))  # kubectl's, of any kind
    for field in set(re.findall(r"\b(?:spec|status)\.[a-z]\w*(?:(?:\[\w*\])?\.[a-z]\w*)*", text)):
        plain = re.sub(r"\[\w*\]", "", field)
        assert plain in known or plain.startswith(OF_ANY_NAME) or plain.endswith(".py"), field


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_values_that_are_set_are_the_chart_s(page: Path) -> None:
    values = yaml.safe_load((ROOT / "charts" / "rollfleet" / "values.yaml").read_text())
    for key in re.findall(r"--set ([\w.]+)=", page.read_text()):
        place = values
        for part in key.split("."):
            assert part in place, key
            place = place[part]


def test_help_tells_every_target() -> None:
    assert DECLARED <= TOLD_BY_HELP


def test_every_decision_is_in_the_list_of_decisions() -> None:
    folder = ROOT / "docs" / "adr"
    listed = re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(file.name for file in folder.glob("[0-9]*.md"))


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = set(re.findall(r"\]\(([a-z-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("release", ["0.23.0", "0.27.1", "0.29.0", "0.32.0"])
@pytest.mark.parametrize("document", recipes(), ids=lambda fleet: fleet["metadata"]["name"])
def test_what_launch_md_shows_is_planned_on_npus(document: dict[str, Any], release: str) -> None:
    fleet = RolloutEngine.model_validate(document | {"metadata": {"namespace": "rl", **document["metadata"]}})
    before = release == "0.23.0"
    plugin = dataclasses.replace(
        OLD_ASCEND if before else NEW_ASCEND, device=document["spec"]["accelerator"]["profile"]
    )
    model = ModelFolder(exists=True, is_folder=True, has_config=True, weight_files=("m.safetensors",), experts=128)
    facts = build_facts(installation=on_npu(plugin, release), model=model)
    found = plan(engine_config(fleet, make_settings()), facts)
    flags = document["spec"]["rlConfig"]
    if before and flags.get("enableTrainingConsistency") and not flags.get("enableBatchInvariant"):
        assert isinstance(found, Refused)  # FA3 comes with batch invariance only there, as the page says
        return
    assert isinstance(found, Plan), found
    if "toolCalling" in document["spec"].get("features", {}):
        assert "--tool-call-parser" in found.argv
    if flags.get("enableBatchInvariant"):
        assert found.env["VLLM_BATCH_INVARIANT"] == "1"


def test_examples_do_not_overwrite_each_other_s_objects() -> None:
    """In one namespace: a Role of the same name would take the rights of the one before. Fleets are one's choice."""
    seen: dict[tuple[str, str], tuple[str, Any]] = {}
    for where, document in objects():
        kind, name = document["kind"], document["metadata"]["name"]
        if kind in ("RolloutEngine", "WeightVersion"):
            continue
        content = {key: value for key, value in document.items() if key != "metadata"}
        for subject in content.get("subjects", ()):
            subject.pop("namespace", None)  # a page writes out what a file leaves to `kubectl apply -n`
        first, before = seen.setdefault((kind, name), (where, content))
        assert content == before, f"{kind} {name} of {where} is another one in {first}"
    assert {"Role", "RoleBinding", "Job"} <= {kind for kind, _ in seen}
