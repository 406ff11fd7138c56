"""Asking the engines' guards, from wherever a kubeconfig works.

Guards obey, and answer, one ServiceAccount only: the operator's. So a token of that account is asked for, which takes a
right that is as strong as the account (docs/security.md). The way leads through the API server's port-forward, or
straight to the pods from within the cluster. Nothing is changed, and a guard takes no look for its operator's word.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeVar

from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config
from kubernetes.aio.config.config_exception import ConfigException
from pydantic import ValidationError

from rollfleet_cli.cluster import Access, is_in_a_pod
from rollfleet_cli.errors import UnreachableError
from rollfleet_cli.tunnel import Forwarder
from rollfleet_operator.api.rolloutengine import RolloutEngine
from rollfleet_operator.clients.errors import Denied, Disowned, RollfleetError, Unreachable
from rollfleet_operator.clients.guards import CONTROL_PORT, Endpoint, GuardClient
from rollfleet_operator.clients.kubernetes import KubernetesCluster
from rollfleet_operator.clients.tokens import Tokens
from rollfleet_operator.ports import Manifest
from rollfleet_protocol.engine_config import ENGINE_CONFIG_ENV, EngineConfig, FleetIdentity

AT_ONCE = 32  # engines; a tunnel is two connections through the API server
ACCOUNT = "system:serviceaccount:"
RIGHT = (
    "Guards answer the operator's ServiceAccount only. Asking them needs the right to create serviceaccounts/token for "
    "it, and from outside of the cluster to get and create pods/portforward (docs/security.md)"
)
Way = Literal["auto", "direct", "port-forward"]
Said = TypeVar("Said")


@dataclass(frozen=True)
class Answer(Generic[Said]):
    """What one engine said, or why it said nothing."""

    pod: str
    uid: str
    said: Said | None = None
    error: str = ""
    denied: bool = False  # nobody could show it a token that it takes
    disowned: bool = False  # it obeys another ServiceAccount than the one that was shown


class NoMeter:
    """Counts nothing: a command line has no metrics."""

    def kubernetes_call(self, verb: str, resource: str, outcome: str, seconds: float) -> None:
        """Not counted."""

    def guard_call(self, command: str, outcome: str, seconds: float) -> None:
        """Not counted."""

    def reconcile(self, outcome: str, seconds: float) -> None:
        """Not counted."""

    def update_phase(self, namespace: str, name: str, step: str, seconds: float) -> None:
        """Not counted."""

    def update_finished(self, namespace: str, name: str, outcome: str) -> None:
        """Not counted."""


def engine_config(pod: Manifest) -> EngineConfig | None:
    """What the operator told the pod's launcher; None where it cannot be read."""
    for container in pod["spec"].get("containers") or ():
        for variable in container.get("env") or ():
            if variable.get("name") == ENGINE_CONFIG_ENV:
                try:
                    return EngineConfig.model_validate_json(variable.get("value", ""))
                except ValidationError:  # of another release
                    return _operator_only(variable.get("value", ""))
    return None


def ask(
    access: Access,
    fleet: RolloutEngine,
    pods: Iterable[Manifest],
    question: "Callable[[GuardClient, Endpoint], Awaitable[Said]]",
    within_s: float,
    way: Way = "auto",
) -> list[Answer[Said]]:
    """The same question to all engines at once, in the order of the pods."""
    return asyncio.run(_ask(access, fleet, list(pods), question, within_s, way))


async def _ask(
    access: Access,
    fleet: RolloutEngine,
    pods: list[Manifest],
    question: "Callable[[GuardClient, Endpoint], Awaitable[Said]]",
    within_s: float,
    way: Way,
) -> list[Answer[Said]]:
    configuration = await configuration_of(access)
    async with AsyncExitStack() as stack:
        cluster = KubernetesCluster(configuration, NoMeter())
        stack.push_async_callback(cluster.close)
        forwarder = Forwarder(configuration, cluster)
        stack.push_async_callback(forwarder.close)
        direct = way == "direct" or (way == "auto" and is_in_a_pod(access))
        asker = _Asker(cluster, None if direct else forwarder, fleet, asyncio.Semaphore(AT_ONCE))
        stack.push_async_callback(asker.close)
        asked = [asyncio.create_task(asker.ask(pod, question)) for pod in pods]
        if asked:
            await asyncio.wait(asked, timeout=within_s)
        for task in asked:
            task.cancel()
        ends = await asyncio.gather(*asked, return_exceptions=True)
    return [_answer_of(pod, end, within_s) for pod, end in zip(pods, ends, strict=True)]


