"""Labels that people write are one line of text."""

from typing import Any

import pytest

from examples.demo.manifests import weight_version
from rollfleet_operator.api.crd import KINDS, build_schema
from tests.support.schemas import violations


@pytest.mark.parametrize("field", ["step", "retryRequest"])
@pytest.mark.parametrize(("label", "is_taken"), [("2100 · eval", True), ("\x1b[2J", False), ("a\nb", False)])
def test_a_label_is_one_line(field: str, label: str, is_taken: bool) -> None:
    schema = next(build_schema(kind) for kind in KINDS if kind.name == "WeightVersion")
    document: dict[str, Any] = weight_version("demo", "demo", 1, "step-1", **{field: label})
    assert (violations(document, schema) == []) is is_taken
