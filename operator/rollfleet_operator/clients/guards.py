"""The control port of engines: TLS by our CA, the fleet's server name, a Bearer token of the pod's own audience."""

import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeVar

import aiohttp
from pydantic import ValidationError

from rollfleet_operator.clients.errors import (
    Denied,
    RollfleetError,
    Unguarded,
    Unreachable,
    Unsupported,
    clipped,
    from_guard,
    from_transport,
)
from rollfleet_operator.clients.fence import demand
from rollfleet_operator.clients.slots import FairSlots
from rollfleet_operator.clients.tokens import Tokens
from rollfleet_operator.ports import Meter
from rollfleet_protocol.commands import CANARY_PATH, LOOK_PATH, PREFIX, PROBE_PATH, STATE_PATH, Command, Probe
from rollfleet_protocol.engine_config import FleetIdentity
from rollfleet_protocol.state import EngineState, ProbeReport

CONTROL_PORT = 8001
MAX_CONNECTIONS = 8192  # a long poll and a command for each of some thousand engines
MAX_CONNECTIONS_PER_ENGINE = 4
MAX_BODY = 1 << 20  # bytes of an answer
# Calls at once, in all and of one fleet. A thousand TLS handshakes together would outlast their own deadline on one
# core. Commands and first questions are counted apart: engines that are gone must not hold up commands to those that
# are there.
MAX_COMMANDS, MAX_COMMANDS_PER_FLEET = 256, 64
MAX_QUESTIONS, MAX_QUESTIONS_PER_FLEET = 128, 32
TLS_BUFFER = 32 * 1024  # bytes; a TLS record holds 16 KiB at most
KEEP_ALIVE_S = 60.0
CONNECT_S = 3.0  # within a cluster; a pod that is gone answers nothing
COMMAND_S = 10.0  # guards answer at once and go on in the background; Open and Cancel resume the scheduler first
POLL_S = 10  # of a long poll; well below the silence after which guards reopen by themselves
POLL_GRACE_S = 5.0
PROBE_GRACE_S = 2.0
Said = TypeVar("Said", EngineState, ProbeReport)
SAID: dict[type, str] = {EngineState: "a guard's state", ProbeReport: "a guard's report of a probe"}


@dataclass(frozen=True)
class Endpoint:
    """A guard, and whose it is."""

    fleet: FleetIdentity
    pod: str
    pod_uid: str
    ip: str
    port: int = CONTROL_PORT

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"https://{host}:{self.port}"

    @property
    def audience(self) -> str:
        """Of the tokens that are shown to this guard."""
        return self.fleet.audience(self.pod_uid)

    @property
    def words(self) -> str:
        """For messages."""
        return f"guard of {self.pod} ({self.ip}:{self.port})"


