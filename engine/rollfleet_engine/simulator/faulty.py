"""A simulated engine that fails as planned: `--faults` and `--fault-seed`, which the launcher passes to nobody."""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping

from rollfleet_engine.faults.adapter import FaultyAdapter, FaultyStager
from rollfleet_engine.faults.http import FaultyApp, Port
from rollfleet_engine.faults.injector import LOGGER, Injector
from rollfleet_engine.faults.options import ReadPlan, reader_of
from rollfleet_engine.faults.orders import Orders
from rollfleet_engine.guard.answers import AsgiApp
from rollfleet_engine.guard.checkpoints import Stager
from rollfleet_engine.guard.log import GuardLog
from rollfleet_engine.guard.ports import EngineAdapter
from rollfleet_engine.simulator.process import CoreProcess
from rollfleet_protocol.engine_config import EngineConfig

COUNTS_OPTION = "--fault-counts"  # how many calls of each kind came before a restart, as JSON


class SimulatorHands:
    """Keeps Hands for the process that it is in."""

    def __init__(self, process: CoreProcess, orders: Orders) -> None:
        self._process = process
        self._orders = orders
        self.injector: Injector | None = None

    async def die(self) -> None:
        """As by the kernel's out-of-memory killer; the core follows."""
        os.kill(os.getpid(), signal.SIGKILL)

    async def hang(self, seconds: float) -> None:
        """Nothing of the process moves, its other requests neither."""
        time.sleep(seconds)  # noqa: ASYNC251 - that is the fault

    async def restart(self) -> None:
        """The same command again in the same process: all is lost but the count of calls."""
        self._process.end()
        self._orders.close()
        counts = {} if self.injector is None else self.injector.counts()
        kept = without_counts(sys.argv[1:])
        sys.stdout.flush()
        command = [sys.executable, "-m", "rollfleet_engine.simulator", *kept, f"{COUNTS_OPTION}={json.dumps(counts)}"]
        os.execv(sys.executable, command)  # noqa: S606 - our own command line


def without_counts(argv: list[str]) -> list[str]:
    """The command line as it was given first."""
    return [argument for argument in argv if not argument.startswith(f"{COUNTS_OPTION}=")]


class Faults:
    """What is put around the parts of the engine."""

    def __init__(
        self, config: EngineConfig, read: ReadPlan, orders: Orders, counts: Mapping[str, int], core: CoreProcess
    ) -> None:
        self._read = read
        self._orders = orders
        self._hands = SimulatorHands(core, orders)
        self._injector = self._hands.injector = Injector(read(), fault_log(config), counts)

    def adapter(self, inner: EngineAdapter) -> EngineAdapter:
        """Around the engine's port."""
        return FaultyAdapter(inner, self._injector, self._hands)

    def stager(self, inner: Stager) -> Stager:
        """Around staging."""
        return FaultyStager(inner, self._injector, self._hands)

    def control(self, app: AsgiApp) -> AsgiApp:
        """In front of the control port."""
        return FaultyApp(app, Port.CONTROL, self._injector, self._hands, self._orders)

    def serving(self, app: AsgiApp) -> AsgiApp:
        """In front of the serving port."""
        return FaultyApp(app, Port.SERVING, self._injector, self._hands, self._orders)

    def heed_signals(self) -> None:
        """SIGHUP: the plan is read anew."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._injector.replace, self._read)

    def close(self) -> None:
        """Leave nothing behind."""
        self._orders.close()


def fault_log(config: EngineConfig) -> GuardLog:
    """Lines beside the guard's."""
    return GuardLog({"fleet": f"{config.fleet.namespace}/{config.fleet.name}"}, logger=LOGGER)


def faults_of(arguments: argparse.Namespace, config: EngineConfig, core: CoreProcess) -> Faults | None:
    """None where no faults are asked for. Raises PlanError."""
    orders = Orders(config, fault_log(config))
    read = reader_of(arguments, orders)
    return None if read is None else Faults(config, read, orders, arguments.fault_counts, core)
