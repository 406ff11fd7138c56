"""CRDs before an API server's own code, without one: what it refuses is refused by `make verify`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devtools import check_crds
from examples.demo.manifests import EngineKind, rollout_engine
from rollfleet_operator.api.crd import ROLLOUT_ENGINE, WEIGHT_VERSION, build_crd
from rollfleet_operator.api.generate import dump_yaml
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.core.accept import judge_fleet
from tests.support.builders import make_settings

Crd = dict[str, Any]


def _spec(crd: Crd) -> Any:
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


def _args(crd: Crd) -> Any:
    return _spec(crd)["properties"]["engine"]["properties"]["args"]


def _too_dear(crd: Crd) -> None:
    """A bound on the list that the budget of one rule does not allow."""
    _args(crd)["maxItems"] *= 2


def _unbounded(crd: Crd) -> None:
    del _args(crd)["maxItems"]


def _too_dear_together(crd: Crd) -> None:
    """Each within its own budget."""
    _args(crd)["items"]["x-kubernetes-validations"] *= 4


def _no_cel(crd: Crd) -> None:
    _spec(crd)["x-kubernetes-validations"][0]["rule"] = "self.replicas <"


def _no_such_field(crd: Crd) -> None:
    _spec(crd)["x-kubernetes-validations"][0]["rule"] = "self.replica > 0"


def _newer_than_1_33(crd: Crd) -> None:
    """`distinct` of lists came with 1.34 (k8s.io/apiserver, pkg/cel/environment/base.go)."""
    _spec(crd)["x-kubernetes-validations"][0]["rule"] = "self.engine.args.distinct().size() > 0"


def _misspelt(crd: Crd) -> None:
    _args(crd)["maxItem"] = 3


def _not_structural(crd: Crd) -> None:
    del _args(crd)["type"]


def _default_outside(crd: Crd) -> None:
    _spec(crd)["properties"]["replicas"]["default"] = -1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            _too_dear,
            [
                "properties[spec].properties[engine].properties[args].items.x-kubernetes-validations[0]",
                "exceeds budget",
            ],
        ),
        (_unbounded, ["properties[args].items.x-kubernetes-validations[0]", "exceeds budget"]),
        (_too_dear_together, ["for entire OpenAPIv3 schema exceeds budget"]),
        (_no_cel, ["compilation failed"]),
        (_no_such_field, ["undefined field 'replica'"]),
        (_newer_than_1_33, ["spec: Kubernetes 1.33: ", "distinct"]),
        (_misspelt, ['unknown field "spec.versions[0].schema.openAPIV3Schema', "maxItem"]),
        (_not_structural, ["properties[args].type: Required value"]),
        (_default_outside, ["properties[replicas].default: Invalid value"]),
    ],
)
def test_what_an_api_server_refuses_is_refused(spoil: Callable[[Crd], None], words: list[str], tmp_path: Path) -> None:
    crd = build_crd(ROLLOUT_ENGINE)
    spoil(crd)
    file = tmp_path / "crd.yaml"
    file.write_text(dump_yaml(crd))
    done = check_crds.run([str(file)])
    assert done.returncode == 1
    for word in words:
        assert word in done.stderr


@pytest.fixture(scope="module")
def definitions(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("crds")
    for kind in (ROLLOUT_ENGINE, WEIGHT_VERSION):
        (folder / kind.plural).write_text(dump_yaml(build_crd(kind)))
    return [str(file) for file in sorted(folder.iterdir())]


def _fleet(accelerator: Crd, **spec: Any) -> Crd:
    made = rollout_engine("qwen", "rl", EngineKind("engine:1", Path("/models"), npus=2), 1, **spec)
    made["spec"]["accelerator"] = accelerator
    return made


INVARIANT = {"rlConfig": {"enableBatchInvariant": True}}
CONSISTENT = {"rlConfig": {"enableTrainingConsistency": True}}
NPU, I310P, BY_HAMI = "huawei.com/npu", "huawei.com/Ascend310P", "huawei.com/Ascend910B3"
TAKEN = [
    _fleet({}),
    _fleet({"profile": "A2"}),
    _fleet({"profile": "A3", "perPod": 16}),
    _fleet({"profile": "A3", "perPod": 1}),
    _fleet({"profile": "A3", "perPod": 3, "resourceName": "huawei.com/Ascend910C"}),
    _fleet({"profile": "A5"}),
    _fleet({"profile": "A5", "resourceName": NPU}),
    _fleet({"profile": "310P", "resourceName": I310P}),
    _fleet({"profile": "A2", "resourceName": BY_HAMI}, **INVARIANT),
    _fleet({"profile": "A3", "resourceName": "huawei.com/ascend-1980"}, **INVARIANT),
    _fleet({"resourceName": BY_HAMI}, **INVARIANT),
    _fleet({"resourceName": "huawei.com/ascend-1980"}, **CONSISTENT),
    _fleet({}, **INVARIANT),
    _fleet({"perPod": 0}, **INVARIANT),
    _fleet({"profile": "A5"}, rlConfig={"enabled": False, "enableBatchInvariant": True}),
]
BOTH = "is not of spec.accelerator.profile"
ONLY = "works on Atlas A2 and A3 only"
REFUSED = [
    (_fleet({"profile": "B7"}), 'Unsupported value: "B7"'),
    (_fleet({"profile": "A2", "perPod": 0}), "profile needs spec.accelerator.perPod above 0"),
    (_fleet({"profile": "A2", "resourceName": NPU}), BOTH),
    (_fleet({"profile": "A2", "resourceName": "huawei.com/Ascend910C"}), BOTH),
    (_fleet({"profile": "A2", "resourceName": "huawei.com/Ascend910A"}), BOTH),
    (_fleet({"profile": "A5", "resourceName": "huawei.com/Ascend910"}), BOTH),
    (_fleet({"profile": "310P", "resourceName": "huawei.com/Ascend910"}), BOTH),
    (_fleet({"profile": "A3", "perPod": 3}), "perPod of profile A3 must be 1 or an even number to 16"),
    (_fleet({"profile": "A3", "perPod": 18}), "perPod of profile A3 must be 1 or an even number to 16"),
    (_fleet({"profile": "A5"}, **INVARIANT), f"spec.rlConfig.enableBatchInvariant {ONLY}"),
    (_fleet({"profile": "310P"}, **CONSISTENT), f"spec.rlConfig.enableTrainingConsistency {ONLY}"),
    (_fleet({"resourceName": NPU}, **INVARIANT), f"spec.rlConfig.enableBatchInvariant {ONLY}"),
    (_fleet({"resourceName": f"{I310P}-4c"}, **CONSISTENT), f"spec.rlConfig.enableTrainingConsistency {ONLY}"),
    (_fleet({"profile": "A5"}, resources={"limits": {NPU: 8}}), "must not name spec.accelerator.resourceName"),
    (_fleet({}, resources={"limits": {"huawei.com/Ascend910": 8}}), "must not name spec.accelerator.resourceName"),
]


def test_what_generations_of_npus_can_do_is_judged_at_admission(definitions: list[str], tmp_path: Path) -> None:
    """And the operator, whose CRDs may be older, says the same of each."""
    file = tmp_path / "objects.yaml"
    file.write_text("---\n".join(dump_yaml(each) for each in (*TAKEN, *(fleet for fleet, _ in REFUSED))))
    done = check_crds.run(definitions, str(file))
    said = done.stderr.splitlines()
    for number, (fleet, words) in enumerate(REFUSED, len(TAKEN)):
        about = [line for line in said if f"document {number}: " in line]
        assert any(words in line for line in about), (fleet["spec"]["accelerator"], about)
    assert len({line.partition(": Rollout")[0] for line in said}) == len(REFUSED), said


@pytest.mark.parametrize("fleet", [*TAKEN, *(fleet for fleet, _ in REFUSED[1:])])
def test_the_operator_judges_generations_as_the_api_server(fleet: Crd) -> None:
    read = RolloutEngine.model_validate(fleet)
    verdict = judge_fleet(read, make_settings(host_path_allowed=True))
    assert verdict.accepted is (fleet in TAKEN), verdict.message


def test_ours_are_taken_and_the_dearest_rules_told(tmp_path: Path) -> None:
    files = []
    for kind in (ROLLOUT_ENGINE, WEIGHT_VERSION):
        files.append(str(tmp_path / kind.plural))
        Path(files[-1]).write_text(dump_yaml(build_crd(kind)))
    done = check_crds.run(files)
    assert (done.returncode, done.stderr) == (0, "")
    assert [file in done.stdout for file in files] == [True, True]
    assert "spec.engine.args[*]: spec.engine.args must not set --model" in done.stdout


@pytest.mark.parametrize("files", [[], ["/no/such/file"]])
def test_nothing_to_judge_is_no_success(files: list[str]) -> None:
    done = check_crds.run(files)
    assert done.returncode == 1
    assert done.stderr
