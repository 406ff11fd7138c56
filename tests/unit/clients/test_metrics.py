"""Gauges over what is known at the time of the scrape."""

from prometheus_client import generate_latest

from rollfleet_operator.api.meta import Condition, ConditionStatus
from rollfleet_operator.api.rolloutengine import Committed, EnginesSummary, RolloutEngine, RolloutEngineStatus
from rollfleet_operator.clients.metrics import FleetCollector, Metrics
from tests.support.objects import THEN


def make_fleet(name: str, status: RolloutEngineStatus) -> RolloutEngine:
    spec = {"replicas": 2, "image": "i", "model": {"path": "m", "servedName": "p"}, "volumes": {"model": {}}}
    made = RolloutEngine.model_validate({"metadata": {"name": name, "namespace": "rl"}, "spec": spec})
    return made.model_copy(update={"status": status})


def available(status: ConditionStatus, reason: str) -> Condition:
    return Condition(type="Available", status=status, reason=reason, last_transition_time=THEN)


def test_fleets_by_state_and_their_engines_vanish_with_them() -> None:
    metrics = Metrics()
    fleets: list[RolloutEngine] = []
    metrics.registry.register(FleetCollector(lambda: fleets, lambda: 3, lambda: 8, lambda: 5, lambda: True))
    serving = RolloutEngineStatus(
        replicas=2,
        ready_replicas=2,
        serving_replicas=1,
        committed=Committed(version=42, time=THEN),
        engines=EnginesSummary(counts={"Serving": 1, "CatchingUp": 1}),
        conditions=(available(ConditionStatus.TRUE, "Serving"),),
    )
    starting = RolloutEngineStatus(conditions=(available(ConditionStatus.FALSE, "Starting"),))
    fleets += [make_fleet("qwen", serving), make_fleet("other", starting)]
    text = generate_latest(metrics.registry).decode()
    for line in (
        "rollfleet_leader 1.0",
        "rollfleet_guard_calls_waiting 5.0",
        'rollfleet_fleets{state="Available"} 1.0',
        'rollfleet_fleets{state="Starting"} 1.0',
        'rollfleet_fleet_engines{name="qwen",namespace="rl",step="serving"} 1.0',
        'rollfleet_fleet_committed_version{name="qwen",namespace="rl"} 42.0',
        'rollfleet_fleet_engines_by_state{name="qwen",namespace="rl",state="CatchingUp"} 1.0',
        "rollfleet_queue_depth 3.0",
        "rollfleet_guards_followed 8.0",
    ):
        assert line in text.splitlines()
    fleets.clear()
    assert "qwen" not in generate_latest(metrics.registry).decode()


def test_calls_and_passes_are_counted() -> None:
    metrics = Metrics()
    metrics.kubernetes_call("get", "pods", "ok", 0.01)
    metrics.guard_call("open", "Unreachable", 3.0)
    metrics.reconcile("conflict", 0.1)
    metrics.update_phase("rl", "policy", "quiescing", 0.02)
    metrics.update_finished("rl", "policy", "Active")
    text = generate_latest(metrics.registry).decode()
    assert 'rollfleet_guard_call_seconds_count{command="open",outcome="Unreachable"} 1.0' in text
    assert 'rollfleet_reconcile_seconds_count{outcome="conflict"} 1.0' in text
    assert 'rollfleet_update_phase_seconds_sum{name="policy",namespace="rl",step="quiescing"} 0.02' in text
    assert 'rollfleet_updates_total{name="policy",namespace="rl",outcome="Active"} 1.0' in text
