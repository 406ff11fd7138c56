"""Every example, and every object that a page shows, is one that the API server would take, field by field."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from examples.demo.manifests import EngineKind, rollout_engine, weight_version
from rollfleet_operator.api.crd import KINDS, build_schema
from rollfleet_operator.api.meta import LABEL_COMPONENT, LABEL_FLEET
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.api.weightversion import WeightVersion
from rollfleet_operator.core.accept import ACCEPTED, judge_fleet
from rollfleet_operator.core.objects.common import COMPONENT_ENGINE
from tests.support.builders import make_settings
from tests.support.pages import objects
from tests.support.schemas import unknown_fields, violations

EXAMPLES = Path(__file__).parents[3] / "examples"
SCHEMAS = {kind.name: build_schema(kind) for kind in KINDS}
MODELS = {"RolloutEngine": RolloutEngine, "WeightVersion": WeightVersion}
REAL = EngineKind("engine:1", Path("/models"), Path("/venv"))
SIMULATED = EngineKind("engine:1", Path("/models"))


DOCUMENTS = list(objects())
OTHERS = [pytest.param(doc, id=f"{name} {doc['kind']}") for name, doc in DOCUMENTS if doc["kind"] not in MODELS]
FLEETS = [pytest.param(doc, id=name) for name, doc in DOCUMENTS if doc["kind"] == "RolloutEngine"]


def _all() -> list[Any]:
    found = [pytest.param(doc, id=name) for name, doc in DOCUMENTS if doc["kind"] in MODELS]
    assert found, "no example was found"
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


@pytest.mark.parametrize("document", FLEETS)
def test_the_operator_accepts_every_fleet(document: dict[str, Any]) -> None:
    fleet = RolloutEngine.model_validate(document | {"metadata": {"namespace": "default", **document["metadata"]}})
    on_a_laptop = document["metadata"]["name"] == "sim"  # docs/try.md: its chart allows hostPath
    assert judge_fleet(fleet, make_settings(host_path_allowed=on_a_laptop)) == ACCEPTED


@pytest.mark.parametrize("version", ["1.33", "1.36"])
@pytest.mark.parametrize("document", OTHERS)
def test_kubernetes_own_objects_are_as_it_would_take_them(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("folder", sorted(file.parent for file in EXAMPLES.rglob("trainer.yaml")), ids=lambda f: f.name)
def test_a_trainer_s_command_is_one_that_its_script_takes_for_its_fleet(folder: Path) -> None:
    """By the options that the script declares: it needs torch to be imported."""
    read = [yaml.safe_load_all((folder / name).read_text()) for name in ("rolloutengine.yaml", "trainer.yaml")]
    fleet, *others = (doc for docs in read for doc in docs)
    job = next(doc for doc in others if doc["kind"] == "Job")
    policy = next(doc for doc in others if doc["kind"] == "NetworkPolicy")
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert "command" not in container, "the image's entry point sets CANN's environment up"
    python, script, *options = container["args"]
    assert (python, script) == ("python3", "/push/trainer.py")
    given = dict(option.split("=", 1) for option in options)
    assert given["--backend"] == fleet["spec"]["weightTransfer"]["backend"]
    declared = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', (EXAMPLES / "push" / "trainer.py").read_text()))
    assert set(given) <= declared
    assert policy["spec"]["podSelector"]["matchLabels"] == {
        LABEL_FLEET: fleet["metadata"]["name"],
        LABEL_COMPONENT: COMPONENT_ENGINE,
    }
    [rule] = policy["spec"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"] == job["spec"]["template"]["metadata"]["labels"]


def test_the_check_sees_a_misspelt_field() -> None:
    document = weight_version("demo", "demo", 1, "step-1", weightTransfer={"backend": "ipc"})
    assert list(unknown_fields(document, SCHEMAS["WeightVersion"])) == [".spec.weightTransfer"]
    document["spec"]["version"] = -1
    assert violations(document, SCHEMAS["WeightVersion"]) == ["spec.version: -1 is less than the minimum of 1"]
