"""What is spoilt in what is known of pods, nodes and operators."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from rollfleet_operator.core import vanished, world
from rollfleet_operator.core.observed import ENDED_PHASES, PodView
from rollfleet_operator.core.policies import KUBELET_S
from rollfleet_protocol.refusals import ClosedReason
from rollfleet_protocol.state import EngineState, Gate
from tests.model import operators
from tests.model.leases import Candidate
from tests.model.spoils import Patch, around
from tests.model.watching import PodWatch


def vanished_pods_go_under_the_epoch_that_they_know(patch: Patch) -> None:
    """What was on its way when they vanished opens them later."""

    def is_over(call: Any, engine: Any, *rest: Any) -> bool:
        pod = replace(engine.pod, vanished_epoch=engine.pod.vanished_epoch - 1)
        return bool(call(replace(engine, pod=pod), *rest))

    around(patch, vanished, "is_over", is_over)


def who_drains_counts_as_drained(patch: Patch) -> None:
    """Requests in flight are not waited for."""

    def drains(state: EngineState) -> bool:
        return state.gate is Gate.CLOSED and state.closed_reason == ClosedReason.DRAINING.value

    patch.setattr(world, "drained", drains)
    around(
        patch,
        world.Engine,
        "fence",
        lambda call, engine, epoch: (
            world.Fence.HELD if engine.answering is not None and drains(engine.answering) else call(engine, epoch)
        ),
    )


def a_node_needs_not_be_ready(patch: Patch) -> None:
    """The kubelet's time counts from when the pod vanished, also where its node was away meanwhile."""

    def due(engine: Any) -> Any:
        since = engine.pod.vanished_since
        if since is None or engine.node is None:
            return None
        return since + timedelta(seconds=KUBELET_S + engine.pod.grace_s)

    patch.setattr(vanished, "kubelet_due", due)


def a_kubelet_needs_not_report(patch: Patch) -> None:
    """A node that nobody judges is believed to be Ready."""

    def had(engine: Any, now: Any) -> bool:
        due = vanished.kubelet_due(engine)
        return due is not None and now >= due

    patch.setattr(vanished, "_has_had_its_time", had)


def a_node_that_is_not_ready_is_off(patch: Patch) -> None:
    """No taint is needed."""
    patch.setattr(
        world.Engine, "node_off", property(lambda engine: engine.node is not None and engine.node.ready_since is None)
    )


def phase_failed_is_the_end(patch: Patch) -> None:
    """Also of a container that is called running."""
    patch.setattr(PodView, "ended", property(lambda pod: pod.phase in ENDED_PHASES))


def whoever_has_the_address_speaks(patch: Patch) -> None:
    """Another engine's word passes for that of one that vanished."""
    patch.setattr(world, "_guard", lambda observed, pod, _: observed.guards.get(pod.uid))
    patch.setattr(operators, "to_follow", lambda pods, members: (*pods, *members))


def no_list_is_awaited(patch: Patch) -> None:
    """A new process acts on what its watch has told so far, which is nothing."""

    def begin(watch: PodWatch) -> None:
        watch.listed = True

    patch.setattr(PodWatch, "list", begin)


def no_template_is_proven(patch: Patch) -> None:
    """Engines that served are stopped for a cause that all share."""
    around(patch, vanished, "remember", lambda call, *args: replace(call(*args), proven_template=""))
    from rollfleet_operator.core import plan  # noqa: PLC0415 - where it is used

    patch.setattr(plan, "remember", vanished.remember)


def a_lost_lease_ends_nothing(patch: Patch) -> None:
    """Who led goes on leading."""
    patch.setattr(Candidate, "leads", lambda candidate: candidate.in_term)
    patch.setattr(Candidate, "_end", lambda _: None)
