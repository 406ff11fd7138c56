"""Every example, and every object that a page shows, is one that the API server would take, field by field."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from examples.demo.manifests import EngineKind, rollout_engine, weight_version
from rollfleet_operator.api.crd import KINDS, build_schema
from rollfleet_operator.api.meta import LABEL_TRAINER
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.api.weightversion import WeightVersion
from rollfleet_operator.core.accept import ACCEPTED, judge_fleet
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


def _rights(fleet: str) -> list[Any]:
    """The rules that docs/trainer.md gives the trainer of fleet qwen."""
    block = re.search(r"```yaml\n(.*?)```", (EXAMPLES.parent / "docs" / "trainer.md").read_text(), re.DOTALL)
    assert block is not None
    text = block[1].replace("[qwen]", f"[{fleet}]").replace("[qwen-sender]", f"[{fleet}-sender]")
    role = next(doc for doc in yaml.safe_load_all(text) if doc["kind"] == "Role")
    rules: list[Any] = role["rules"]
    return rules


@pytest.mark.parametrize("folder", sorted(file.parent for file in EXAMPLES.rglob("trainer.yaml")), ids=lambda f: f.name)
def test_a_trainer_may_push_to_its_fleet_by_a_command_that_its_script_takes(folder: Path) -> None:
    """By the options that the script declares: it needs torch to be imported."""
    read = [yaml.safe_load_all((folder / name).read_text()) for name in ("rolloutengine.yaml", "trainer.yaml")]
    fleet, *others = (doc for docs in read for doc in docs)
    name = fleet["metadata"]["name"]
    found = {doc["kind"]: doc for doc in others}
    pod = found["Job"]["spec"]["template"]
    account = found["ServiceAccount"]["metadata"]["name"]
    assert pod["spec"]["serviceAccountName"] == account
    assert {"serviceAccountName": account} in fleet["spec"]["trainers"]
    assert found["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"]
    assert found["Role"]["rules"] == _rights(name)
    assert pod["metadata"]["labels"] == {LABEL_TRAINER: name}
    [container] = pod["spec"]["containers"]
    assert "command" not in container, "the image's entry point sets CANN's environment up"
    python, script, *options = container["args"]
    assert (python, script) == ("python3", "/push/trainer.py")
    given = dict(option.split("=", 1) for option in options)
    assert given["--fleet"] == f"$(NAMESPACE)/{name}"
    declared = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', (EXAMPLES / "push" / "trainer.py").read_text()))
    assert set(given) <= declared
    mounted = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert given["--checkpoints"] in mounted


def test_the_training_loop_has_the_rights_of_the_page_and_the_label_of_the_fleet_s_own_policy() -> None:
    """A policy of its own for the control port would leave the ports closed by which ranks of gloo find each other."""
    folder = EXAMPLES / "training"
    found = {doc["kind"]: doc for doc in yaml.safe_load_all((folder / "rbac.yaml").read_text())}
    fleet = yaml.safe_load((folder / "rolloutengine.yaml").read_text())
    name, account = fleet["metadata"]["name"], found["ServiceAccount"]["metadata"]["name"]
    assert set(found) == {"ServiceAccount", "Role", "RoleBinding"}
    assert found["Role"]["rules"] == _rights(name)
    assert found["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert {"serviceAccountName": account} in fleet["spec"]["trainers"]
    assert f"`{LABEL_TRAINER}: {name}`" in (folder / "README.md").read_text()


def test_the_check_sees_a_misspelt_field() -> None:
    document = weight_version("demo", "demo", 1, "step-1", weightTransfer={"backend": "ipc"})
    assert list(unknown_fields(document, SCHEMAS["WeightVersion"])) == [".spec.weightTransfer"]
    document["spec"]["version"] = -1
    assert violations(document, SCHEMAS["WeightVersion"]) == ["spec.version: -1 is less than the minimum of 1"]
