"""Every example is an object that the API server would take, field by field."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.demo.manifests import EngineKind, rollout_engine, weight_version
from rollfleet_operator.api.crd import KINDS, build_schema
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.api.weightversion import WeightVersion
from tests.support.schemas import unknown_fields, violations

EXAMPLES = Path(__file__).parents[3] / "examples"
SCHEMAS = {kind.name: build_schema(kind) for kind in KINDS}
MODELS = {"RolloutEngine": RolloutEngine, "WeightVersion": WeightVersion}
REAL = EngineKind("engine:1", Path("/models"), Path("/venv"))
SIMULATED = EngineKind("engine:1", Path("/models"))


def _all() -> list[Any]:
    files = sorted(EXAMPLES.glob("*.yaml"))
    assert files, "no example was found"
    found = [pytest.param(doc, id=file.name) for file in files for doc in yaml.safe_load_all(file.read_text())]
    return [
        *found,
        pytest.param(rollout_engine("demo", "demo", REAL, 2), id="demo fleet"),
        pytest.param(rollout_engine("demo", "demo", SIMULATED, 8), id="demo fleet of simulators"),
        pytest.param(weight_version("demo", "demo", 1, "step-1"), id="demo version"),
    ]


@pytest.mark.parametrize("document", _all())
def test_example_has_only_known_fields_and_legal_values(document: dict[str, Any]) -> None:
    schema = SCHEMAS[document["kind"]]
    assert list(unknown_fields(document, schema)) == []
    assert violations(document, schema) == []


@pytest.mark.parametrize("document", _all())
def test_example_reads_into_its_model(document: dict[str, Any]) -> None:
    metadata = {"namespace": "default", **document["metadata"]}
    read = MODELS[document["kind"]].model_validate({**document, "metadata": metadata})
    assert read.metadata.name == document["metadata"]["name"]


def test_the_check_sees_a_misspelt_field() -> None:
    document = weight_version("demo", "demo", 1, "step-1", weightTransfer={"backend": "ipc"})
    assert list(unknown_fields(document, SCHEMAS["WeightVersion"])) == [".spec.weightTransfer"]
    document["spec"]["version"] = -1
    assert violations(document, SCHEMAS["WeightVersion"]) == ["spec.version: -1 is less than the minimum of 1"]
