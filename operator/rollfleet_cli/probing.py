"""A fresh probe of one engine: its incarnation first, then the tokens; patient with another probe that runs."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from rollfleet_operator.clients.errors import Refused
from rollfleet_operator.clients.guards import Endpoint, GuardClient
from rollfleet_protocol.commands import LONGEST_PROBE_SECONDS, Probe
from rollfleet_protocol.refusals import RefusalReason
from rollfleet_protocol.state import ProbeReport

BUSY_S = 0.5  # until another probe of the same engine is looked for again


def fresh_probe(tokens: tuple[int, ...], within_s: float) -> Callable[[GuardClient, Endpoint], Awaitable[ProbeReport]]:
    """The question; what is left of `within_s` when an engine's turn comes is the probe's own deadline."""
    ends = time.monotonic() + within_s

    async def question(client: GuardClient, endpoint: Endpoint) -> ProbeReport:
        incarnation = (await client.look(endpoint)).incarnation
        while True:
            left = max(1.0, min(ends - time.monotonic(), LONGEST_PROBE_SECONDS))
            try:
                return await client.probe(
                    endpoint, Probe(incarnation=incarnation, tokens=tokens, deadline_seconds=left)
                )
            except Refused as error:
                if error.reason is not RefusalReason.BUSY or time.monotonic() + BUSY_S >= ends:
                    raise
            await asyncio.sleep(BUSY_S)

    return question
