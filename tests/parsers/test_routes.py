"""Every route that the sources of a release register has a class, also those that only some models or options bring."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollfleet_engine.guard.routes import is_known
from tests.parsers.conftest import RELEASES, folder_of

METHODS = {"get": "GET", "post": "POST", "put": "PUT", "patch": "PATCH", "delete": "DELETE", "websocket": "WEBSOCKET"}
ADDING = {"add_api_route": "", "add_route": "", "api_route": "", "mount": "GET"}  # "": they name their methods
# Servers that the launcher never starts: vLLM's supervisor of data-parallel ones, and of 0.23 its demonstration.
OTHER_PROCESSES = ("/dp_supervisor.py", "/vllm/entrypoints/api_server.py")
# Paths that are no literals, and what they are.
COMPUTED = {"app.swagger_ui_oauth2_redirect_url": "/docs/oauth2-redirect"}
AGAIN = ("route.path",)  # routes of a router that has them already


def registered(file: Path) -> Iterator[tuple[str, str]]:
    """(method, path) of each registration on a router or an application."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        verb, owner = node.func.attr, ast.unparse(node.func.value)
        if verb not in METHODS | ADDING or not owner.endswith(("router", "app")):
            continue
        path = ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else ast.unparse(node.args[0])
        if path in AGAIN:
            continue
        for method in [METHODS.get(verb) or ADDING[verb]] if (METHODS | ADDING)[verb] else methods_of(node):
            yield method, COMPUTED.get(path, path)


def methods_of(call: ast.Call) -> list[str]:
    """The literal list that it names; GET by default, as in Starlette."""
    for keyword in call.keywords:
        if keyword.arg == "methods":
            return list(ast.literal_eval(keyword.value))
    return ["GET"]


@pytest.mark.parametrize("name", RELEASES)
def test_no_release_registers_a_route_that_nobody_has_thought_about(name: str) -> None:
    files = list((folder_of(name) / "vllm" / "entrypoints").rglob("*.py"))
    ours = (file for file in files if not file.as_posix().endswith(OTHER_PROCESSES))
    found = {route for file in ours for route in registered(file)}
    assert {("POST", "/v1/completions"), ("POST", "/pause"), ("POST", "/update_weights"), ("GET", "/health")} <= found
    assert len(found) > 50
    assert sorted(route for route in found if not is_known(*route)) == []
