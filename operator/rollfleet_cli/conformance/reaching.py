"""The way to the engines of one fleet: tunnels or addresses, tokens of each kind, and what their operator told them."""

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING

from pydantic import ValidationError

from rollfleet_cli.asking import ACCOUNT, AT_ONCE, RIGHT, NoMeter, Way, configuration_of
from rollfleet_cli.cluster import Access, is_in_a_pod
from rollfleet_cli.conformance.checks.check import Subject
from rollfleet_cli.conformance.checks.wire import Identity
from rollfleet_cli.conformance.forging import forged
from rollfleet_cli.conformance.running import NoStateError, look
from rollfleet_cli.conformance.transport import Address, Transport
from rollfleet_cli.tunnel import Forwarder, Tunnel
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.api.weightversion import Probe
from rollfleet_operator.clients.errors import Denied, NotFound, RollfleetError
from rollfleet_operator.clients.kubernetes import KubernetesCluster
from rollfleet_operator.clients.tokens import Tokens
from rollfleet_operator.ports import Manifest
from rollfleet_protocol.engine_config import ENGINE_CONFIG_ENV, EngineConfig, FleetIdentity

if TYPE_CHECKING:
    from kubernetes.aio.client.configuration import Configuration

NOWHERE = "rollfleet.io/conformance"  # an audience that nobody takes: what is shown under it is worth nothing
DEFAULT_ACCOUNT = "default"


class UnfitError(Exception):
    """This engine cannot be asked; the message says why."""


@dataclass
class Reached:
    """An engine, and the way to it."""

    pod: Manifest
    subject: Subject
    transport: Transport
    credentials: "Credentials"
    _token: str = field(default="", repr=False)

    async def renew(self) -> None:
        """Tokens that hold for the next check: they live for minutes, and --all may take longer."""
        token, bearers = await self.credentials.bearers(self._token)
        if bearers is not None:
            self._token, self.transport.bearers = token, bearers


class Credentials:
    """Tokens of each kind for one engine."""

    def __init__(self, operator: Tokens, other: Tokens | None, audience: str) -> None:
        self._operator = operator
        self._other = other
        self._audience = audience
        self.missing: dict[Identity, str] = {}

    async def bearers(self, known: str = "") -> tuple[str, Mapping[Identity, str] | None]:
        """All kinds; None where the operator's token is the known one, of which the others were made."""
        token = await self._operator.bearer(self._audience)
        if token == known:
            return token, None
        found = {Identity.OPERATOR: token, **await asyncio.to_thread(forged, token)}
        found[Identity.WRONG_AUDIENCE] = await self._operator.bearer(f"{NOWHERE}/{self._audience}"[:250])
        if self._other is None:
            self.missing[Identity.OTHER_ACCOUNT] = "the engine's own account is the operator's"
        else:
            try:
                found[Identity.OTHER_ACCOUNT] = await self._other.bearer(self._audience)
            except (Denied, NotFound) as error:
                self.missing[Identity.OTHER_ACCOUNT] = f"no token of the engine's own account could be had: {error}"
        return token, found


