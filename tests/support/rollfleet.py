"""The command line as a process, beside an operator that runs."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENDS_S = 120.0


@dataclass(frozen=True)
class Ended:
    """What came of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.stdout)


@dataclass(frozen=True)
class Command:
    """`rollfleet ...` in a namespace."""

    namespace: str
    kubeconfig: Path

    async def __call__(self, *arguments: str) -> Ended:
        """Run it to its end."""
        return await (await self.start(*arguments))()

    async def start(self, *arguments: str) -> Callable[[], Any]:
        """Start it; what is returned waits for its end."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollfleet_cli.main", *arguments, "--namespace", self.namespace),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
        )

        async def ended() -> Ended:
            try:
                async with asyncio.timeout(ENDS_S):
                    out, err = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
            assert process.returncode is not None
            return Ended(process.returncode, out.decode(), err.decode())

        return ended
