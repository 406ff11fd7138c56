"""The operator's process: checks, wiring, start and stop."""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import kopf
from kubernetes.aio.client.configuration import Configuration

from rollfleet_operator.clients.certificates import Certificates
from rollfleet_operator.clients.errors import InvalidSpec, Retryable, RollfleetError
from rollfleet_operator.clients.events import WRITERS, Recorder
from rollfleet_operator.clients.followers import Followers
from rollfleet_operator.clients.guards import GuardClient
from rollfleet_operator.clients.kubernetes import KubernetesCluster, load_configuration
from rollfleet_operator.clients.metrics import FleetCollector, Metrics
from rollfleet_operator.clients.tokens import Tokens
from rollfleet_operator.core.observed import Settings
from rollfleet_operator.core.plan import plan, plan_orphan
from rollfleet_operator.ports import SERVICE_ACCOUNTS, Cluster
from rollfleet_operator.runtime.apply import Applier
from rollfleet_operator.runtime.health import serving
from rollfleet_operator.runtime.intake import Intake, build_registry, kopf_settings
from rollfleet_operator.runtime.observe import Observer
from rollfleet_operator.runtime.options import Options
from rollfleet_operator.runtime.permissions import missing_kinds, missing_permissions
from rollfleet_operator.runtime.queue import KeyedQueue
from rollfleet_operator.runtime.reconcile import Reconciler
from rollfleet_operator.runtime.records import Records
from rollfleet_operator.runtime.resync import Resync
from rollfleet_operator.runtime.uptime import Uptime
from rollfleet_operator.runtime.watchdog import Watchdog

logger = logging.getLogger(__name__)

WORKERS = 16
STARTUP_S = 60.0  # that CRDs and RBAC may come after us, as they do in one helm install
STARTUP_RETRY_S = 2.0
SHORTEST_LIST_AGE_S = 60.0  # of what counts as one resync for liveness, however often they are made
STOP_S = 10.0
LAST_WORDS_S = 2.0  # for Events that are still to be written at the end
LISTS_MISSED = 3  # resyncs that may fail before the process is no longer healthy


class NotReady(InvalidSpec):
    """The cluster lacks what the operator needs; the message has one line for each thing."""


def utc_now() -> datetime:
    """The clock of decisions."""
    return datetime.now(UTC)


@dataclass(frozen=True)
class _Operator:
    """The parts of one running operator."""

    configuration: Configuration
    records: Records
    resync: Resync
    reconciler: Reconciler
    watchdog: Watchdog
    recorder: Recorder


@dataclass
class _Life:
    """What the health server tells, from the first moment on."""

    operator: _Operator | None = None
    is_ready: bool = False

    def problems(self) -> list[str]:
        """Why the process should be restarted; waiting for CRDs or RBAC is no reason."""
        if self.operator is None:
            return []
        return self.operator.watchdog.problems(self.operator.records.queue.longest_pass_s())


async def run(options: Options, clock: Callable[[], datetime] = utc_now) -> None:
    """Run until SIGTERM or SIGINT, or until a part dies."""
    _raise_file_limit()
    metrics = Metrics()
    configuration = await load_configuration(options.kubeconfig)
    async with AsyncExitStack() as stack:
        life = _Life()
        host, port = options.listen_host, options.listen_port
        await stack.enter_async_context(serving(host, port, metrics.registry, life.problems, lambda: life.is_ready))
        cluster = KubernetesCluster(configuration, metrics)
        stack.push_async_callback(cluster.close)
        await _until(lambda: _check(cluster, options))
        settings = await _settings(cluster, options)
        life.operator = await _wire(stack, configuration, cluster, metrics, options, settings, clock)
        await _operate(life.operator, life, options)