class Reacher:
    """Opens ways to engines, all of one fleet."""

    def __init__(self, fleet: RolloutEngine, probe: Probe, configuration: "Configuration", *, direct: bool) -> None:
        self._fleet = fleet
        self._probe = probe
        self._cluster = KubernetesCluster(configuration, NoMeter())
        self._forwarder = None if direct else Forwarder(configuration, self._cluster)
        self._minters: dict[tuple[str, str], Tokens] = {}
        metadata = fleet.metadata
        self._identity = FleetIdentity(namespace=metadata.namespace, name=metadata.name, uid=metadata.uid)
        self.slots = asyncio.Semaphore(AT_ONCE)

    async def close(self) -> None:
        """Let go of everything."""
        for tokens in self._minters.values():
            await tokens.close()
        if self._forwarder is not None:
            await self._forwarder.close()
        await self._cluster.close()

    async def reach(self, stack: AsyncExitStack, pod: Manifest) -> Reached:
        """The way to this engine, open as long as the stack; UnfitError where there is none."""
        metadata, config = pod["metadata"], config_in(pod)
        ip = (pod.get("status") or {}).get("podIP", "")
        if not ip:
            raise UnfitError(f"it has no address: its phase is {(pod.get('status') or {}).get('phase', 'unknown')}")
        if not self._fleet.status.ca_bundle:
            raise UnfitError("the fleet's status has no caBundle: no operator has looked at it")
        credentials = self._credentials(pod, config)
        try:
            token, bearers = await credentials.bearers()
        except RollfleetError as error:
            raise UnfitError(f"{error}. {RIGHT}" if isinstance(error, Denied) else str(error)) from error
        address, tunnels = await self._address(stack, pod, config, ip)

        def explain() -> str:
            return next((str(tunnel.error) for tunnel in tunnels if tunnel.error is not None), "")

        authority = base64.b64decode(self._fleet.status.ca_bundle).decode()
        transport = Transport(address, authority, bearers or {}, explain)
        stack.push_async_callback(transport.close)
        try:
            state = await look(transport)
        except NoStateError as error:
            raise UnfitError(str(error)) from error
        subject = Subject(
            pod=metadata["name"],
            pod_uid=metadata["uid"],
            config=config,
            state=state,
            probe_tokens=self._probe.tokens,
            allowed=Decimal(self._probe.max_abs_logprob_diff),
            salt=secrets.token_hex(8),
            missing=credentials.missing,
        )
        return Reached(pod, subject, transport, credentials, token)

    async def _address(
        self, stack: AsyncExitStack, pod: Manifest, config: EngineConfig, ip: str
    ) -> tuple[Address, tuple[Tunnel, ...]]:
        name = self._identity.control_server_name
        if self._forwarder is None:
            return Address(ip, config.serving_port, config.control_port, name), ()
        place = pod["metadata"]["namespace"], pod["metadata"]["name"]
        serving = await stack.enter_async_context(self._forwarder.tunnel(*place, config.serving_port))
        control = await stack.enter_async_context(self._forwarder.tunnel(*place, config.control_port))
        return Address("127.0.0.1", serving.local_port, control.local_port, name), (serving, control)

    def _credentials(self, pod: Manifest, config: EngineConfig) -> Credentials:
        metadata = pod["metadata"]
        home, _, account = config.operator.subject.removeprefix(ACCOUNT).partition(":")
        own = (metadata["namespace"], pod["spec"].get("serviceAccountName") or DEFAULT_ACCOUNT)
        other = None if own == (home, account) else self._minter(*own)
        return Credentials(self._minter(home, account), other, self._identity.audience(metadata["uid"]))

    def _minter(self, namespace: str, account: str) -> Tokens:
        key = (namespace, account)
        if key not in self._minters:
            self._minters[key] = Tokens(self._cluster, namespace, account, lambda: datetime.now(UTC))
        return self._minters[key]


@asynccontextmanager
async def reacher(access: Access, fleet: RolloutEngine, probe: Probe, way: Way) -> AsyncIterator[Reacher]:
    """For as long as the context lasts."""
    direct = way == "direct" or (way == "auto" and is_in_a_pod(access))
    made = Reacher(fleet, probe, await configuration_of(access), direct=direct)
    try:
        yield made
    finally:
        await made.close()


def config_in(pod: Manifest) -> EngineConfig:
    """What the operator told this engine; UnfitError where this release cannot read all of it."""
    for container in pod["spec"].get("containers") or ():
        for variable in container.get("env") or ():
            if variable.get("name") == ENGINE_CONFIG_ENV:
                try:
                    return EngineConfig.model_validate_json(variable.get("value", ""))
                except ValidationError as error:
                    first = error.errors()[0]
                    where = ".".join(map(str, first["loc"]))
                    why = f"{where}: {first['msg']}; use the rollfleet of that release"
                    raise UnfitError(f"its {ENGINE_CONFIG_ENV} is of another release: {why}") from error
    raise UnfitError(f"its pod has no {ENGINE_CONFIG_ENV}: it is no engine of an operator of ours")
