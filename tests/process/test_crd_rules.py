"""CRDs before an API server's own code, without one: what it refuses is refused by `make verify`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devtools import check_crds
from rollfleet_operator.api.crd import ROLLOUT_ENGINE, WEIGHT_VERSION, build_crd
from rollfleet_operator.api.generate import dump_yaml

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
