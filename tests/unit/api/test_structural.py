"""The conversion from JSON schema: what it keeps, what it drops, what it refuses."""

from typing import Annotated

import pytest
from pydantic import BaseModel, Field

from rollfleet_operator.api.rules import rule, rules
from rollfleet_operator.api.structural import UnsupportedSchemaError, to_structural


def convert(model: type[BaseModel], *, defaults: bool = True) -> dict[str, object]:
    schema = model.model_json_schema()
    return to_structural(schema, schema.get("$defs", {}), defaults=defaults)["properties"]


class Inner(BaseModel, json_schema_extra=rules(rule("self.a > 0", "a must be positive"))):
    """An inner thing."""

    a: int = 1


class Bare(BaseModel):
    """No member has a default."""

    b: int | None = None


class Outer(BaseModel):
    """All shapes."""

    optional: Inner | None = None
    defaulted: Inner = Inner()
    bare: Bare = Bare()
    ruled: Annotated[Inner, Field(json_schema_extra=rules(rule("self == oldSelf", "ruled is fixed")))]
    small: Annotated[int, Field(ge=0, le=10)] = 3
    big: Annotated[int, Field(le=2**63 - 1)] = 0
    positive: Annotated[float | None, Field(gt=0)] = None
    names: tuple[str, ...] = ()
    counts: dict[str, int] = Field(default_factory=dict)


def test_optional_reference_is_inlined_without_null() -> None:
    assert convert(Outer)["optional"] == {
        "description": "An inner thing.",
        "type": "object",
        "properties": {"a": {"type": "integer", "format": "int64", "default": 1}},
        "x-kubernetes-validations": [{"rule": "self.a > 0", "message": "a must be positive"}],
    }


def test_an_objects_default_is_filled_in_by_its_members() -> None:
    assert convert(Outer)["defaulted"]["default"] == {}
    assert "default" not in convert(Outer)["bare"]
    assert "default" not in convert(Outer, defaults=False)["small"]


def test_rules_of_field_and_model_both_stay() -> None:
    messages = [made["message"] for made in convert(Outer)["ruled"]["x-kubernetes-validations"]]
    assert messages == ["a must be positive", "ruled is fixed"]


def test_numbers_fit_openapi() -> None:
    made = convert(Outer)
    assert made["small"]["format"] == "int32"
    assert made["small"]["maximum"] == 10
    assert "maximum" not in made["big"]
    assert made["positive"]["minimum"] == 0
    assert made["positive"]["exclusiveMinimum"] is True


def test_collections_have_types() -> None:
    made = convert(Outer)
    assert made["names"]["x-kubernetes-list-type"] == "atomic"
    assert made["counts"]["additionalProperties"] == {"type": "integer", "format": "int64"}


def test_what_has_no_structural_form_is_refused_by_path() -> None:
    class Union(BaseModel):
        either: int | str

    class Anything(BaseModel):
        it: object

    with pytest.raises(UnsupportedSchemaError, match="either"):
        convert(Union)
    with pytest.raises(UnsupportedSchemaError, match="it"):
        convert(Anything)
