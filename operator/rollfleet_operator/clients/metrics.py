"""Prometheus metrics of the operator.

Labels never carry a pod's uid or a version; gauges are read at scrape, so that gone fleets vanish.
"""

from collections import Counter as Tally
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollfleet_operator.api.meta import ConditionStatus
from rollfleet_operator.api.rolloutengine import RolloutEngine

FAST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SLOW_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """Keeps ports.Meter on a registry of its own, so that several operators fit into one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._kubernetes = Histogram(
            "rollfleet_kubernetes_request_seconds", "Requests to the API server.", ("verb", "resource", "outcome"),
            buckets=FAST_S, registry=self.registry,
        )  # fmt: skip
        self._guard = Histogram(
            "rollfleet_guard_call_seconds",
            "Commands to guards.",
            ("command", "outcome"),
            buckets=FAST_S,
            registry=self.registry,
        )
        self._reconcile = Histogram(
            "rollfleet_reconcile_seconds",
            "Passes over one fleet.",
            ("outcome",),
            buckets=FAST_S,
            registry=self.registry,
        )
        self._phase = Histogram(
            "rollfleet_update_phase_seconds", "Phases of updates that ended.", ("namespace", "name", "step"),
            buckets=SLOW_S, registry=self.registry,
        )  # fmt: skip
        self._updates = Counter(
            "rollfleet_updates_total", "Updates that ended.", ("namespace", "name", "outcome"), registry=self.registry
        )

    def kubernetes_call(self, verb: str, resource: str, outcome: str, seconds: float) -> None:
        """One request to the API server."""
        self._kubernetes.labels(verb, resource, outcome).observe(seconds)

    def guard_call(self, command: str, outcome: str, seconds: float) -> None:
        """One command to a guard."""
        self._guard.labels(command, outcome).observe(seconds)

    def reconcile(self, outcome: str, seconds: float) -> None:
        """One pass."""
        self._reconcile.labels(outcome).observe(seconds)

    def update_phase(self, namespace: str, name: str, step: str, seconds: float) -> None:
        """A phase of an update that ended."""
        self._phase.labels(namespace, name, step).observe(seconds)

    def update_finished(self, namespace: str, name: str, outcome: str) -> None:
        """An update that ended."""
        self._updates.labels(namespace, name, outcome).inc()


class FleetCollector(Collector):
    """Gauges over the fleets that are known at the time of the scrape."""

    def __init__(
        self,
        fleets: Callable[[], Iterable[RolloutEngine]],
        queue_depth: Callable[[], int],
        guards: Callable[[], int],
        calls_waiting: Callable[[], int],
        leads: Callable[[], bool],
    ) -> None:
        self._fleets = fleets
        self._queue_depth = queue_depth
        self._guards = guards
        self._calls_waiting = calls_waiting
        self._leads = leads

    def collect(self) -> Iterable[Metric]:
        """All gauges."""
        fleets = list(self._fleets())
        yield GaugeMetricFamily("rollfleet_queue_depth", "Fleets that wait for a pass.", value=self._queue_depth())
        yield GaugeMetricFamily("rollfleet_guards_followed", "Engines whose guard is followed.", value=self._guards())
        yield GaugeMetricFamily(
            "rollfleet_guard_calls_waiting", "Calls to guards that wait for their turn.", value=self._calls_waiting()
        )
        yield GaugeMetricFamily("rollfleet_leader", "Whether this process acts.", value=int(self._leads()))
        yield from (self._by_state(fleets), self._replicas(fleets), self._committed(fleets), self._engines(fleets))

    def _by_state(self, fleets: list[RolloutEngine]) -> Metric:
        family = GaugeMetricFamily("rollfleet_fleets", "Fleets by state.", labels=("state",))
        for state, count in sorted(Tally(fleet_state(fleet) for fleet in fleets).items()):
            family.add_metric((state,), count)
        return family

    def _replicas(self, fleets: list[RolloutEngine]) -> Metric:
        family = GaugeMetricFamily(
            "rollfleet_fleet_engines", "Engines of a fleet.", labels=("namespace", "name", "step")
        )
        for fleet in fleets:
            counts = {
                "desired": fleet.spec.replicas,
                "pods": fleet.status.replicas,
                "ready": fleet.status.ready_replicas,
                "serving": fleet.status.serving_replicas,
            }
            for step, count in counts.items():
                family.add_metric((fleet.metadata.namespace, fleet.metadata.name, step), count)
        return family

    def _committed(self, fleets: list[RolloutEngine]) -> Metric:
        family = GaugeMetricFamily(
            "rollfleet_fleet_committed_version",
            "Version of the weights that a fleet serves.",
            labels=("namespace", "name"),
        )
        for fleet in fleets:
            if fleet.status.committed is not None:
                family.add_metric((fleet.metadata.namespace, fleet.metadata.name), fleet.status.committed.version)
        return family

    def _engines(self, fleets: list[RolloutEngine]) -> Metric:
        family = GaugeMetricFamily(
            "rollfleet_fleet_engines_by_state", "Engines of a fleet by state.", labels=("namespace", "name", "state")
        )
        for fleet in fleets:
            for state, count in fleet.status.engines.counts.items():
                family.add_metric((fleet.metadata.namespace, fleet.metadata.name, state), count)
        return family


def fleet_state(fleet: RolloutEngine) -> str:
    """One word: Available, or the reason why not."""
    for condition in fleet.status.conditions:
        if condition.type == "Available":
            return "Available" if condition.status is ConditionStatus.TRUE else condition.reason
    return "New"
