"""What is spoilt in policies after a failure, in kept requests, and in what guards do by themselves."""

from dataclasses import replace
from typing import Any

from rollfleet_engine.guard import machine, orders
from rollfleet_engine.guard.states import Decision as GuardDecision
from rollfleet_engine.guard.states import GuardState
from rollfleet_engine.guard.turnstile import Turnstile
from rollfleet_operator.clients.errors import RollfleetError
from rollfleet_operator.core import (
    accept,
    catch_up,
    changing,
    ending,
    opening,
    plan,
    plan_weights,
    rolling,
    steps,
)
from rollfleet_operator.core.rolling import Roll
from rollfleet_operator.core.world import World
from rollfleet_protocol.commands import Arm
from rollfleet_protocol.state import WeightsState
from tests.model.operators import Operator
from tests.model.requests import Crowd
from tests.model.spoils import Patch, around, register

FOR_EVER_S = 1e9


def min_serving_is_not_counted(patch: Patch) -> None:
    """One engine that passes is enough."""
    patch.setattr(changing, "_needed", lambda _: 1)


def a_roll_closes_all(patch: Patch) -> None:
    """Nobody needs to serve while a fleet rolls."""
    around(patch, rolling, "roll_of", lambda call, given: call(given) and Roll(call(given).max_unavailable, 0))


def hold_restores(patch: Patch) -> None:
    """What a failed update touched is loaded again, whatever spec.onFailure says."""

    def build(call: Any, *args: Any) -> Any:
        found = call(*args)
        found.held = ""
        return found

    around(patch, plan, "build_catch_up", build)


def the_next_attempt_keeps_its_epoch(patch: Patch) -> None:
    """What the attempt before sent may still arrive."""

    def again(call: Any, update: Any, *rest: Any) -> Any:
        with patch.context() as inner:
            inner.setattr(ending, "next_epoch", lambda update: update.record.epoch)
            return call(update, *rest)

    around(patch, ending, "_try_again", again)


def a_retry_request_is_followed_again_and_again(patch: Patch) -> None:
    """Whether it was handled before is forgotten."""
    patch.setattr(plan_weights, "_retries", lambda update, _: update.weight_version.spec.retry_request != "")


def objects_are_known_by_name(patch: Patch) -> None:
    """A WeightVersion that was made again passes for the one that was deleted."""

    def is_committed(update: Any) -> bool:
        committed = update.record.committed
        return committed is not None and committed.version == update.version

    def finished(update: Any, version: int) -> Any:
        last = update.record.last_finished
        return last if last is not None and last.version == version else None

    def judge(call: Any, weight_version: Any, committed: Any) -> Any:
        same = committed is not None and committed.version == weight_version.spec.version
        return None if same else call(weight_version, committed)

    around(patch, accept, "_judge_version", judge)
    patch.setattr(plan_weights, "_is_committed", is_committed)
    patch.setattr(plan_weights, "finished", finished)
    patch.setattr(ending, "finished", finished)


def another_fleets_history_counts(patch: Patch) -> None:
    """A fleet that was made again is judged by what happened to the one before it."""
    patch.setattr(World, "is_of_this_fleet", lambda *_: True)


def odd_engines_are_let_in(patch: Patch) -> None:
    """Whoever the commit names as odd is opened as soon as nobody is there to contradict."""

    def let_in(joining: Any, engine: Any, state: Any) -> None:
        if engine.settled:
            steps.let_in(joining.epoch, engine, state, joining.work)

    patch.setattr(catch_up.CatchUp, "_let_in", let_in)
    patch.setattr(
        opening,
        "_belongs",
        lambda update, state: update.record.committed is not None and opening.holds(state, update.record.committed),
    )


def opening_waits_for_ever(patch: Patch) -> None:
    """An engine that does not answer after the commit keeps the update from its end."""
    patch.setattr(opening, "OPENING_S", FOR_EVER_S)


def acts_although_its_write_was_lost(patch: Patch) -> None:
    """The status write is no fence."""

    def write(call: Any, operator: Operator, *rest: Any) -> None:
        try:
            call(operator, *rest)
        except RollfleetError:
            return

    around(patch, Operator, "_write_fleet", write)


def an_armed_guard_reopens_on_silence(patch: Patch) -> None:
    """Arming changes nothing about the operator's silence."""

    def arm(command: Arm, state: GuardState, now: float, in_flight: int) -> GuardDecision:
        found: GuardDecision = original(command, state, now, in_flight)
        return replace(found, state=replace(found.state, silence_s=state.silence_s, reopen_at=state.reopen_at))

    original = orders._obey.registry[Arm]
    register(patch, Arm, arm)
    around(patch, machine, "_may_reopen_alone", lambda call, state: call(replace(state, armed=False)))


def a_failed_verification_is_forgiven(patch: Patch) -> None:
    """Caches that were not reset, a probe that was not answered: the guard calls the weights verified."""

    def fail(state: GuardState) -> GuardState:
        weights = state.weights.model_copy(update={"state": WeightsState.VERIFIED})
        return replace(state, weights=weights)

    patch.setattr(machine, "_fail_verify", fail)
    around(
        patch,
        changing,
        "_standing",
        lambda call, update, target, engine, state, step: (
            changing.Seat(target, engine, changing.Standing.DONE)
            if state.weights.state is WeightsState.VERIFIED and state.weights.version == update.version
            else call(update, target, engine, state, step)
        ),
    )
    patch.setattr(changing, "agree", lambda *_: frozenset())


# requests that are kept ---------------------------------------------------------------------------------------------


def kept_requests_compute_nothing_anew(patch: Patch) -> None:
    """The reset leaves them on the caches of the old weights."""

    def reset(crowd: Crowd) -> None:
        crowd.cached = crowd.held.resident

    patch.setattr(Crowd, "reset_caches", reset)


def spans_are_not_told(patch: Patch) -> None:
    """A kept answer calls itself one of its first version."""
    patch.setattr(Turnstile, "_cross", lambda *_: None)


def who_demands_a_version_is_kept(patch: Patch) -> None:
    """And answered by another one."""

    def keep(call: Any, turnstile: Turnstile, tokens: Any) -> None:
        for passage in turnstile._inside:
            passage.pinned = False
        call(turnstile, tokens)

    around(patch, Turnstile, "keep", keep)


def what_is_kept_is_heard_at_once(patch: Patch) -> None:
    """Answers go out as soon as the scheduler runs again, before the weights that make them are committed."""

    def taint(call: Any, turnstile: Turnstile) -> None:
        call(turnstile)
        for passage in turnstile._kept:
            passage.released = None

    around(patch, Turnstile, "taint_kept", taint)
