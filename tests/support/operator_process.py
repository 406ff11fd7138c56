"""The operator as a process of its own, as a test starts, kills and reads it."""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.log_lines import json_lines
from tests.support.ports import free_port
from tests.support.waiting import until

START_S = 60.0
STOP_S = 30.0
ANSWER_S = 20.0  # who does not listen refuses at once


@dataclass
class OperatorProcess:
    """`python -m rollfleet_operator` outside of the cluster."""

    namespace: str
    kubeconfig: Path
    folder: Path
    router_image: str = "rollfleet/router:dev"
    service_account: str = "rollfleet-operator"
    arguments: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None
    starts: int = 0

    @property
    def log_file(self) -> Path:
        """Where the newest start logs to."""
        return self.folder / f"operator-{self.starts}.log"

    @property
    def command(self) -> list[str]:
        """The command line."""
        return [
            sys.executable, "-m", "rollfleet_operator",
            "--kubeconfig", str(self.kubeconfig),
            "--operator-namespace", self.namespace,
            "--service-account", self.service_account,
            "--router-image", self.router_image,
            "--allow-host-path",
            "--listen", f"127.0.0.1:{self.port}",
            *(self.arguments or ("--namespace", self.namespace)),
        ]  # fmt: skip

    async def launch(self) -> None:
        """Start it and return at once."""
        self.starts += 1
        with self.log_file.open("wb") as log:
            environment = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
            self.process = await asyncio.create_subprocess_exec(*self.command, stderr=log, stdout=log, env=environment)

    async def start(self) -> None:
        """Start it and wait until it operates."""
        await self.launch()
        await until(self.is_ready, START_S, lambda: f"the operator is not ready:\n{self.log()}")

    async def is_ready(self) -> bool:
        """Whether /readyz says so; an error if the process has ended."""
        if self.process is not None and self.process.returncode is not None:
            raise AssertionError(f"the operator ended with {self.process.returncode}:\n{self.log()}")
        return await self.status("/readyz") == httpx.codes.OK

    async def status(self, path: str) -> int:
        """HTTP status of a GET; 0 where nobody listens."""
        try:
            async with httpx.AsyncClient(timeout=ANSWER_S) as client:
                return (await client.get(f"http://127.0.0.1:{self.port}{path}")).status_code
        except httpx.HTTPError:
            return 0

    async def metrics(self) -> dict[str, float]:
        """All samples by their line's left side."""
        async with httpx.AsyncClient(timeout=ANSWER_S) as client:
            text = (await client.get(f"http://127.0.0.1:{self.port}/metrics")).text
        lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    async def kill(self) -> None:
        """SIGKILL: no goodbye of any kind."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> int:
        """SIGTERM; the exit code."""
        return await self._end(signal.SIGTERM)

    async def wait(self, within_s: float) -> int:
        """Wait for the process to end by itself; the exit code."""
        assert self.process is not None
        async with asyncio.timeout(within_s):
            return await self.process.wait()

    async def _end(self, number: signal.Signals) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.wait(STOP_S)

    def log(self) -> str:
        """What the newest start has logged."""
        return self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file.exists() else ""

    def entries(self, message: str = "") -> list[dict[str, Any]]:
        """Log lines as objects; every whole line must be one."""
        lines = json_lines(self.log())
        return [line for line in lines if not message or line["message"] == message]
