"""Commands out of order, of another incarnation or of an older epoch change nothing and say what comes first."""

import pytest

from rollfleet_engine.guard.control import COMMANDS
from rollfleet_protocol.refusals import RefusalReason
from rollfleet_protocol.state import Gate, OperationStatus, WeightsState
from tests.contract.client import PROBE_TOKENS, Client, Operator, held, operation_of
from tests.contract.models import Models

VERIFY = {"probeTokens": PROBE_TOKENS, "deadlineSeconds": 30}
ORDER = (409, RefusalReason.ORDER_VIOLATION)


def _unchanged(operator: Operator, before: object) -> None:
    state = operator.state()
    told = ("gate", "armed", "paused", "weights", "staged", "in_flight", "ready")
    assert all(getattr(state, name) == getattr(before, name) for name in told)


def test_an_open_engine_is_not_armed_transferred_or_verified(serving: Operator, client: Client, models: Models):
    before, epoch, digest = serving.state(), serving.next_epoch(), models.digest(2)
    assert serving.refused("arm", epoch)[:2] == ORDER
    transfer = serving.refused("transfer", epoch, version=2, digest=digest, deadlineSeconds=30)
    assert transfer[:2] == ORDER
    assert serving.refused("verify", epoch, version=2, digest=digest, **VERIFY)[0] == 409
    _unchanged(serving, before)
    assert client.complete("abc", 1).version == 1


def test_each_step_needs_the_one_before(serving: Operator, client: Client, models: Models):
    epoch = serving.next_epoch()
    state = serving.prepare(epoch, 2, "step-2")
    assert state.staged is not None
    digest = state.staged.digest
    transfer = {"version": 2, "digest": digest, "deadlineSeconds": 30}

    assert "close" in serving.refused("transfer", epoch, **transfer)[2].lower()
    serving.close(epoch, 2)
    status, reason, message = serving.refused("transfer", epoch, **transfer)
    assert (status, reason) == ORDER
    assert "arm" in message.lower()
    assert serving.refused("open", epoch, version=2, digest=digest)[0] == 409
    serving.do("arm", epoch)
    assert serving.refused("transfer", epoch, **(transfer | {"version": 3}))[0] == 409
    assert serving.refused("transfer", epoch, **(transfer | {"digest": models.digest(3)}))[0] == 409
    assert serving.refused("open", epoch, version=2, digest=digest)[0] == 409
    serving.transfer(epoch, 2, digest)
    status, reason, _ = serving.refused("open", epoch, version=2, digest=digest)
    assert (status, reason) == (409, RefusalReason.NOT_VERIFIED)
    assert serving.refused("cancel", epoch)[0] == 409
    assert serving.refused("verify", epoch, version=3, digest=digest, **VERIFY)[0] == 409
    assert serving.refused("verify", epoch, version=2, digest=models.digest(3), **VERIFY)[0] == 409
    serving.verify(epoch, 2, digest)
    assert serving.refused("open", epoch, version=3, digest=digest)[0] == 409
    assert serving.refused("open", epoch, version=2, digest=models.digest(3))[0] == 409
    assert client.complete("abc", 1).status == 503
    serving.do("open", epoch, version=2, digest=digest)
    assert client.complete("abc", 1).version == 2


def test_weights_of_a_checkpoint_are_not_passed_off_as_the_initial_ones(serving: Operator):
    epoch = serving.next_epoch()
    serving.close(epoch, 0)
    try:
        assert serving.refused("verify", epoch, version=0, digest=None, **VERIFY)[0] == 409
        assert serving.refused("open", epoch, version=0, digest=None)[0] == 409
    finally:
        serving.do("cancel", epoch)


