"""Pydantic's JSON schema -> a Kubernetes structural schema.

The API server takes no $ref, no null in unions, no title, and prunes what is not specified: "Specifying a structural
schema" in the Kubernetes documentation of CustomResourceDefinitions.
"""

from typing import Any

from rollfleet_operator.api.rules import VALIDATIONS, Schema

MAX_INT32 = 2**31 - 1
MAX_EXACT_FLOAT = 2**53  # OpenAPI's bounds are float64; a larger one would be rounded, and int64 bounds itself

_KEPT = (
    "type",
    "format",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
    "anyOf",  # only beside x-kubernetes-int-or-string
)


class UnsupportedSchemaError(TypeError):
    """A model says something that a structural schema cannot: change the model."""


def to_structural(schema: Schema, definitions: dict[str, Schema], *, defaults: bool, path: str = "") -> Schema:
    """The structural form of one node and all below it. Without `defaults` what was not written stays absent."""
    node = _resolved(schema, definitions, path)
    made: Schema = {}
    if "description" in node:
        made["description"] = " ".join(node["description"].split())
    made.update({key: node[key] for key in _KEPT if key in node})
    _fit_numbers(made)
    if "const" in node:
        made["enum"] = [node["const"]]
    if made.get("type") == "array" and "items" not in node:
        raise UnsupportedSchemaError(f"{path}: a list needs items of one type")
    if "items" in node:
        made["items"] = to_structural(node["items"], definitions, defaults=defaults, path=f"{path}[]")
        made["x-kubernetes-list-type"] = "atomic"
    if "properties" in node:
        made["properties"] = {
            name: to_structural(child, definitions, defaults=defaults, path=f"{path}.{name}")
            for name, child in node["properties"].items()
        }
    if isinstance(node.get("additionalProperties"), dict):
        made["additionalProperties"] = to_structural(
            node["additionalProperties"], definitions, defaults=defaults, path=f"{path}{{}}"
        )
    made.update({key: value for key, value in node.items() if key.startswith("x-kubernetes-")})
    if defaults:
        _set_default(made, node.get("default"))
    if "type" not in made and "x-kubernetes-int-or-string" not in made:
        raise UnsupportedSchemaError(f"{path}: no type")
    return made


def _resolved(schema: Schema, definitions: dict[str, Schema], path: str) -> Schema:
    """The node with its $ref and its optional form replaced by what they stand for; what stands beside them wins."""
    node = dict(schema)
    while True:
        if "$ref" in node:
            target = definitions[node.pop("$ref").rsplit("/", 1)[-1]]
        elif "anyOf" in node and {"type": "null"} in node["anyOf"]:
            others = [option for option in node.pop("anyOf") if option != {"type": "null"}]
            if len(others) != 1:
                raise UnsupportedSchemaError(f"{path}: a union of several types")
            target = others[0]
        else:
            return node
        validations = [*target.get(VALIDATIONS, []), *node.get(VALIDATIONS, [])]
        node = {**target, **node}
        if validations:
            node[VALIDATIONS] = validations


def _fit_numbers(made: Schema) -> None:
    if "exclusiveMinimum" in made:  # a number in JSON schema, a flag in OpenAPI 3.0
        made["minimum"], made["exclusiveMinimum"] = made["exclusiveMinimum"], True
    if made.get("type") == "integer":
        made["format"] = "int32" if 0 <= made.get("maximum", MAX_INT32 + 1) <= MAX_INT32 else "int64"
        if made.get("maximum", 0) > MAX_EXACT_FLOAT:
            del made["maximum"]


def _set_default(made: Schema, default: Any) -> None:
    """Defaults that say something. An object's default is {} where its members have defaults: they then fill it in."""
    if made.get("type") == "object":
        if default is not None and any("default" in child for child in made.get("properties", {}).values()):
            made["default"] = {}
    elif default not in (None, "", [], {}):
        made["default"] = default
