"""A pass over a large fleet takes time in proportion to its engines, whatever is wrong with all of them at once.

Counted is how often engines are looked at, since clocks of test machines prove nothing.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from rollfleet_operator.api.rolloutengine import RolloutEngine, RolloutEngineStatus
from rollfleet_operator.core.objects.pod import template_hash
from rollfleet_operator.core.observed import ContainerState, GuardView, Observed
from rollfleet_operator.core.plan import plan
from rollfleet_operator.core.world import Engine
from rollfleet_protocol.state import EngineState
from tests.support.builders import (
    NOW,
    make_committed,
    make_fleet,
    make_guard,
    make_observed,
    make_pod,
    make_probe,
    make_settings,
    make_state,
    make_weight_version,
)

TEMPLATE = template_hash(make_fleet(), make_settings())
LOOKS = 40  # at each engine, in one pass


def crashed(count: int) -> Observed:
    """All of them too often: a volume is away."""
    down = {"container": ContainerState.WAITING, "exit_code": 1, "restarts": 20, "started": False, "failed_from": NOW}
    pods = tuple(make_pod(n, template_hash=TEMPLATE, **down) for n in range(count))
    guards = {pod.uid: GuardView(None, reachable=False, last_contact=None, error="refused") for pod in pods}
    return make_observed(_fleet(count), pods=pods, guards=guards)


def odd(count: int) -> Observed:
    """They all serve, each answers the probe in its own way, and one wants to be let in."""
    return make_observed(_fleet(count), guards={f"pod-{n}": make_guard(_odd_state(n)) for n in range(count)})


def bumped(count: int) -> Observed:
    """All is well, and another version is asked for."""
    return replace(odd(count), weight_versions=(make_weight_version(2),))


def _odd_state(number: int) -> EngineState:
    probe = make_probe(1, logprobs=(-1.0, -2.0, -0.5, -3.0, -float(number)))
    return make_state(1, epoch=2, incarnation=f"inc-{number}", open=number > 0, probe=probe)


def _fleet(count: int) -> RolloutEngine:
    status = RolloutEngineStatus(epoch=2, committed=make_committed(1), proven_template=TEMPLATE)
    return make_fleet(replicas=count, status=status)


@pytest.mark.parametrize("scene", [crashed, odd, bumped])
def test_a_pass_looks_at_each_engine_a_few_times(
    scene: Callable[[int], Observed], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, answering = [0], Engine.answering.fget

    def look(engine: Engine) -> EngineState | None:
        looks[0] += 1
        return answering(engine)  # type: ignore[misc]

    monkeypatch.setattr(Engine, "answering", property(look))
    count = 300
    observed = scene(count)
    plan(observed, NOW)
    assert looks[0] <= LOOKS * count
