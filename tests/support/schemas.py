"""What the API server does with an object under a structural schema: unknown fields, and the keywords' checks."""

from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]


def walk(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """All nodes with their paths."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from walk(schema["additionalProperties"], f"{path}.*")


def unknown_fields(value: Any, schema: Schema, path: str = "") -> Iterator[str]:
    """Paths that the API server would prune, or refuse under strict validation."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_fields(item, schema["items"], f"{path}[{index}]")
    if not isinstance(value, dict) or path == ".metadata":
        return
    for name, child in value.items():
        below = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
        if below is None:
            yield f"{path}.{name}"
        else:
            yield from unknown_fields(child, below, f"{path}.{name}")


def violations(value: Any, schema: Schema) -> list[str]:
    """What the schema's own keywords refuse, CEL rules aside."""
    found = Draft202012Validator(schema).iter_errors(value)
    return [f"{'.'.join(str(part) for part in error.absolute_path)}: {error.message}" for error in found]
