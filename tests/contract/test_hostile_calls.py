"""Nothing that a stranger sends is unpickled, believed or executed: on any route of either port, as any content."""

import base64
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from rollfleet_engine.guard.control import COMMANDS
from rollfleet_engine.guard.routes import ROUTES
from rollfleet_protocol.commands import PREFIX, PROBE_PATH, STATE_PATH
from tests.contract.client import Client, Operator
from tests.contract.process import EngineProcess

ORDERS = tuple(f"{PREFIX}/{name}" for name in COMMANDS)
KINDS = ("application/json", "application/octet-stream", "application/x-pickle", "multipart/form-data; boundary=x")


class Canary:
    """Unpickled by anybody, it leaves a folder behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self._folder),)


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    """Where nothing may ever be."""
    folder = tmp_path / "unpickled"
    pickle.loads(pickle.dumps(Canary(folder)))  # noqa: S301 - that the bait works
    assert folder.is_dir()
    folder.rmdir()
    return folder


def baits(folder: Path) -> list[bytes]:
    """The same as bytes, and in the forms in which vLLM's own routes take pickles (`*_pickled`, base64)."""
    pickled = pickle.dumps(Canary(folder))
    text = base64.b64encode(pickled).decode()
    update = f'{{"update_info": {{"ipc_handles_pickled": "{text}", "names": ["w"]}}, "method": "{text}"}}'
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.pkl"\r\n\r\n' + pickled + b"\r\n--x--\r\n"
    return [pickled, text.encode(), update.encode(), form]


def test_c14_nothing_is_unpickled_before_identity(
    engine: EngineProcess, operator: Operator, client: Client, dead: Path
):
    before = operator.state()
    routes = sorted({*engine.routes(), *ROUTES, *(("POST", path) for path in (*ORDERS, PROBE_PATH, STATE_PATH, "/x"))})
    asked = 0
    for number, (method, path) in enumerate(routes):
        bait, kind = baits(dead)[number % 4], KINDS[number % len(KINDS)]
        arguments = {"content": bait, "headers": {"Content-Type": kind}}
        concrete = path.replace("{response_id}", "resp_1")
        assert operator.request(method, concrete, token="", **arguments).status_code == 401, path
        client.http.request(method, concrete, **arguments)  # where anybody may ask: whatever the engine makes of it
        asked += 1
    assert asked > 60
    assert not dead.exists()
    after = operator.state()
    assert (after.epoch, after.gate, after.weights) == (before.epoch, before.gate, before.weights)
    assert after.alive


def test_nor_after_it(operator: Operator, dead: Path):
    """Who may command sends JSON, or is refused."""
    before = operator.state()
    for path in (*ORDERS, PROBE_PATH):
        for bait in baits(dead):
            for kind in KINDS:
                answer = operator.request("POST", path, content=bait, headers={"Content-Type": kind})
                assert answer.status_code == 400, path
                assert answer.json()["error"]["reason"] == "InvalidRequest"
    for path in ("/collective_rpc", "/update_weights", "/init_weight_transfer_engine"):
        for bait in baits(dead):
            assert operator.request("POST", path, content=bait).status_code in (404, 409)
    assert not dead.exists()
    assert operator.state() == before
