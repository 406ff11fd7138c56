"""docs/api.md: tables of all fields, from the same schemas as the CRDs."""

from collections.abc import Iterator

from rollfleet_operator.api.crd import Kind, build_schema
from rollfleet_operator.api.meta import API_VERSION
from rollfleet_operator.api.rules import VALIDATIONS, Schema

INTRODUCTION = f"""<!-- Made by `make generate` from operator/rollfleet_operator/api. Do not edit. -->
# API reference: {API_VERSION}

Fields of our two kinds, as the API server checks them; `kubectl explain roe.spec` and `kubectl explain wv.spec` print
the same. A field that is not listed does not exist, and `kubectl` refuses it by name. What of it has run
on which hardware is in [hardware.md](hardware.md): nothing has on NPUs.
"""
_LIMITS = (
    ("minimum", ">= {}"),
    ("maximum", "<= {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "at least {} items"),
    ("maxItems", "at most {} items"),
    ("maxProperties", "at most {} entries"),
    ("pattern", "matches `{}`"),
)


def render_reference(kinds: tuple[Kind, ...]) -> str:
    """The whole page."""
    return INTRODUCTION + "".join(_section(kind) for kind in kinds)


def _section(kind: Kind) -> str:
    schema = build_schema(kind)
    lines = [
        f"\n## {kind.name} (`{kind.short_name}`)",
        "",
        schema["description"],
        "",
        f"Columns: {', '.join(str(column['name']) for column in kind.columns)}.",
    ]
    for part in ("spec", "status"):
        lines += ["", f"### {kind.name}.{part}", "", "| Field | Type | Default | Meaning |", "|---|---|---|---|"]
        lines += [_row(path, node, required) for path, node, required in _fields(schema["properties"][part], part)]
    messages = list(_messages(schema))
    if messages:
        lines += ["", f"### Rules of {kind.name}", "", *[f"- {message}" for message in messages]]
    return "\n".join(lines) + "\n"


def _fields(node: Schema, path: str) -> Iterator[tuple[str, Schema, bool]]:
    for name, child in node.get("properties", {}).items():
        below = f"{path}.{name}"
        yield below, child, name in node.get("required", [])
        inner, suffix = _inner(child)
        yield from _fields(inner, below + suffix)


def _inner(node: Schema) -> tuple[Schema, str]:
    if "items" in node:
        return node["items"], "[]"
    if "additionalProperties" in node:
        return node["additionalProperties"], ".*"
    return node, ""


def _row(path: str, node: Schema, required: bool) -> str:
    default = f"`{node['default']}`" if node.get("default") not in (None, {}) else ""
    if required and path.startswith("spec"):
        default = "required"
    meaning = node.get("description", "")
    limits = [text.format(node[key]) for key, text in _LIMITS if key in node]
    if limits:
        meaning += f" ({'; '.join(limits)})"
    return f"| `{path}` | {_type(node)} | {default} | {meaning.replace('|', chr(92) + '|')} |"


def _type(node: Schema) -> str:
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    if "items" in node:
        return f"list of {_type(node['items'])}"
    if "additionalProperties" in node:
        return f"map to {_type(node['additionalProperties'])}"
    if "x-kubernetes-int-or-string" in node:
        return "quantity"
    return str(node.get("format") or node["type"])


def _messages(node: Schema) -> Iterator[str]:
    for validation in node.get(VALIDATIONS, []):
        yield validation["message"]
    for child in node.get("properties", {}).values():
        yield from _messages(child)
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from _messages(node[key])
