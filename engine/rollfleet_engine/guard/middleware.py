"""The guard in front of an engine's ASGI application: one class for vLLM's --middleware, one for any other engine."""

import asyncio
import importlib
import os
import time
from collections.abc import Callable

from rollfleet_engine.guard.answers import AsgiApp, Message, Receive, Scope, Send
from rollfleet_engine.guard.checkpoints import CheckpointStager, Stager
from rollfleet_engine.guard.connections import bound_server, quieten
from rollfleet_engine.guard.control import ControlApp
from rollfleet_engine.guard.identity import ServiceAccountVerifier, Verifier
from rollfleet_engine.guard.lifecycle import ControlServer
from rollfleet_engine.guard.local import DrainSocket
from rollfleet_engine.guard.log import GuardLog
from rollfleet_engine.guard.metrics import GuardCollector, MetricsPage
from rollfleet_engine.guard.ports import EngineAdapter
from rollfleet_engine.guard.service import GuardService
from rollfleet_engine.guard.serving import Serving
from rollfleet_engine.guard.tallies import Tallies
from rollfleet_engine.guard.turnstile import Turnstile
from rollfleet_engine.guard.waiting import WaitingRoom
from rollfleet_engine.weights.backends.registry import survey
from rollfleet_protocol.engine_config import EngineConfig, config_of
from rollfleet_protocol.refusals import RefusalReason

AdapterOf = Callable[[Scope], EngineAdapter]
ControlFront = Callable[[AsgiApp], AsgiApp]

LOOK_S = 60.0  # for the workers' first answer: a node may be busy with loading other engines
HEAD_S = 30.0  # for the head of a request on the serving port; clients may open connections ahead of their need
# By name: this package may not import what is built on it.
VLLM_ADAPTER_MODULE = "rollfleet_engine.vllm.adapter"


class GuardedApp:
    """An engine's application behind its guard: what the serving port serves.

    `adapter_of` is called once, with the scope of the first lifespan event (or of the first request, where the server
    sends no lifespan); its scope["app"] is the engine's application. Then the control port opens in the same loop.
    `control_front` puts something before the application of the control port: the faults of a simulated engine.
    """

    def __init__(
        self,
        app: AsgiApp,
        *,
        config: EngineConfig,
        adapter_of: AdapterOf,
        stager: Stager | None = None,
        verifier: Verifier | None = None,
        log: GuardLog | None = None,
        control_front: ControlFront | None = None,
    ) -> None:
        self._app = app
        self._config = config
        self._adapter_of = adapter_of
        self._stager = stager
        self._verifier = verifier
        self._control_front = control_front
        self._log = log or GuardLog({"fleet": f"{config.fleet.namespace}/{config.fleet.name}", "pod": _pod_name()})
        self._serving: Serving | None = None
        self._starting = asyncio.Lock()
        self._parts: tuple[ControlServer, DrainSocket, ControlApp, Verifier] | None = None
        self.service: GuardService | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            serving = self._serving or await self.start(scope)
            await serving(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        else:
            await _refuse_websocket(scope, send)

    async def start(self, scope: Scope) -> Serving:
        """Build the guard and open its control port and drain socket; once."""
        async with self._starting:
            if self._serving is not None:
                return self._serving
            config, turnstile = self._config, Turnstile()
            waiting = WaitingRoom(turnstile, config.hold)
            stager = self._stager or CheckpointStager(config)
            transfer = config.weight_transfer
            backend = "" if transfer is None else transfer.backend.value
            unpickles = transfer is not None and transfer.insecure_serialization
            adapter = self._adapter_of(scope)
            await self._look(adapter)
            service = GuardService(adapter, stager, turnstile, self._log, waiting, config.pod_uid, backend, unpickles)
            verifier = self._verifier or ServiceAccountVerifier(config.audience, config.tokens)
            app = ControlApp(service, verifier, config.operator, self._log)
            control: AsgiApp = app
            if self._control_front is not None:
                control = self._control_front(control)
            self._bound_connections(scope, service.tallies)  # without that no port opens
            server = ControlServer(control, config, self._log, service.break_down)
            drain = DrainSocket(service, config)
            await server.start()
            await drain.start()
            service.start()
            self._parts, self.service = (server, drain, app, verifier), service
            facts = service.state().facts
            ranks, tallies = facts.data_parallel_size, service.tallies
            metrics = MetricsPage(self._app, GuardCollector(service.state, tallies, time.monotonic))
            self._serving = Serving(self._app, turnstile, service, waiting, ranks, tallies, metrics, _pod_name())
            self._log.write(
                "guard.started",
                incarnation=service.incarnation,
                engine=facts.engine,
                engineVersion=facts.engine_version,
                controlPort=config.control_port,
            )
            return self._serving

    async def stop(self) -> None:
        """Close what start opened."""
        parts, service = self._parts, self.service
        self._parts = None
        if parts is not None and service is not None:
            server, drain, control, verifier = parts
            await drain.stop()
            await server.stop()
            await service.stop()
            await verifier.close()
            control.close()

    async def _look(self, adapter: EngineAdapter) -> None:
        """What is not as it could be is told once, here."""
        for capability, why in (await adapter.look(LOOK_S)).items():
            self._log.write("engine.lacks", capability=capability, why=why)
        for name, why in survey().left_out.items():
            self._log.write("backend.left_out", backend=name, why=why)

    def _bound_connections(self, scope: Scope, tallies: Tallies) -> None:
        def refused(reason: RefusalReason) -> None:
            tallies.refused[reason] += 1

        quieten()
        bound_server(scope.get("app", self._app), HEAD_S, refused)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.start(scope)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, no engine runs without its guard
            # As the protocol says it: an exception would count as "no lifespan here", and the engine would go on.
            await receive()
            self._log.write("guard.start_failed", error=f"{type(error).__name__}: {error}")
            await send({"type": "lifespan.startup.failed", "message": f"the guard could not start: {error}"})
            return

        async def stop_first(message: Message) -> None:
            if message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await self.stop()  # the server ends its loop as soon as it hears of it
            await send(message)

        try:
            await self._app(scope, receive, stop_first)
        finally:
            await self.stop()


class Guard(GuardedApp):
    """For `--middleware rollfleet_engine.guard.middleware.Guard` of vLLM; configured by ROLLFLEET_ENGINE_CONFIG."""

    def __init__(self, app: AsgiApp) -> None:
        config = config_of(os.environ)

        def adapter_of(scope: Scope) -> EngineAdapter:
            adapter: EngineAdapter = importlib.import_module(VLLM_ADAPTER_MODULE).VllmAdapter(
                scope["app"].state.engine_client
            )
            return adapter

        super().__init__(app, config=config, adapter_of=adapter_of)


def _pod_name() -> str:
    return os.environ.get("HOSTNAME", "")


async def _refuse_websocket(scope: Scope, send: Send) -> None:
    """No route of ours is a websocket. 404 where the server can say so, else it makes 403 of the close."""
    if "websocket.http.response" in scope.get("extensions", {}):
        await send({"type": "websocket.http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await send({"type": "websocket.http.response.body", "body": b""})
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": "no such route on this port"})
