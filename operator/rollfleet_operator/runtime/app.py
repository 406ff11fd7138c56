"""The operator's process: checks, wiring, start and stop."""

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio.client.configuration import Configuration

from rollfleet_operator.clients.certificates import Certificates
from rollfleet_operator.clients.errors import InvalidSpec, Retryable, RollfleetError
from rollfleet_operator.clients.events import WRITERS, Recorder
from rollfleet_operator.clients.fence import FencedCluster
from rollfleet_operator.clients.followers import Followers
from rollfleet_operator.clients.guards import GuardClient
from rollfleet_operator.clients.kubernetes import KubernetesCluster, load_configuration
from rollfleet_operator.clients.metrics import FleetCollector, Metrics
from rollfleet_operator.clients.tokens import Tokens
from rollfleet_operator.core.observed import Settings
from rollfleet_operator.core.plan import plan, plan_orphan
from rollfleet_operator.ports import SERVICE_ACCOUNTS, Cluster
from rollfleet_operator.runtime.apply import Applier
from rollfleet_operator.runtime.election import Alone, Election, Leadership
from rollfleet_operator.runtime.health import serving
from rollfleet_operator.runtime.intake import Intake, build_registry, kopf_settings
from rollfleet_operator.runtime.observe import Observer
from rollfleet_operator.runtime.options import Options
from rollfleet_operator.runtime.permissions import missing_kinds, missing_permissions
from rollfleet_operator.runtime.queue import KeyedQueue
from rollfleet_operator.runtime.reconcile import Reconciler
from rollfleet_operator.runtime.records import Records
from rollfleet_operator.runtime.resync import Resync
from rollfleet_operator.runtime.term import Term
from rollfleet_operator.runtime.uptime import Uptime
from rollfleet_operator.runtime.watchdog import Watchdog
from rollfleet_operator.runtime.watches import Watches

logger = logging.getLogger(__name__)

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

    records: Records
    resync: Resync
    watches: Watches
    watchdog: Watchdog
    recorder: Recorder
    leadership: Leadership
    term: Term


@dataclass
class _Life:
    """What the health server tells, from the first moment on."""

    operator: _Operator | None = None
    is_ready: bool = False

    def problems(self) -> list[str]:
        """Why the process should be restarted; waiting for CRDs, RBAC or the Lease is no reason."""
        if self.operator is None:
            return []
        return self.operator.watchdog.problems(self.operator.records.queue.longest_pass_s())


async def run(options: Options, clock: Callable[[], datetime] = utc_now) -> None:
    """Run until SIGTERM or SIGINT, or until a part dies."""
    _raise_file_limit()
    stopping = asyncio.Event()
    _take_signals(stopping)
    metrics = Metrics()
    configuration = await load_configuration(options.kubeconfig)
    async with AsyncExitStack() as stack:
        life = _Life()
        host, port = options.listen_host, options.listen_port
        await stack.enter_async_context(serving(host, port, metrics.registry, life.problems, lambda: life.is_ready))
        cluster = KubernetesCluster(configuration, metrics)
        stack.push_async_callback(cluster.close)
        if await _stopped(stopping, _until(lambda: _check(cluster, options))):
            return
        settings = await _settings(cluster, options)
        life.operator = await _wire(stack, configuration, cluster, metrics, options, settings, clock, stopping)
        await _operate(life.operator, life, options, stopping)


async def _wire(
    stack: AsyncExitStack,
    configuration: Configuration,
    cluster: KubernetesCluster,
    metrics: Metrics,
    options: Options,
    settings: Settings,
    clock: Callable[[], datetime],
    stopping: asyncio.Event,
) -> _Operator:
    leadership = _leadership(stack, configuration, metrics, options, clock)
    fenced = FencedCluster(cluster, leadership.leads)
    guards = await _guards(stack, cluster, metrics, options, clock, leadership.leads)
    certificates = Certificates(fenced, options.operator_namespace, clock, guards.trust)
    queue = KeyedQueue()
    stack.callback(queue.close)
    followers = Followers(guards, queue.put, clock)
    stack.push_async_callback(followers.close)
    records, uptime = Records(queue, followers), Uptime(clock)
    queue.stop()  # until this process leads
    watchdog = Watchdog(records.ledger, max(options.resync_s, SHORTEST_LIST_AGE_S) * LISTS_MISSED)
    recorder = Recorder(cluster, socket.gethostname(), clock)
    intake = Intake(records)
    watches = Watches(
        lambda: build_registry(intake, configuration),
        kopf_settings,
        options.namespaces,
        lambda: _take_signals(stopping),
    )
    namespaces: tuple[str | None, ...] = options.namespaces or (None,)
    resync = Resync(cluster, records, certificates, watchdog, uptime, namespaces, options.resync_s, watches.start_anew)

    def make_reconciler() -> Reconciler:
        observer = Observer(fenced, certificates, records, settings, uptime)
        applier = Applier(fenced, recorder, records, metrics)
        return Reconciler(observer, applier, plan, plan_orphan, records, metrics, clock, options.name)

    term = Term(records, resync, uptime, make_reconciler)
    metrics.registry.register(
        FleetCollector(records.fleets.all, queue.depth, followers.count, guards.waiting, leadership.leads)
    )
    return _Operator(records, resync, watches, watchdog, recorder, leadership, term)


