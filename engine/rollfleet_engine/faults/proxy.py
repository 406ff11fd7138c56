"""`python -m rollfleet_engine.faults.proxy --faults FILE -- python -m rollfleet_engine.launch`: real engines that fail.

It stands in the launcher's place and takes its configuration. The engine is its child and listens on 127.0.0.1; the two
ports of the configuration are the proxy's. Calls go through with the caller's own identity, which the guard verifies as
ever; the proxy has none, and verifies the guard's certificate like every caller.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from rollfleet_engine.faults.child import Child
from rollfleet_engine.faults.forward import Forward
from rollfleet_engine.faults.http import FaultyApp, Port
from rollfleet_engine.faults.injector import LOGGER, Injector
from rollfleet_engine.faults.options import ReadPlan, add_options, reader_of
from rollfleet_engine.faults.orders import Orders
from rollfleet_engine.faults.plan import Plan, PlanError
from rollfleet_engine.guard.lifecycle import ControlServer
from rollfleet_engine.guard.log import GuardLog
from rollfleet_protocol.engine_config import ENGINE_CONFIG_ENV, EngineConfig, EngineConfigError, config_of

LOOPBACK = "127.0.0.1"
_USAGE_EXIT = 2
_TROUBLE_EXIT = 1
_SHUTDOWN_S = 1


class _Server(uvicorn.Server):
    """Signals are the proxy's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Proxy:
    """Both ports, and the engine behind them."""

    def __init__(
        self,
        config: EngineConfig,
        child_config: EngineConfig,
        command: list[str],
        read: ReadPlan,
        orders: Orders,
        ca: Path,
    ) -> None:
        self._config = config
        self._read = read
        self._orders = orders
        self._log = proxy_log(config)
        environ = {**os.environ, ENGINE_CONFIG_ENV: child_config.model_dump_json(by_alias=True)}
        self._child = Child(command, environ, self._log)  # made within the loop
        self._injector = Injector(read(), self._log)
        name = config.fleet.control_server_name
        self._control = Forward(f"https://{LOOPBACK}:{child_config.control_port}", trust(ca), name)
        self._serving = Forward(f"http://{LOOPBACK}:{child_config.serving_port}")
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Until told to stop, or until the engine ends by itself; the exit code is the engine's."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._injector.replace, self._read)
        control = ControlServer(self._faulty(self._control, Port.CONTROL), self._config, self._log, self._lost)
        server = self._serving_server()
        await self._child.start()
        try:
            await control.start()
            return await self._serve(server)
        finally:
            server.should_exit = True
            await control.stop()
            await self._child.stop()
            await asyncio.gather(self._control.close(), self._serving.close())
            self._orders.close()

    async def _serve(self, server: uvicorn.Server) -> int:
        serving = asyncio.create_task(server.serve())
        stopping = asyncio.create_task(self._stopping.wait())
        ended = self._child.ended
        try:
            watched: set[asyncio.Future[Any]] = {serving, stopping, ended}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else await self._child.stop()
        finally:
            server.should_exit = True
            stopping.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)

    def _faulty(self, forward: Forward, port: Port) -> FaultyApp:
        return FaultyApp(forward, port, self._injector, self._child, self._orders)

    def _lost(self, why: str) -> None:
        self._log.write("faults.broken", why=why)
        self._stopping.set()

    def _serving_server(self) -> _Server:
        settings = uvicorn.Config(
            self._faulty(self._serving, Port.SERVING),
            host=self._config.bind_address,
            port=self._config.serving_port,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        return _Server(settings)


def proxy_log(config: EngineConfig) -> GuardLog:
    """Lines beside the engine's."""
    return GuardLog({"fleet": f"{config.fleet.namespace}/{config.fleet.name}"}, logger=LOGGER)


def trust(anchor: Path) -> ssl.SSLContext:
    """Trust in what this file holds and nothing else: the fleet's CA, or the very certificate that the guard shows."""
    context = ssl.create_default_context(cafile=str(anchor))
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def behind(config: EngineConfig) -> EngineConfig:
    """The same engine, out of everybody's reach but ours."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        serving, control = (int(each.getsockname()[1]) for each in sockets)
    return config.model_copy(update={"bind_address": LOOPBACK, "serving_port": serving, "control_port": control})


def outside_only(plan: Plan) -> Plan:
    """Refuse what only the simulator can do. Raises PlanError."""
    for number, rule in enumerate(plan.rules):
        if rule.call.inside:
            message = f"rules.{number}: {rule.call} is a call inside of the engine: only the simulator can fail there"
            raise PlanError(message)
    return plan


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the engine's command after --."""
    parser = argparse.ArgumentParser(
        prog="rollfleet_engine.faults.proxy",
        usage="%(prog)s [--faults FILE] [--fault-seed N] [--engine-ca FILE] -- COMMAND ...",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.add_argument(
        "--engine-ca", type=Path, metavar="FILE", help="CA of the guard's certificate; else only tls.crt itself is"
    )
    split = argv.index("--") if "--" in argv else len(argv)
    arguments, command = parser.parse_args(argv[:split]), argv[split + 1 :]
    if not command:
        parser.error("name the engine's command after --")
    return arguments, command


async def _run(argv: list[str]) -> int:
    arguments, command = parse(argv)
    config = config_of(os.environ)
    orders = Orders(config, proxy_log(config))
    read = reader_of(arguments, orders, outside_only)
    if read is None:
        raise PlanError("no faults are asked for: give --faults or --fault-seed")
    ca = arguments.engine_ca or Path(config.tls_dir) / "tls.crt"
    return await Proxy(config, behind(config), command, read, orders, ca).run()


def main() -> int:
    """Entry point of the command."""
    try:
        return asyncio.run(_run(sys.argv[1:]))
    except (EngineConfigError, PlanError) as error:
        print(f"faults: {error}", file=sys.stderr)
        return _USAGE_EXIT
    except OSError as error:
        print(f"faults: {error}", file=sys.stderr)
        return _TROUBLE_EXIT


if __name__ == "__main__":
    sys.exit(main())
