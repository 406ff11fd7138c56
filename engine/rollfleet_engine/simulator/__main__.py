"""`python -m rollfleet_engine.simulator`: started by the launcher in vLLM's place, with vLLM's arguments.

Started by hand it takes faults as well (faulty.py).
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from rollfleet_engine.faults.options import add_options
from rollfleet_engine.faults.plan import PlanError
from rollfleet_engine.guard.adapting import CAPABILITIES
from rollfleet_engine.guard.answers import AsgiApp
from rollfleet_engine.guard.checkpoints import CheckpointStager, Stager
from rollfleet_engine.guard.middleware import GuardedApp
from rollfleet_engine.guard.ports import EngineAdapter
from rollfleet_engine.simulator.adapter import PacedStager, SimulatorAdapter
from rollfleet_engine.simulator.app import Settings, build_app, heap_frozen, print_routes
from rollfleet_engine.simulator.core import Core
from rollfleet_engine.simulator.faulty import COUNTS_OPTION, Faults, faults_of
from rollfleet_engine.simulator.process import CoreProcess
from rollfleet_engine.simulator.requests import Limits
from rollfleet_engine.simulator.weights import load_model
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_protocol.engine_config import EngineConfig, EngineConfigError, config_of

STARTUP_VARIABLE = "ROLLFLEET_SIMULATOR_STARTUP_SECONDS"  # how long loading a model seems to take
STEP_VARIABLE = "ROLLFLEET_SIMULATOR_STEP_SECONDS"  # that staging, pausing, updating and probing take at least
LACKS_VARIABLE = "ROLLFLEET_SIMULATOR_LACKS"  # capabilities that it shall not have, with commas between
PACE_VARIABLE = "ROLLFLEET_SIMULATOR_TOKEN_MS"
PACE_DEFAULT_MS = "2"
_DEFAULT_MODEL_LEN = 2048
_WATCHDOG_S = 5.0  # vLLM looks so often whether its core is dead, and then ends
_SHUTDOWN_S = 2.0


class OptionError(Exception):
    """A variable of the simulator's has a value that means nothing."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments that have an effect here; the launcher has checked all of them as vLLM's."""
    # Apart and without abbreviations: the launcher lets --fault through, which vLLM takes for --fault-tolerance-config.
    own = argparse.ArgumentParser(prog="rollfleet_engine.simulator", add_help=False, allow_abbrev=False)
    own.add_argument(COUNTS_OPTION, type=json.loads, default={}, help=argparse.SUPPRESS)
    add_options(own)
    parser = argparse.ArgumentParser(
        prog="rollfleet_engine.simulator", epilog="Also --faults FILE, --fault-seed N: docs/fault-injection.md"
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-logprobs", type=int, default=20)
    for size in ("--data-parallel-size", "--tensor-parallel-size", "--pipeline-parallel-size"):
        parser.add_argument(size, type=int, default=1)
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    faults, others = own.parse_known_args(argv)
    known, without_effect = parser.parse_known_args(others, faults)
    if without_effect:
        print(f"simulator: without effect here: {' '.join(without_effect)}", flush=True)
    return known


def _model_len(arguments: argparse.Namespace) -> int:
    if arguments.max_model_len is not None:
        return int(arguments.max_model_len)
    config = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    return int(config.get("max_position_embeddings", _DEFAULT_MODEL_LEN))


def _lacks() -> frozenset[str]:
    """What this engine shall not be able to do. Raises OptionError for what no engine could."""
    named = frozenset(filter(None, os.environ.get(LACKS_VARIABLE, "").split(",")))
    if unknown := sorted(named.difference(CAPABILITIES)):
        raise OptionError(f"{LACKS_VARIABLE} names {', '.join(unknown)}: there are {', '.join(CAPABILITIES)}")
    return named


def _engine(arguments: argparse.Namespace, process: CoreProcess) -> tuple[Core, Starlette]:
    """The core and its own routes."""
    seconds_per_token = float(os.environ.get(PACE_VARIABLE, PACE_DEFAULT_MS)) / 1000
    core = Core(
        load_model(arguments.model),
        seconds_per_token,
        process.alive,
        arguments.data_parallel_size,
        arguments.tensor_parallel_size * arguments.pipeline_parallel_size,
    )
    limits = Limits(arguments.served_model_name, _model_len(arguments), arguments.max_logprobs)
    settings = Settings(str(arguments.model), limits, arguments.enable_prompt_tokens_details)
    app = build_app(core, settings, heap_frozen)
    print_routes(app)
    return core, app


def _guarded(
    arguments: argparse.Namespace, core: Core, app: Starlette, config: EngineConfig, faults: Faults | None
) -> AsgiApp:
    """Behind the guard, and behind the faults where there are any."""
    step_s = float(os.environ.get(STEP_VARIABLE, "0"))
    adapter: EngineAdapter = SimulatorAdapter(core, str(arguments.model), step_s, _lacks())
    stager: Stager = PacedStager(CheckpointStager(config), step_s)
    if faults is None:
        return GuardedApp(app, config=config, adapter_of=lambda _: adapter, stager=stager)
    struck = faults.adapter(adapter)
    faults.heed_signals()
    guarded = GuardedApp(
        app,
        config=config,
        adapter_of=lambda _: struck,
        stager=faults.stager(stager),
        control_front=faults.control,
    )
    return faults.serving(guarded)


async def _serve(
    arguments: argparse.Namespace, process: CoreProcess, config: EngineConfig, faults: Faults | None
) -> None:
    core, app = _engine(arguments, process)
    server = uvicorn.Server(
        uvicorn.Config(
            _guarded(arguments, core, app, config, faults),
            host=arguments.host,
            port=arguments.port,
            interface="asgi3",
            lifespan="on",
            access_log=False,
            log_level="info",
            timeout_graceful_shutdown=int(_SHUTDOWN_S),
        )
    )

    app.state.server = server  # where vLLM leaves its own: the guard bounds what it takes

    def end() -> None:
        server.should_exit = True

    def died() -> None:
        print("ERROR simulator: EngineCore died unexpectedly", file=sys.stderr, flush=True)
        core.stir()
        asyncio.get_running_loop().call_later(_WATCHDOG_S, end)

    process.watch(died)
    await server.serve()


def _follow() -> int:
    """The workers of one more node: a simulated engine has none, so there is nothing to do but to be there."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    signal.sigwait(ends)
    return 0


def main() -> int:
    """Serve until told to stop, or until the core is dead."""
    if "--headless" in sys.argv:
        return _follow()
    arguments = parse(sys.argv[1:])
    try:
        config = config_of(os.environ)
    except EngineConfigError as error:
        print(f"simulator: error: {error}", file=sys.stderr, flush=True)
        return 1
    time.sleep(float(os.environ.get(STARTUP_VARIABLE, "0")))
    process = CoreProcess()
    faults = None
    try:
        faults = faults_of(arguments, config, process)
        asyncio.run(_serve(arguments, process, config, faults))
    except (CheckpointError, PlanError, OptionError) as error:
        print(f"simulator: error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        process.stop()
        if faults is not None:
            faults.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