class GuardClient:
    """Calls to guards. One session for all fleets; their certificates come from one CA."""

    def __init__(self, ca_pem: str, tokens: Tokens, meter: Meter, leads: Callable[[], bool]) -> None:
        SSLProtocol.max_size = TLS_BUFFER  # asyncio's 256 KiB are half a gigabyte for a thousand engines (measured)
        self._leads = leads
        self._commands = FairSlots(MAX_COMMANDS, MAX_COMMANDS_PER_FLEET)
        self._questions = FairSlots(MAX_QUESTIONS, MAX_QUESTIONS_PER_FLEET)
        self._trusted = ca_pem
        self._tls = _context(ca_pem)
        self._tokens = tokens
        self._meter = meter
        connector = aiohttp.TCPConnector(
            limit=MAX_CONNECTIONS, limit_per_host=MAX_CONNECTIONS_PER_ENGINE, keepalive_timeout=KEEP_ALIVE_S
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a few bytes on the wire could be a gigabyte
            skip_auto_headers=("Accept-Encoding",),
        )

    def trust(self, ca_pem: str) -> None:
        """What proves engines from now on; connections that stand are not asked again."""
        if ca_pem != self._trusted:
            self._trusted, self._tls = ca_pem, _context(ca_pem)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    def waiting(self) -> int:
        """Calls that wait for their fleet's turn."""
        return self._commands.waiting() + self._questions.waiting()

    async def state(self, endpoint: Endpoint, after: int | None) -> EngineState:
        """The guard's state: at once without `after`, else at the next change or after POLL_S."""
        if after is None:
            async with self._questions.slot(endpoint.fleet.uid):
                return await self._state(endpoint, "GET", STATE_PATH, None, COMMAND_S)
        query = f"?after={after}&waitSeconds={POLL_S}"
        return await self._state(endpoint, "GET", STATE_PATH + query, None, POLL_S + POLL_GRACE_S)

    async def canary(self, endpoint: Endpoint) -> None:
        """A command without identity, and without content: raises Unguarded unless a guard refuses it as one does."""
        async with self._questions.slot(endpoint.fleet.uid):
            status, content = await self._exchange(endpoint, "POST", CANARY_PATH, b"{}", COMMAND_S, None)
        if status >= 500:
            raise from_guard(status, content, endpoint.words)  # says nothing either way
        if status != HTTPStatus.UNAUTHORIZED or not isinstance(from_guard(status, content, ""), Denied):
            raise Unguarded(
                f"{endpoint.words} answered HTTP {status} to a command without identity: what answers there lets "
                "everybody in or is no guard of ours, so it is never opened. Take the engine's image of this release"
            )

    async def look(self, endpoint: Endpoint) -> EngineState:
        """The guard's state for somebody who only looks: it is no word of the operator, and postpones nothing."""
        async with self._questions.slot(endpoint.fleet.uid):
            return await self._state(endpoint, "GET", LOOK_PATH, None, COMMAND_S)

    async def probe(self, endpoint: Endpoint, probe: Probe) -> ProbeReport:
        """What an engine that may be serving says to these tokens now. Changes nothing; no word of the operator."""
        body, deadline_s = probe.model_dump_json(by_alias=True).encode(), probe.deadline_seconds + PROBE_GRACE_S
        return _read(ProbeReport, await self._call(endpoint, "POST", PROBE_PATH, body, deadline_s), endpoint)

    async def command(self, endpoint: Endpoint, command: Command) -> EngineState:
        """Give a command. All may be repeated, so a connection that the guard closed meanwhile is no failure."""
        name = command_name(command)
        body = command.model_dump_json(by_alias=True, exclude_none=True).encode()
        started, outcome = time.monotonic(), "ok"
        try:
            async with self._commands.slot(endpoint.fleet.uid):
                return await self._twice(endpoint, f"{PREFIX}/{name}", body)
        except RollfleetError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._meter.guard_call(name, outcome, time.monotonic() - started)

    async def _twice(self, endpoint: Endpoint, path: str, body: bytes) -> EngineState:
        demand(self._leads)
        try:
            return await self._state(endpoint, "POST", path, body, COMMAND_S)
        except Unreachable as error:
            if not isinstance(error.__cause__, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
                raise
        demand(self._leads)
        return await self._state(endpoint, "POST", path, body, COMMAND_S)

    async def _state(
        self, endpoint: Endpoint, method: str, path: str, body: bytes | None, deadline_s: float
    ) -> EngineState:
        state = _read(EngineState, await self._call(endpoint, method, path, body, deadline_s), endpoint)
        if state.pod_uid not in ("", endpoint.pod_uid):
            raise Unreachable(f"{endpoint.words}: the address is another pod's by now, uid {clipped(state.pod_uid)}")
        return state

    async def _call(self, endpoint: Endpoint, method: str, path: str, body: bytes | None, deadline_s: float) -> bytes:
        token = await self._tokens.bearer(endpoint.audience)
        status, content = await self._exchange(endpoint, method, path, body, deadline_s, token)
        if 200 <= status < 300:
            return content
        error = from_guard(status, content, endpoint.words)
        if isinstance(error, Denied):
            self._tokens.discard(endpoint.audience, token)  # the API server's keys may have been rotated
        raise error

    async def _exchange(
        self, endpoint: Endpoint, method: str, path: str, body: bytes | None, deadline_s: float, token: str | None
    ) -> tuple[int, bytes]:
        """One call; status and content of the answer, whatever it is."""
        what = endpoint.words
        headers = {"Accept": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            async with self._session.request(
                method,
                endpoint.origin + path,
                data=body,
                headers=headers,
                ssl=self._tls,
                server_hostname=endpoint.fleet.control_server_name,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=deadline_s, sock_connect=CONNECT_S),
            ) as answer:
                return answer.status, await _bounded(answer, what)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise from_transport(error, what) from error


def _context(ca_pem: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=ca_pem)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _read(kind: type[Said], content: bytes, endpoint: Endpoint) -> Said:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first, what = error.errors()[0], SAID[kind]
        raise Unsupported(f"{endpoint.words}: the answer is not {what}: {first['loc']}: {first['msg']}") from error


async def _bounded(answer: aiohttp.ClientResponse, what: str) -> bytes:
    content = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        content += chunk
        if len(content) > MAX_BODY:
            raise Unsupported(f"{what}: the answer is longer than {MAX_BODY} bytes")
    return bytes(content)


def command_name(command: Command) -> str:
    """The command's word on the wire."""
    return type(command).__name__.lower()
