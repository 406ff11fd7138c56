"""What is spoilt in updates, guards and commits, one fault a function; see `mutations.py`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollfleet_engine.guard import machine, orders
from rollfleet_engine.guard.states import Decision as GuardDecision
from rollfleet_engine.guard.states import GuardState, OperationRecord
from rollfleet_operator.core import (
    accept,
    catch_up,
    changing,
    commit,
    plan,
    plan_weights,
    quiescing,
    references,
    vanished,
    world,
)
from rollfleet_operator.core.actions import LabelPod
from rollfleet_operator.core.policies import Deadline
from rollfleet_protocol.commands import Open, Transfer
from rollfleet_protocol.state import OperationName, Transferred, WeightsState
from tests.model import operators
from tests.model.api_server import ApiServer

Patch = pytest.MonkeyPatch


def around(patch: Patch, holder: Any, name: str, wrap: Callable[..., Any]) -> None:
    original = getattr(holder, name)
    patch.setattr(holder, name, lambda *args, **named: wrap(original, *args, **named))


def no_arming(patch: Patch) -> None:
    patch.setattr(quiescing, "_arm_all", lambda *_: [])
    around(
        patch,
        orders,
        "_transfer_obstacle",
        lambda call, command, state, in_flight: call(command, replace(state, armed=True), in_flight),
    )


def register(patch: Patch, command: type, obey: Callable[..., GuardDecision]) -> None:
    before = orders._obey.registry
    patch.setattr(
        orders, "_obey", lambda given, *rest: (obey if type(given) is command else before[type(given)])(given, *rest)
    )


def fence(patch: Patch, is_held: Callable[[world.Engine], bool]) -> None:
    around(
        patch,
        world.Engine,
        "fence",
        lambda call, engine, epoch: world.Fence.HELD if is_held(engine) else call(engine, epoch),
    )


def silence_is_a_fence(patch: Patch) -> None:
    fence(patch, lambda engine: engine.answering is None)


def label_instead_of_fence(patch: Patch) -> None:
    """What does not answer loses its label, and counts as out of the way."""
    fence(patch, lambda engine: engine.answering is None and not engine.pod.serving_label)
    around(
        patch,
        plan,
        "plan_labels",
        lambda call, seen, committed, **named: (
            *call(seen, committed, **named),
            *(
                plan_label(engine)
                for engine in seen.engines
                if engine.answering is None and engine.pod.serving_label and not engine.pod.vanished
            ),
        ),
    )


def plan_label(engine: world.Engine) -> LabelPod:
    """Take it away."""
    return LabelPod(engine.name, engine.pod.uid, serving=False)


def readiness_is_a_fence(patch: Patch) -> None:
    fence(patch, lambda engine: not engine.pod.ready)


def deletion_is_a_fence(patch: Patch) -> None:
    fence(patch, lambda engine: engine.pod.deleting)


def vanished_pods_are_forgotten(patch: Patch) -> None:
    patch.setattr(vanished, "vanished", lambda *_: ())
    patch.setattr(operators, "vanished", lambda *_: ())


def transfer_before_all_are_closed(patch: Patch) -> None:
    around(patch, quiescing, "_close_all", lambda call, *args: (call(*args), [])[1])
    around(patch, quiescing, "_arm_all", lambda call, *args: (call(*args), [])[1])


def commit_before_probe(patch: Patch) -> None:
    def standing(call: Any, update: Any, target: Any, engine: Any, state: Any, step: OperationName) -> Any:
        if step is OperationName.VERIFY and state.weights.state is WeightsState.LOADED:
            return changing.Seat(target, engine, changing.Standing.DONE)
        return call(update, target, engine, state, step)

    around(patch, changing, "_standing", standing)
    patch.setattr(changing, "agree", lambda *_: frozenset())


def probes_are_not_compared(patch: Patch) -> None:
    patch.setattr(changing, "agree", lambda *_: frozenset())
    patch.setattr(references, "compare", lambda *_: "")


def open_before_the_commit(patch: Patch) -> None:
    def verify_all(call: Any, update: Any, seats: Any, seconds: float) -> None:
        call(update, seats, seconds)
        for seat in seats:
            if seat.standing is changing.Standing.DONE and seat.engine is not None and seat.engine.state is not None:
                state = seat.engine.state
                given = {"incarnation": state.incarnation, "epoch": update.epoch}
                update.work.give(seat.engine, Open(version=update.version, digest=state.weights.digest, **given))

    around(patch, changing, "_verify_all", verify_all)


def open_without_verified(patch: Patch) -> None:
    """Neither the guard nor the core asks for more than Loaded."""

    def loaded_will_do(call: Any, state: Any, committed: Any) -> bool:
        weights = state.weights
        if weights.state is WeightsState.LOADED:
            state = state.model_copy(update={"weights": weights.model_copy(update={"state": WeightsState.VERIFIED})})
        return bool(call(state, committed))

    def obey(command: Open, state: GuardState, now: float, in_flight: int) -> GuardDecision:
        if state.weights.state is WeightsState.LOADED and state.running is None and not state.draining:
            return GuardDecision(orders.opened(replace(state, paused=False)))
        return original(command, state, now, in_flight)

    original = orders._obey.registry[Open]
    register(patch, Open, obey)
    original_holds = world.holds
    for module in (world, catch_up, plan_weights):
        patch.setattr(module, "holds", lambda state, committed: loaded_will_do(original_holds, state, committed))
    patch.setattr(catch_up.steps, "let_in", open_at_once)


def open_at_once(epoch: int, engine: world.Engine, state: Any, work: Any) -> None:
    version, digest = state.weights.version or 0, state.weights.digest
    work.give(engine, Open(incarnation=state.incarnation, epoch=epoch, version=version, digest=digest))


def joiners_are_opened_as_they_are(patch: Patch) -> None:
    """Verified once, at whatever version, is good enough."""
    patch.setattr(
        catch_up,
        "holds",
        lambda state, committed: state.weights.state is WeightsState.VERIFIED and committed is not None,
    )


def joiners_go_on_in_an_update(patch: Patch) -> None:
    def lead(call: Any, seen: Any, before: Any, update: Any, *rest: Any) -> Any:
        epoch = before.epoch if update.catch_up_epoch is None else update.catch_up_epoch
        return call(seen, before, replace(update, catch_up_epoch=epoch), *rest)

    around(patch, plan, "_catch_up", lead)


def epochs_are_not_compared(patch: Patch) -> None:
    def obey(call: Any, state: GuardState, command: Any, *rest: Any) -> Any:
        return call(replace(state, epoch=min(state.epoch, command.epoch)), command, *rest)

    around(patch, machine, "obey", obey)


def the_digest_is_not_compared(patch: Patch) -> None:
    patch.setattr(machine, "_transfer_fault", lambda *_: None)

    def succeed(call: Any, state: GuardState, ended: OperationRecord, result: Any) -> GuardState:
        if isinstance(result, Transferred) and isinstance(ended.command, Transfer):
            result = result.model_copy(update={"digest": ended.command.digest})
        found: GuardState = call(state, ended, result)
        return found

    around(patch, machine, "_succeed", succeed)


def writes_without_resource_version(patch: Patch) -> None:
    around(
        patch,
        ApiServer,
        "replace_fleet_status",
        lambda call, api, version, status: call(api, api.fleet_version, status),
    )


def deadlines_are_ignored(patch: Patch) -> None:
    patch.setattr(Deadline, "passed", lambda *_: False)


def the_committed_version_may_fall(patch: Patch) -> None:
    patch.setattr(accept, "_judge_version", lambda *_: None)


def a_lost_record_is_a_new_fleet(patch: Patch) -> None:
    patch.setattr(commit, "_is_new", lambda *_: True)


def silence_reopens_nothing(patch: Patch) -> None:
    patch.setattr(machine, "_may_reopen_alone", lambda *_: False)


def failed_transfers_touch_nothing(patch: Patch) -> None:
    """A transfer that broke half-way gives back what was held before."""
    around(
        patch,
        machine,
        "_fail_transfer",
        lambda call, state, running, *, touched: (
            replace(state, weights=state.weights_before, weights_before=None)
            if state.weights_before is not None
            else call(state, running, touched=touched)
        ),
    )
