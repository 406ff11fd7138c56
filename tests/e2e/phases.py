"""How far an update is, as its WeightVersion tells: watched, since Opening lasts no longer than one call of kubectl."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from examples.demo.fleet import FINISHED, Fleet

PHASES = ("Preparing", "Quiescing", "Transferring", "Verifying", "Opening")
_ORDER = ("Pending", *PHASES)
_LINE = 'jsonpath={.status.version} {.status.phase}{"\\n"}'


class PhaseWatch:
    """The states of one WeightVersion's status, as they come."""

    def __init__(self, lines: asyncio.StreamReader) -> None:
        self._lines = lines

    async def reached(self, version: int, phase: str, timeout_s: float = 60.0) -> str:
        """The first phase seen of the update to `version` that is `phase` or beyond it."""
        last = "nothing"
        try:
            async with asyncio.timeout(timeout_s):
                while line := await self._lines.readline():
                    last = line.decode().strip()
                    of, _, now = last.partition(" ")
                    if of == str(version) and (now in FINISHED or _ORDER.index(now) >= _ORDER.index(phase)):
                        return now
        except TimeoutError:
            raise AssertionError(f"version {version} did not reach {phase} within {timeout_s} s, but {last}") from None
        raise AssertionError(f"the watch for {phase} of version {version} ended; its last state was {last}")


@contextlib.asynccontextmanager
async def watching(fleet: Fleet) -> AsyncIterator[PhaseWatch]:
    """Watch the fleet's WeightVersion, which need not exist yet; begun before the bump, nothing is missed."""
    process = await asyncio.create_subprocess_exec(
        *("kubectl", "get", "weightversions", "-n", fleet.namespace, "--watch", "-o", _LINE),
        *("--field-selector", f"metadata.name={fleet.weight_version}"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield PhaseWatch(process.stdout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