async def _wire(
    stack: AsyncExitStack,
    configuration: Configuration,
    cluster: KubernetesCluster,
    metrics: Metrics,
    options: Options,
    settings: Settings,
    clock: Callable[[], datetime],
) -> _Operator:
    certificates = Certificates(cluster, options.operator_namespace, clock)
    tokens = Tokens(cluster, options.operator_namespace, options.service_account, clock)
    stack.push_async_callback(tokens.close)
    authority = await certificates.authority()
    guards = GuardClient(authority.pem, tokens, metrics)
    stack.push_async_callback(guards.close)
    queue = KeyedQueue()
    stack.callback(queue.close)
    followers = Followers(guards, queue.put, clock)
    stack.push_async_callback(followers.close)
    records = Records(queue, followers)
    watchdog = Watchdog(records.ledger, max(options.resync_s, SHORTEST_LIST_AGE_S) * LISTS_MISSED)
    recorder = Recorder(cluster, socket.gethostname(), clock)
    observer = Observer(cluster, certificates, records, settings, Uptime(clock))
    applier = Applier(cluster, recorder, records, metrics)
    reconciler = Reconciler(observer, applier, plan, plan_orphan, records, metrics, clock, options.name)
    resync = Resync(cluster, records, certificates, watchdog, options.namespaces or (None,), options.resync_s)
    metrics.registry.register(FleetCollector(records.fleets.all, queue.depth, followers.count))
    return _Operator(configuration, records, resync, reconciler, watchdog, recorder)


async def _operate(operator: _Operator, life: _Life, options: Options) -> None:
    """Our tasks start before kopf, which at its end cancels every task that is younger than itself."""
    registry = build_registry(Intake(operator.records), operator.configuration)
    tasks = [asyncio.create_task(operator.watchdog.beat(), name="heartbeat")]
    tasks += [asyncio.create_task(operator.recorder.run(), name=f"recorder {n}") for n in range(WRITERS)]
    await operator.resync.until_done()  # no decision before all pods are known
    workers = [asyncio.create_task(operator.reconciler.work(), name=f"worker {n}") for n in range(WORKERS)]

    @kopf.on.cleanup(registry=registry)
    async def stop_working(**_: Any) -> None:
        life.is_ready = False
        for task in workers:
            task.cancel()
        await operator.records.followers.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await operator.recorder.drain()

    tasks += [*workers, asyncio.create_task(operator.resync.run(), name="resync")]
    watches = asyncio.create_task(_watch(registry, options), name="kopf")
    tasks.append(watches)
    life.is_ready = True
    logger.info("operating", extra={"fields": {"namespaces": list(options.namespaces) or "all"}})
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not life.is_ready:  # kopf was told to stop, and cleans up
            await asyncio.wait([watches], timeout=STOP_S)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    _raise_first(ended)
    logger.info("stopped")


async def _watch(registry: kopf.OperatorRegistry, options: Options) -> None:
    await kopf.operator(
        registry=registry,
        settings=kopf_settings(),
        standalone=True,
        clusterwide=not options.namespaces,
        namespaces=options.namespaces,
    )


def _raise_first(ended: list[BaseException | None]) -> None:
    for result in ended:
        if isinstance(result, Exception):
            raise result


async def _check(cluster: Cluster, options: Options) -> None:
    """Raise NotReady, naming all that is missing."""
    missing = await missing_kinds(cluster)
    namespaces: tuple[str | None, ...] = options.namespaces or (None,)
    lacking = await missing_permissions(cluster, namespaces, options.operator_namespace, options.service_account)
    missing += [f"ServiceAccount permission: {line}" for line in lacking]
    if missing:
        raise NotReady("\n".join(missing))


async def _until(step: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Repeat a step that fails, for STARTUP_S; an API server that does not answer is waited for."""
    deadline = asyncio.get_running_loop().time() + STARTUP_S
    while True:
        try:
            await step()
        except RollfleetError as error:
            if not isinstance(error, Retryable) and asyncio.get_running_loop().time() > deadline:
                raise
            logger.warning("not ready to operate: %s", error)
        else:
            return
        await asyncio.sleep(STARTUP_RETRY_S)


async def _settings(cluster: Cluster, options: Options) -> Settings:
    """Who we are: the one subject, by name and uid, that the guards of new pods will obey."""
    account = await cluster.get(SERVICE_ACCOUNTS, options.operator_namespace, options.service_account)
    return Settings(
        operator_subject=f"system:serviceaccount:{options.operator_namespace}:{options.service_account}",
        operator_uid=account["metadata"]["uid"],
        router_image=options.router_image,
        host_path_allowed=options.allow_host_path,
    )


def _raise_file_limit() -> None:
    """Two connections to each engine: the usual soft limit of 1,024 files is too low for a large fleet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