def test_another_incarnation_is_not_obeyed(serving: Operator):
    before, epoch = serving.state(), serving.next_epoch()
    for command, fields in (
        ("arm", {}),
        ("cancel", {}),
        ("open", {"version": 1, "digest": None}),
        ("close", {"version": 2, "deadlineSeconds": 5, "operatorSilenceSeconds": 60}),
    ):
        status, reason, message = serving.refused(command, epoch, incarnation="of-yesterday", **fields)
        assert (status, reason) == (409, RefusalReason.WRONG_INCARNATION)
        assert before.incarnation in message
    assert serving.state().epoch == before.epoch
    _unchanged(serving, before)


def test_an_older_epoch_is_not_obeyed(serving: Operator, models: Models):
    epoch = serving.next_epoch() + 5
    serving.do("cancel", epoch)
    before = serving.state()
    assert before.epoch == epoch
    for command, fields in (
        ("arm", {}),
        ("cancel", {}),
        ("open", {"version": 1, "digest": models.digest(1)}),
        ("close", {"version": 2, "deadlineSeconds": 5, "operatorSilenceSeconds": 60}),
    ):
        assert serving.refused(command, epoch - 1, **fields)[:2] == (409, RefusalReason.STALE_EPOCH)
    _unchanged(serving, before)


def test_a_newer_epoch_forgets_what_the_older_one_staged_and_armed(serving: Operator, models: Models):
    epoch = serving.next_epoch()
    serving.prepare(epoch, 2, "step-2")
    serving.close(epoch, 2)
    serving.do("arm", epoch)
    newer = serving.close(epoch + 1, 3)
    assert (newer.epoch, newer.armed, newer.staged) == (epoch + 1, False, None)
    serving.do("arm", epoch + 1)
    transfer = {"version": 2, "digest": models.digest(2), "deadlineSeconds": 30}
    assert serving.refused("transfer", epoch + 1, **transfer)[:2] == ORDER
    assert serving.refused("transfer", epoch, **transfer)[:2] == (409, RefusalReason.STALE_EPOCH)
    state = serving.do("cancel", epoch + 1)
    assert held(state) == (WeightsState.VERIFIED, 1, models.digest(1))
    assert state.gate is Gate.OPEN


def test_a_newer_epoch_after_the_transfer_leaves_nothing_to_open(serving: Operator, client: Client, models: Models):
    """Touched and given up: the fleet's mechanism is a full reload, of whatever is committed."""
    epoch, digest = serving.next_epoch(), models.digest(2)
    serving.prepare(epoch, 2, "step-2")
    serving.close(epoch, 2)
    serving.do("arm", epoch)
    serving.transfer(epoch, 2, digest)
    assert serving.refused("open", epoch + 1, version=1, digest=models.digest(1))[0] == 409
    assert serving.refused("open", epoch + 1, version=2, digest=digest)[0] == 409
    assert client.complete("abc", 1).status == 503
    state = serving.update(1, "step-1")
    assert held(state) == (WeightsState.VERIFIED, 1, models.digest(1))


def test_one_operation_at_a_time(serving: Operator):
    """A second Prepare of another checkpoint waits for nothing and disturbs nothing: refused, or the first is done."""
    epoch = serving.next_epoch()
    source = {"type": "Checkpoint", "root": "Checkpoints", "path": "step-2"}
    serving.do("prepare", epoch, version=2, source=source, deadlineSeconds=30)
    other = serving.send("prepare", epoch, version=3, source=source | {"path": "step-3"}, deadlineSeconds=30)
    assert other.status_code in (202, 409)
    state = serving.state()
    while state.operation is not None and state.operation.status is OperationStatus.RUNNING:
        state = serving.state(after=state.sequence, wait_s=10)
    assert operation_of(state).status is OperationStatus.SUCCEEDED
    assert state.staged is not None
    assert state.staged.version == (3 if other.status_code == 202 else 2)
    serving.do("cancel", epoch)


@pytest.mark.parametrize("command", COMMANDS)
def test_incomplete_commands_are_refused_with_the_missing_field(operator: Operator, command: str):
    answer = operator.request("POST", f"/rollfleet/v1/{command}", json={"epoch": 1})
    assert answer.status_code == 400
    assert "incarnation" in answer.json()["error"]["message"]
