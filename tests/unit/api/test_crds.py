"""The CRDs obey the API server's rules for structural schemas, stay small, and lose no field."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfleet_operator.api.crd import KINDS, ROLLOUT_ENGINE, WEIGHT_VERSION, Kind, build_crd, build_schema
from rollfleet_operator.api.generate import find_stale, generate, render_crd
from rollfleet_operator.api.rolloutengine import RolloutEngineStatus
from rollfleet_operator.api.weightversion import WeightVersionStatus
from tests.support.objects import full_fleet_status, full_weight_version_status
from tests.support.schemas import unknown_fields, violations, walk

ROOT = Path(__file__).parents[3]
# vLLM's own settings, whose keys are its to name; the operator bounds and judges them (core/accept.py).
VLLMS_OWN = {".spec.engine.additionalConfig", ".spec.engine.compilationConfig"}
MAX_BYTES = 100 * 1024
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.short_name)


@kinds
def test_every_node_is_structural(kind: Kind) -> None:
    for path, node in walk(build_schema(kind)):
        assert not {"$ref", "$defs", "title", "const", "allOf", "oneOf", "nullable"} & node.keys(), path
        if "x-kubernetes-int-or-string" in node:
            continue
        assert node["type"] in {"object", "array", "string", "integer", "boolean"}, path
        if node["type"] == "array":
            assert node["items"], path
            assert node["x-kubernetes-list-type"] in {"atomic", "map", "set"}, path
        if node["type"] == "integer":
            assert node["format"] in {"int32", "int64"}, path


@kinds
def test_no_object_is_open(kind: Kind) -> None:
    """An open object would swallow misspelt fields. metadata is the API server's own."""
    for path, node in walk(build_schema(kind)):
        if node.get("type") == "object" and path != ".metadata" and path not in VLLMS_OWN:
            assert node.get("properties") or node.get("additionalProperties"), path
        assert ("x-kubernetes-preserve-unknown-fields" in node) is (path in VLLMS_OWN), path


@kinds
def test_what_users_write_is_bounded(kind: Kind) -> None:
    """Unbounded strings and lists have no CEL cost estimate, and let one object fill the store."""
    for path, node in walk(build_schema(kind)["properties"]["spec"]):
        if node.get("type") == "string" and "enum" not in node:
            assert "maxLength" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if isinstance(node.get("additionalProperties"), dict):
            assert "maxProperties" in node, path


@kinds
def test_every_field_is_described(kind: Kind) -> None:
    for path, node in walk(build_schema(kind)):
        is_item = path.endswith(("[]", ".*"))
        if not is_item and path not in {".apiVersion", ".kind", ".metadata"}:
            assert node.get("description"), path


@kinds
def test_patterns_need_no_lookaround(kind: Kind) -> None:
    """Go's RE2 has none; it would refuse the CRD."""
    for path, node in walk(build_schema(kind)):
        assert "(?" not in node.get("pattern", ""), path
        re.compile(node.get("pattern", ""))


@kinds
def test_every_rule_names_a_field(kind: Kind) -> None:
    schema = build_schema(kind)
    names = {name.rsplit(".", 1)[-1].removesuffix("[]") for name, _ in walk(schema)} | {"metadata.name"}
    for path, node in walk(schema):
        for validation in node.get("x-kubernetes-validations", []):
            assert any(name and name in validation["message"] for name in names), (path, validation["message"])


@kinds
def test_defaults_obey_their_own_schema(kind: Kind) -> None:
    for path, node in walk(build_schema(kind)):
        if "default" in node:
            assert violations(node["default"], node) == [], path


@kinds
def test_status_has_no_defaults(kind: Kind) -> None:
    """A default in status would be a word that nobody said."""
    assert [path for path, node in walk(build_schema(kind)["properties"]["status"]) if "default" in node] == []


@kinds
def test_crd_is_small(kind: Kind) -> None:
    assert len(render_crd(kind).encode()) < MAX_BYTES


@kinds
def test_columns_and_scale_point_at_fields(kind: Kind) -> None:
    version = build_crd(kind)["spec"]["versions"][0]
    fields = {path for path, _ in walk(version["schema"]["openAPIV3Schema"])}
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += list(version["subresources"].get("scale", {}).values())
    for path in paths:
        plain = re.sub(r"\[\?\(@\.type==\"\w+\"\)\]", "[]", path)
        assert plain in fields or plain == ".metadata.creationTimestamp", path


def test_columns_are_those_of_the_design() -> None:
    narrow = {
        kind.short_name: [column["name"] for column in kind.columns if "priority" not in column] for kind in KINDS
    }
    assert narrow == {
        "roe": ["Mode", "Desired", "Serving", "Version", "State", "Age"],
        "wv": ["Version", "Committed", "Phase", "Engines", "Paused", "Age", "Reason", "Message"],
    }


@pytest.mark.parametrize(
    ("kind", "status"),
    [(ROLLOUT_ENGINE, full_fleet_status()), (WEIGHT_VERSION, full_weight_version_status())],
    ids=["roe", "wv"],
)
def test_every_status_field_survives(kind: Kind, status: RolloutEngineStatus | WeightVersionStatus) -> None:
    """C31: a field that the schema lacks is dropped without a word."""
    schema = build_schema(kind)["properties"]["status"]
    written = status.dump()
    assert list(unknown_fields(written, schema)) == []
    assert violations(written, schema) == []
    assert type(status).model_validate(written) == status


@pytest.mark.parametrize("status", [full_fleet_status(), full_weight_version_status()], ids=["roe", "wv"])
def test_the_full_status_is_full(status: RolloutEngineStatus | WeightVersionStatus) -> None:
    """Else the test above would pass on what it does not hold."""
    assert set(type(status).model_fields) == status.model_fields_set
    empty = [name for name, value in status if value in (None, "", (), 0)]
    assert empty == []


def test_generated_files_are_fresh() -> None:
    assert find_stale(ROOT, generate()) == []


def test_a_changed_or_left_over_file_is_found(tmp_path: Path) -> None:
    files = {Path("crds/a.yaml"): "a", Path("docs/api.md"): "b"}
    (tmp_path / "crds").mkdir()
    (tmp_path / "crds/a.yaml").write_text("old")
    (tmp_path / "crds/left-over.yaml").write_text("")
    assert find_stale(tmp_path, files) == [Path("crds/a.yaml"), Path("crds/left-over.yaml"), Path("docs/api.md")]


@kinds
def test_checked_in_crd_reads_back(kind: Kind) -> None:
    text = (ROOT / "crds" / f"rollfleet.io_{kind.plural}.yaml").read_text()
    assert yaml.safe_load(text) == build_crd(kind)


PATH_RULE = re.compile(r"(^|/)[.]{0,2}(/|$)")  # the regular expression inside the CEL rule; same meaning in RE2


def _escapes(path: str) -> bool:
    return any(segment in {"", ".", ".."} for segment in path.split("/"))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="a./", min_size=1, max_size=12))
def test_path_rule_refuses_exactly_what_leaves_or_blurs_the_path(path: str) -> None:
    assert bool(PATH_RULE.search(path)) == _escapes(path)


def test_path_rule_is_the_one_in_the_crd() -> None:
    schema: dict[str, Any] = build_schema(WEIGHT_VERSION)["properties"]["spec"]
    path = schema["properties"]["source"]["properties"]["checkpoint"]["properties"]["path"]
    assert PATH_RULE.pattern in path["x-kubernetes-validations"][0]["rule"]
