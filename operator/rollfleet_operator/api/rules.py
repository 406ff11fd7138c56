"""Checks that the API server makes: CEL rules and shapes that go into the CRDs as they are."""

from typing import Any

from pydantic.config import JsonDict

Schema = dict[str, Any]
VALIDATIONS = "x-kubernetes-validations"

_DECIMAL = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
QUANTITY: Schema = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    # The form of resource.Quantity: sign, digits with a point, binary or decimal suffix or exponent.
    "pattern": rf"^[+-]?{_DECIMAL}([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$",
    "x-kubernetes-int-or-string": True,
}
NAME_REF_SCHEMA: Schema = {
    "type": "object",
    "description": "Name of an object in the same namespace.",
    "required": ["name"],
    "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 253, "description": "Its name."}},
}


def rule(cel: str, message: str, *, field: str = "", forbidden: bool = False) -> Schema:
    """One CEL rule. `message` names the field and the cure; `field` is its path below the place of the rule."""
    made = {"rule": cel, "message": message}
    if field:
        made["fieldPath"] = field
    if forbidden:
        made["reason"] = "FieldValueForbidden"
    return made


def rules(*made: Schema, **extra: Any) -> JsonDict:
    """What goes into `json_schema_extra`: CEL rules, and further keywords with - for _."""
    schema: JsonDict = {key.replace("_", "-"): value for key, value in extra.items()}
    if made:
        schema[VALIDATIONS] = list(made)
    return schema


def relative_path_rule(field: str, *, dot: bool = False) -> Schema:
    """A path that stays below its volume: no leading "/", no ".", ".." or empty segment; `dot` allows "." alone."""
    alone = "self == '.' || " if dot else ""
    return rule(
        rf"{alone}!self.matches('(^|/)[.]{{0,2}}(/|$)')",
        f'{field} must be relative, without leading or trailing "/", empty segments, "." or ".."',
    )


def union_rule(where: str, *members: str) -> Schema:
    """Exactly one member is set."""
    present = ", ".join(f"has(self.{member})" for member in members)
    return rule(f"[{present}].exists_one(x, x)", f"{where} needs exactly one of {', '.join(members)}")


def discriminator_rule(where: str, value: str, member: str) -> Schema:
    """`member` is present if and only if `type` is `value`."""
    return rule(
        f"(self.type == '{value}') == has(self.{member})",
        f"{where}.{member} must be set if, and only if, {where}.type is {value}",
        field=f".{member}",
    )
