"""Engines that fail as planned: the simulator by itself, real vLLM behind the proxy. The tests drive both alike."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

from rollfleet_protocol.engine_config import EngineConfig
from tests.contract.models import Models
from tests.contract.process import EngineProcess, Kind, Site, launcher, simulator, until
from tests.support.log_lines import json_lines

PLAN = "faults.json"
SIMULATED = Kind("simulator", {"ROLLFLEET_ENGINE": "simulator", "ROLLFLEET_SIMULATOR_TOKEN_MS": "1.5"})


def simulator_with(plan: Path, config: EngineConfig) -> list[str]:
    """Started by hand: the launcher passes no faults on."""
    return simulator(config, "--faults", str(plan))


def proxy_with(plan: Path, config: EngineConfig, options: tuple[str, ...]) -> list[str]:
    """In the launcher's place, with the launcher as its child."""
    proxy = [sys.executable, "-m", "rollfleet_engine.faults.proxy", "--faults", str(plan), *options]
    return [*proxy, "--", *launcher(config)]


class FaultyEngine:
    """One engine, and the plan that it follows."""

    def __init__(
        self, kind: Kind, site: Site, name: str, models: Models, *, proxied: bool, options: tuple[str, ...] = ()
    ) -> None:
        self.plan_file = site.folder / f"{name}-{PLAN}"
        self._write({})

        def command(config: EngineConfig) -> list[str]:
            return proxy_with(self.plan_file, config, options) if proxied else simulator_with(self.plan_file, config)

        self.process = EngineProcess(kind, site, name, models.folder(0), models.root, command=command)
        self.process.wait_live()

    def _write(self, plan: dict[str, Any]) -> None:
        self.plan_file.write_text(json.dumps(plan))

    def plan(self, *rules: dict[str, Any], seed: int = 0) -> None:
        """Follow these rules from now on; counting begins anew."""
        told = len(self.lines("faults.plan"))
        self._write({"seed": seed, "rules": rules})
        self.process.signal(signal.SIGHUP)
        until(lambda: len(self.lines("faults.plan")) > told, 10, "the plan was read")

    def lines(self, event: str) -> list[dict[str, Any]]:
        """What was logged of faults."""
        return [entry for entry in json_lines(self.process.log(), '"rollfleet.faults"') if entry["event"] == event]

    def done(self) -> list[dict[str, Any]]:
        """The rules that repeat what was done since the newest plan was read."""
        last = self.lines("faults.plan")[-1]["timeNs"]
        return [line["rule"] for line in self.lines("fault") if line["timeNs"] >= last]
