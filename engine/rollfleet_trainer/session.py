"""How requests to the API server go out: without an executor, so that a Lease is given back while a process ends.

aiohttp asks for two by default: trust_env looks for a netrc file with each request (and has no use for it, requests
bear a token), names are resolved with each new connection.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from aiohttp import TCPConnector, ThreadedResolver

if TYPE_CHECKING:
    from aiohttp.abc import ResolveResult


class Resolver(ThreadedResolver):
    """The system's. What it has said before is known when nobody can be asked any more."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[str, int, int], list[ResolveResult]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Addresses of a host."""
        asked = (host, port, int(family))
        try:
            self._known[asked] = await super().resolve(host, port, family)
        except RuntimeError:  # the interpreter shuts down: executors take nothing
            if asked not in self._known:
                raise
        return self._known[asked]


def prepare(client: Any) -> TCPConnector:
    """For a kubernetes.aio ApiClient that has sent nothing yet. Whoever made it closes the connector after it."""
    configuration, rest = client.configuration, client.rest_client
    if rest.proxy is None:
        rest.proxy = environments_proxy(configuration.host)
    connector = TCPConnector(limit=configuration.connection_pool_maxsize, ssl=rest.ssl_context, resolver=Resolver())
    configuration.client_session_kwargs = {"trust_env": False, "connector": connector}
    return connector


def environments_proxy(url: str) -> str | None:
    """By HTTPS_PROXY, HTTP_PROXY and NO_PROXY, in either case; as trust_env has it."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
