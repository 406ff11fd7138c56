"""Which command is refused where, and with which word about the right order."""

import pytest

from rollfleet_engine.guard.service import RejectedError
from rollfleet_protocol.refusals import RefusalReason
from rollfleet_protocol.state import FailureReason, Gate, WeightsState
from tests.support.guards import Guarded
from tests.support.memory_engine import digest_of

STEPS = ("verify", "open", "prepare", "close", "arm", "transfer", "reverify", "reopen")


async def lead(guarded: Guarded, until: str) -> None:
    """Version 0 to version 1, up to and with this step."""
    for step in STEPS[: STEPS.index(until) + 1]:
        await {
            "verify": lambda: guarded.verify(1, 0),
            "open": lambda: guarded.open(1, 0),
            "prepare": lambda: guarded.prepare(2, 1),
            "close": lambda: guarded.close(2, 1),
            "arm": lambda: guarded.arm(2),
            "transfer": lambda: guarded.transfer(2, 1),
            "reverify": lambda: guarded.verify(2, 1),
            "reopen": lambda: guarded.open(2, 1),
        }[step]()


REFUSED = [
    # after, command, reason, what the message must say
    ("verify", "arm 2", RefusalReason.ORDER_VIOLATION, "Close comes before Arm"),
    ("verify", "open 1", RefusalReason.NOT_VERIFIED, "verify version 1"),
    ("verify", "transfer 1", RefusalReason.ORDER_VIOLATION, "Prepare first"),
    ("open", "arm 2", RefusalReason.ORDER_VIOLATION, "Close comes before Arm"),
    ("open", "verify 0", RefusalReason.ORDER_VIOLATION, "Close comes before Verify"),
    ("open", "open 1", RefusalReason.NOT_VERIFIED, "version 0"),
    ("prepare", "transfer 1", RefusalReason.ORDER_VIOLATION, "not quiesced"),
    ("close", "transfer 1", RefusalReason.ORDER_VIOLATION, "Arm comes before Transfer"),
    ("close", "open 0", RefusalReason.ORDER_VIOLATION, "paused"),
    ("arm", "transfer 2", RefusalReason.ORDER_VIOLATION, "version 2 is not staged"),
    ("arm", "transfer wrong", RefusalReason.ORDER_VIOLATION, digest_of("step-1")),
    ("arm", "verify 1", RefusalReason.ORDER_VIOLATION, "version 0"),
    ("transfer", "open 1", RefusalReason.NOT_VERIFIED, "Loaded version 1"),
    ("transfer", "open 0", RefusalReason.NOT_VERIFIED, "Loaded version 1"),
    ("transfer", "verify 2", RefusalReason.ORDER_VIOLATION, "not version 2"),
    ("transfer", "cancel", RefusalReason.ORDER_VIOLATION, "Loaded"),
    ("reverify", "open 0", RefusalReason.NOT_VERIFIED, "version 1"),
]


@pytest.mark.parametrize(("after", "command", "reason", "text"), REFUSED)
async def test_out_of_order(guarded: Guarded, after: str, command: str, reason: RefusalReason, text: str) -> None:
    await lead(guarded, after)
    before = guarded.state
    name, _, argument = command.partition(" ")
    epoch = max(2, before.epoch)
    calls = {
        "arm": lambda: guarded.arm(epoch),
        "open": lambda: guarded.open(epoch, int(argument)),
        "verify": lambda: guarded.verify(epoch, int(argument)),
        "cancel": lambda: guarded.cancel(epoch),
        "transfer": lambda: (
            guarded.transfer(epoch, 1, path="wrong") if argument == "wrong" else guarded.transfer(epoch, int(argument))
        ),
    }
    with pytest.raises(RejectedError) as refused:
        await calls[name]()
    assert refused.value.rejection.reason is reason
    assert text in refused.value.rejection.message
    state = guarded.state
    assert (state.gate, state.weights, state.paused) == (before.gate, before.weights, before.paused)


@pytest.mark.parametrize("after", STEPS)
async def test_each_step_may_be_repeated(guarded: Guarded, after: str) -> None:
    await lead(guarded, after)
    calls, sequence = guarded.engine.calls.copy(), guarded.state.sequence
    repeat = {
        "verify": lambda: guarded.verify(1, 0),
        "open": lambda: guarded.open(1, 0),
        "prepare": lambda: guarded.prepare(2, 1),
        "close": lambda: guarded.close(2, 1),
        "arm": lambda: guarded.arm(2),
        "transfer": lambda: guarded.transfer(2, 1),
        "reverify": lambda: guarded.verify(2, 1),
        "reopen": lambda: guarded.open(2, 1),
    }[after]
    await repeat()
    assert guarded.engine.calls == calls
    assert guarded.state.sequence == sequence
    assert guarded.stager.started <= 1


async def test_a_checkpoint_that_must_have_another_digest_is_not_staged(guarded: Guarded) -> None:
    await lead(guarded, "open")
    state = await guarded.prepare(2, 1, digest="sha256:committed")
    assert state.staged is None
    assert state.operation is not None
    assert state.operation.failure is not None
    assert state.operation.failure.reason is FailureReason.CHECKPOINT_CHANGED
    assert f"'step-1' now has digest {digest_of('step-1')}, committed was sha256:committed" in (
        state.operation.failure.message
    )
    assert (await guarded.prepare(2, 1, digest=digest_of("step-1"))).staged is not None


async def test_a_late_copy_of_close_does_not_pause_what_is_loaded(guarded: Guarded) -> None:
    await lead(guarded, "reverify")
    await guarded.close(2, 1)
    assert not guarded.state.paused
    assert (await guarded.open(2, 1)).gate is Gate.OPEN


async def test_a_late_copy_of_close_does_not_close_what_was_opened(guarded: Guarded) -> None:
    await lead(guarded, "reopen")
    calls = guarded.engine.calls.copy()
    state = await guarded.service.command(guarded.close_command(2, 1))
    assert (state.gate, state.paused, state.weights.version) == (Gate.OPEN, False, 1)
    assert guarded.engine.calls == calls
    await guarded.prepare(3, 2)
    assert (await guarded.close(3, 2)).gate is Gate.CLOSED  # the next update's own Close counts


async def test_after_an_update_the_next_epoch_may_start_from_any_step(guarded: Guarded) -> None:
    await lead(guarded, "transfer")
    state = await guarded.prepare(3, 2)
    assert state.weights.state is WeightsState.LOADED
    assert not state.armed
    await guarded.close(3, 2)
    await guarded.arm(3)
    await guarded.transfer(3, 2)
    await guarded.verify(3, 2)
    assert (await guarded.open(3, 2)).weights.version == 2
    assert guarded.engine.calls["resume"] == 1


async def test_initial_weights_are_version_0_only(guarded: Guarded) -> None:
    with pytest.raises(RejectedError, match="version 0"):
        await guarded.verify(1, 1)
    with pytest.raises(RejectedError, match="without digest"):
        await guarded.verify(1, 0, "sha256:x")


async def test_closing_an_engine_that_never_served_opens_nothing_by_cancel(guarded: Guarded) -> None:
    await guarded.close(1, 0)
    assert guarded.state.paused
    state = await guarded.cancel(1)
    assert (state.gate, state.paused, state.closed_reason) == (Gate.CLOSED, False, "Starting")
