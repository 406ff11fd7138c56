"""The server side of `make bench-guard`: an application alone or behind its guard, until the input ends.

python -m tests.bench.served null|simulator PORT CPU [--guard]

Both sides run the same uvicorn with uvloop and httptools, as vLLM's images do, and no access log. "null" answers
every request by the same few bytes: what is left is the server itself. "simulator" is the simulated engine with its
default pace. Prints "ready" once it is served.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn

from rollfleet_engine.guard.answers import AsgiApp, Receive, Scope, Send
from rollfleet_engine.guard.middleware import GuardedApp
from rollfleet_engine.guard.ports import EngineAdapter
from rollfleet_engine.guard.service import GuardService
from rollfleet_engine.simulator.__main__ import PACE_DEFAULT_MS
from rollfleet_engine.simulator.adapter import SimulatorAdapter
from rollfleet_engine.simulator.app import Settings, build_app, heap_frozen
from rollfleet_engine.simulator.core import Core
from rollfleet_engine.simulator.requests import Limits
from rollfleet_engine.simulator.weights import load_model
from rollfleet_engine.tools.tiny_model import folder_name, make_simulated
from rollfleet_protocol.commands import Open, Verify
from rollfleet_protocol.state import OperationStatus
from tests.support.certificates import write_certificate
from tests.support.guards import FLEET, eventually, make_config
from tests.support.ports import free_port

ANSWER = b'{"object":"text_completion","choices":[]}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
DEADLINE_S = 30.0


class Null:
    """Reads the body, answers, and takes part in the lifespan."""

    def __init__(self) -> None:
        self.state = SimpleNamespace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            async with heap_frozen(self):
                for _ in range(2):
                    await send({"type": f"{(await receive())['type']}.complete"})
            return
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": ANSWER})


def engine(kind: str, folder: Path) -> tuple[Any, EngineAdapter]:
    """The application, and what the guard needs of the engine behind it."""
    make_simulated(folder / "models", checkpoints=1, seed=1)
    model = folder / "models" / folder_name(0)
    core = Core(load_model(model), float(PACE_DEFAULT_MS) / 1000, lambda: True)
    adapter = SimulatorAdapter(core, str(model))
    if kind == "null":
        return Null(), adapter
    return build_app(core, Settings(str(model), Limits("policy", 2048), False), heap_frozen), adapter


def guarded(app: AsgiApp, adapter: EngineAdapter, folder: Path) -> GuardedApp:
    """With its control port, its certificate and its drain socket, as in a pod."""
    write_certificate(folder / "tls", FLEET.control_server_name)
    ports = {"bind_address": "127.0.0.1", "serving_port": free_port(), "control_port": free_port()}
    config = make_config(tls_dir=str(folder / "tls"), run_dir=str(folder / "run"), **ports)
    return GuardedApp(app, config=config, adapter_of=lambda _: adapter)


async def open_gate(service: GuardService) -> None:
    """Version 0, as the operator does it."""
    told = {"incarnation": service.incarnation, "epoch": 1, "version": 0, "digest": None}
    state = await service.command(Verify(probe_tokens=(1, 2, 3), deadline_seconds=DEADLINE_S, **told))
    async with asyncio.timeout(DEADLINE_S):
        while state.operation is None or state.operation.status is OperationStatus.RUNNING:
            state = await service.follow(state.sequence, 1.0)
    await service.command(Open(**told))


class Server(uvicorn.Server):
    """Leaves signals alone: it ends with its input."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(kind: str, port: int, folder: Path, *, guard: bool) -> None:
    """Until the input ends."""
    app, adapter = engine(kind, folder)
    outer = guarded(app, adapter, folder) if guard else app
    server = Server(
        uvicorn.Config(
            outer, host="127.0.0.1", port=port, interface="asgi3", lifespan="on", http="httptools", log_config=None
        )
    )
    app.state.server = server  # where vLLM leaves its own: the guard bounds what it takes
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started or serving.done(), DEADLINE_S)
    if isinstance(outer, GuardedApp):
        assert outer.service is not None
        await open_gate(outer.service)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving


def main() -> None:
    """Entry point."""
    import uvloop  # noqa: PLC0415 - of vLLM's environment; types are checked without it

    parser = argparse.ArgumentParser(prog="tests.bench.served")
    parser.add_argument("kind", choices=("null", "simulator"))
    parser.add_argument("port", type=int)
    parser.add_argument("cpu", type=int)
    parser.add_argument("--guard", action="store_true")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {arguments.cpu})
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(serve(arguments.kind, arguments.port, Path(folder), guard=arguments.guard))


if __name__ == "__main__":
    main()
