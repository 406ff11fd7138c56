"""The local cluster's API server is away while a block runs: nobody listens, or somebody who says nothing."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.victims import answers, component

API_SERVER = "kube-apiserver"


@asynccontextmanager
async def refused() -> AsyncIterator[None]:
    """It is dead, and what would start it again is stopped meanwhile."""
    (supervisor,), (server,) = await component("supervisor"), await component(API_SERVER)
    os.kill(supervisor, signal.SIGSTOP)
    try:
        os.kill(server, signal.SIGKILL)
        yield
    finally:
        os.kill(supervisor, signal.SIGCONT)
        await answers("/readyz")


@asynccontextmanager
async def frozen() -> AsyncIterator[None]:
    """It is stopped: connections stay, and nothing is answered."""
    (server,) = await component(API_SERVER)
    os.kill(server, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server, signal.SIGCONT)
        await answers("/readyz")