async def _guards(
    stack: AsyncExitStack,
    cluster: KubernetesCluster,
    metrics: Metrics,
    options: Options,
    clock: Callable[[], datetime],
    leads: Callable[[], bool],
) -> GuardClient:
    tokens = Tokens(cluster, options.operator_namespace, options.service_account, clock)
    stack.push_async_callback(tokens.close)
    authority = await Certificates(cluster, options.operator_namespace, clock).authority()
    guards = GuardClient(authority.trusted, tokens, metrics, leads)
    stack.push_async_callback(guards.close)
    return guards


def _leadership(
    stack: AsyncExitStack,
    configuration: Configuration,
    metrics: Metrics,
    options: Options,
    clock: Callable[[], datetime],
) -> Leadership:
    """An election has connections of its own: a renewal must not wait behind a thousand pods."""
    if not options.lease:
        return Alone()
    cluster = KubernetesCluster(configuration, metrics)
    stack.push_async_callback(cluster.close)
    return Election(cluster, options.operator_namespace, options.lease, options.identity, clock)


async def _operate(operator: _Operator, life: _Life, options: Options, stopping: asyncio.Event) -> None:
    """First the lists, then the watches; then this process is ready to lead, and leads when it may."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(operator.watchdog.beat(), name="heartbeat")]
    tasks += [asyncio.create_task(operator.recorder.run(), name=f"recorder {n}") for n in range(WRITERS)]
    tasks.append(asyncio.create_task(stopping.wait(), name="stop"))
    try:
        if not await _stopped(stopping, operator.resync.until_done()):
            tasks.append(asyncio.create_task(operator.watches.run(), name="watches"))
            tasks.append(asyncio.create_task(operator.resync.run(), name="resync"))
            leading = asyncio.create_task(operator.leadership.run(operator.term.lead), name="leadership")
            life.is_ready = True
            logger.info("operating", extra={"fields": {"namespaces": list(options.namespaces) or "all"}})
            await _until_stopped(operator, life, tasks, leading)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    _raise_first(ended)
    logger.info("stopped")


async def _until_stopped(
    operator: _Operator, life: _Life, tasks: list[asyncio.Task[Any]], leading: asyncio.Task[None]
) -> None:
    """Until a task ends. Then what acts ends first, and the Lease is given back."""
    try:
        await asyncio.wait({*tasks, leading}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        life.is_ready = False
        leading.cancel()
        _, still_leading = await asyncio.wait({leading}, timeout=STOP_S)
        if still_leading:
            logger.error("what this process does does not end within %g s", STOP_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await operator.recorder.drain()
    if not leading.cancelled() and leading.done():
        await leading


async def _stopped(stopping: asyncio.Event, step: Coroutine[Any, Any, None]) -> bool:
    """Do a step unless the process is told to stop meanwhile; whether it was."""
    doing, stop = asyncio.create_task(step), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((doing, stop), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
        if not doing.done():
            doing.cancel()
        await asyncio.gather(doing, stop, return_exceptions=True)
    if doing.cancelled():
        return True
    await doing
    return stopping.is_set()


def _take_signals(stopping: asyncio.Event) -> None:
    """SIGTERM and SIGINT ask for an orderly end. kopf takes them too, at each of its starts."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)


def _raise_first(ended: list[Any]) -> None:
    for result in ended:
        if isinstance(result, Exception):
            raise result


async def _check(cluster: Cluster, options: Options) -> None:
    """Raise NotReady, naming all that is missing."""
    missing = await missing_kinds(cluster)
    namespaces: tuple[str | None, ...] = options.namespaces or (None,)
    lacking = await missing_permissions(
        cluster, namespaces, options.operator_namespace, options.service_account, options.lease
    )
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
        operator_namespace=options.operator_namespace,
        operator_pods=options.operator_pods,
    )


def _raise_file_limit() -> None:
    """Two connections to each engine: the usual soft limit of 1,024 files is too low for a large fleet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