class _Asker:
    def __init__(
        self, cluster: KubernetesCluster, forwarder: Forwarder | None, fleet: RolloutEngine, slots: asyncio.Semaphore
    ) -> None:
        self._cluster = cluster
        self._forwarder = forwarder
        self._fleet = fleet
        self._slots = slots
        self._clients: dict[str, tuple[Tokens, GuardClient]] = {}  # by the account that guards obey
        metadata = fleet.metadata
        self._identity = FleetIdentity(namespace=metadata.namespace, name=metadata.name, uid=metadata.uid)

    async def close(self) -> None:
        for tokens, client in self._clients.values():
            await client.close()
            await tokens.close()

    async def ask(self, pod: Manifest, question: "Callable[[GuardClient, Endpoint], Awaitable[Said]]") -> Answer[Said]:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        try:
            client = self._client(pod)
            async with self._slots, self._endpoint(pod) as endpoint:
                return Answer(name, uid, await question(client, endpoint))
        except Disowned as error:
            return Answer(name, uid, error=str(error), disowned=True)
        except Denied as error:
            return Answer(name, uid, error=str(error), denied=True)
        except RollfleetError as error:
            return Answer(name, uid, error=str(error))

    def _client(self, pod: Manifest) -> GuardClient:
        if not self._fleet.status.ca_bundle:
            raise Unreachable("the fleet's status has no caBundle yet: no operator has looked at it")
        config = engine_config(pod)
        if config is None:
            raise Unreachable(f"pod {pod['metadata']['name']} does not tell which operator it obeys")
        subject = config.operator.subject
        if subject not in self._clients:
            namespace, _, account = subject.removeprefix(ACCOUNT).partition(":")
            tokens = Tokens(self._cluster, namespace, account, lambda: datetime.now(UTC))
            authority = base64.b64decode(self._fleet.status.ca_bundle).decode()
            self._clients[subject] = tokens, GuardClient(authority, tokens, NoMeter(), leads=lambda: False)
        return self._clients[subject][1]

    @asynccontextmanager
    async def _endpoint(self, pod: Manifest) -> AsyncIterator[Endpoint]:
        metadata, ip = pod["metadata"], (pod.get("status") or {}).get("podIP", "")
        if not ip:
            raise Unreachable(f"pod {metadata['name']} has no address: it is {(pod.get('status') or {}).get('phase')}")
        if self._forwarder is None:
            yield Endpoint(self._identity, metadata["name"], metadata["uid"], ip)
            return
        async with self._forwarder.tunnel(metadata["namespace"], metadata["name"], CONTROL_PORT) as tunnel:
            try:
                yield Endpoint(self._identity, metadata["name"], metadata["uid"], "127.0.0.1", tunnel.local_port)
            except Unreachable as error:
                raise tunnel.error or by_tunnel(error, tunnel.local_port, ip) from None


def by_tunnel(error: Unreachable, local_port: int, ip: str) -> Unreachable:
    """The same with the engine's own address: nobody can look at the tunnel's end on this machine."""
    return Unreachable(str(error).replace(f"127.0.0.1:{local_port}", f"{ip}:{CONTROL_PORT} by port-forward"))


async def configuration_of(access: Access) -> Configuration:
    """As kubectl would find the cluster; UnreachableError where there is no way to one."""
    configuration = Configuration()
    file = str(access.kubeconfig) if access.kubeconfig else None
    try:
        if is_in_a_pod(access):
            load_incluster_config(client_configuration=configuration)
        else:
            await load_kube_config(file, context=access.context, client_configuration=configuration)
    except (ConfigException, OSError) as error:
        raise UnreachableError(f"no way to a cluster: {error}") from error
    return configuration


def _answer_of(pod: Manifest, end: "Answer[Said] | BaseException", within_s: float) -> Answer[Said]:
    if isinstance(end, Answer):
        return end
    if not isinstance(end, asyncio.CancelledError):
        raise end
    return Answer(pod["metadata"]["name"], pod["metadata"]["uid"], error=f"no answer within {within_s:g} s")


def _operator_only(text: str) -> EngineConfig | None:
    """The identities alone: all that is needed of a configuration which this release cannot read as a whole."""
    try:
        document: Any = json.loads(text)
        known = {name: document[name] for name in ("fleet", "operator", "model")}
        return EngineConfig.model_validate(known)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
