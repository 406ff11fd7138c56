"""Sleep at both levels and waking by tags, in every order: what is refused and why, what is served afterwards."""

from typing import Any

from rollfleet_protocol.refusals import RefusalReason
from rollfleet_protocol.sleep import ALL_TAGS, Tag
from rollfleet_protocol.state import EngineState, FailureReason, Gate, OperationStatus, WeightsState
from tests.contract.client import PROBE_TOKENS, STEP_TIMEOUT_S, Client, Operator, catch_running, held, operation_of
from tests.contract.models import Models
from tests.contract.process import EngineProcess

ORDER = (409, RefusalReason.ORDER_VIOLATION)
DEADLINE = {"deadlineSeconds": STEP_TIMEOUT_S}
VERIFY = {"probeTokens": PROBE_TOKENS, "deadlineSeconds": STEP_TIMEOUT_S}


def fall_asleep(operator: Operator, level: int) -> tuple[int, EngineState]:
    """Closed, and asleep at this level: the epoch and the state."""
    epoch = operator.next_epoch()
    operator.close(epoch, operator.state().weights.version or 0)
    state = operator.succeed("sleep", epoch, level=level, **DEADLINE)
    assert (state.sleep.level, state.sleep.awake) == (level, ())
    assert (state.gate, state.paused, state.ready) == (Gate.CLOSED, True, False)
    return epoch, state


def wake(operator: Operator, epoch: int, *tags: Tag) -> EngineState:
    """These tags, or all."""
    return operator.succeed("wake", epoch, **DEADLINE, **({"tags": tags} if tags else {}))


def refused(operator: Operator, command: str, epoch: int, **fields: Any) -> str:
    status, reason, message = operator.refused(command, epoch, **fields)
    assert (status, reason) == ORDER
    return message


def closed_reason(client: Client) -> str:
    answer = client.complete("abc", 1)
    assert answer.status == 503
    return str(answer.body["error"]["closedReason"])


def serve_on(operator: Operator, client: Client, models: Models, epoch: int, version: int) -> None:
    """Verified and open; and what is served is right, of new computed caches."""
    digest = models.digest(version)
    state = operator.verify(epoch, version, digest)
    assert not state.paused
    operator.do("open", epoch, version=version, digest=digest)
    answer = client.complete(models.long_prompt, models.longest_answer)
    assert (answer.version, answer.cached_tokens, answer.text) == (
        version,
        0,
        models.answer(version, models.long_prompt),
    )


def test_level_1_gives_back_what_was_held(serving: Operator, client: Client, models: Models):
    assert {"sleep/1", "sleep/2"} <= set(serving.state().facts.capabilities)
    epoch, state = fall_asleep(serving, 1)
    assert held(state) == (WeightsState.LOADED, 1, models.digest(1)), "to be verified again"
    assert closed_reason(client) == "Asleep"
    assert client.get("/readyz").status_code == 503
    assert client.get("/livez").status_code == 200
    state = wake(serving, epoch)
    assert (state.sleep.level, state.sleep.awake, state.paused) == (0, ALL_TAGS, True)
    serve_on(serving, client, models, epoch, 1)


def test_c20_a_partial_wake_serves_nobody_and_the_right_order_is_named(
    serving: Operator, client: Client, models: Models
):
    epoch, _ = fall_asleep(serving, 1)
    open_1 = {"version": 1, "digest": models.digest(1)}
    assert "tag weights comes before tag kv_cache" in refused(serving, "wake", epoch, tags=["kv_cache"], **DEADLINE)
    assert "Wake comes before Verify" in refused(serving, "verify", epoch, **open_1, **VERIFY)
    state = wake(serving, epoch, Tag.WEIGHTS)
    assert (state.sleep.level, state.sleep.awake) == (1, (Tag.WEIGHTS,))
    assert closed_reason(client) == "Asleep"
    assert "kv_cache asleep: Wake comes before Verify" in refused(serving, "verify", epoch, **open_1, **VERIFY)
    assert serving.refused("open", epoch, **open_1)[:2] == (409, RefusalReason.NOT_VERIFIED)
    assert "Wake comes before another Sleep" in refused(serving, "sleep", epoch, level=1, **DEADLINE)
    assert serving.refused_probe()[:2] == ORDER
    again = wake(serving, epoch, Tag.WEIGHTS)
    assert operation_of(again).seconds == operation_of(state).seconds, "a repeat starts nothing"
    state = wake(serving, epoch, Tag.KV_CACHE)
    assert state.sleep.level == 0
    for tags in ((Tag.KV_CACHE,), (Tag.WEIGHTS,), ALL_TAGS):
        assert operation_of(wake(serving, epoch, *tags)) == operation_of(state), "a wake of who is awake is harmless"
    serve_on(serving, client, models, epoch, 1)


def test_c02_level_2_is_closed_until_weights_are_loaded_and_verified(serving: Operator, client: Client, models: Models):
    epoch, state = fall_asleep(serving, 2)
    assert held(state) == (WeightsState.ABSENT, None, None)
    assert closed_reason(client) == "Asleep"
    for tags in (["kv_cache"], ["weights", "kv_cache"]):
        message = refused(serving, "wake", epoch, tags=tags, **DEADLINE)
        assert "weights" in message
        assert "kv_cache" in message
    wake(serving, epoch, Tag.WEIGHTS)
    assert closed_reason(client) == "WeightsAbsent"
    assert "then Transfer" in refused(serving, "wake", epoch, tags=["kv_cache"], **DEADLINE)
    for version, digest in ((1, models.digest(1)), (0, None)):
        assert serving.refused("verify", epoch, version=version, digest=digest, **VERIFY)[0] == 409
        assert serving.refused("open", epoch, version=version, digest=digest)[0] == 409
    assert serving.refused("cancel", epoch)[0] == 409
    assert client.complete("abc", 1).status == 503

    epoch = serving.next_epoch()
    staged = serving.prepare(epoch, 2, "step-2").staged
    assert staged is not None
    serving.close(epoch, 2)
    serving.do("arm", epoch)
    serving.transfer(epoch, 2, staged.digest)
    assert closed_reason(client) == "Asleep"
    assert "kv_cache asleep: Wake comes before Verify" in refused(
        serving, "verify", epoch, version=2, digest=staged.digest, **VERIFY
    )
    wake(serving, epoch, Tag.KV_CACHE)
    serve_on(serving, client, models, epoch, 2)


def test_no_update_while_the_weights_sleep(serving: Operator, client: Client, models: Models):
    fall_asleep(serving, 1)
    epoch = serving.next_epoch()
    staged = serving.prepare(epoch, 3, "step-3").staged
    assert staged is not None, "staging touches nothing"
    serving.close(epoch, 3)
    serving.do("arm", epoch)
    transfer = {"version": 3, "digest": staged.digest, **DEADLINE}
    assert "Wake with tag weights comes before Transfer" in refused(serving, "transfer", epoch, **transfer)
    wake(serving, epoch, Tag.WEIGHTS)
    serving.transfer(epoch, 3, staged.digest)
    wake(serving, epoch, Tag.KV_CACHE)
    serve_on(serving, client, models, epoch, 3)


def test_sleep_needs_a_quiesced_engine(serving: Operator, client: Client, models: Models):
    epoch = serving.next_epoch()
    assert "Close comes before Sleep" in refused(serving, "sleep", epoch, level=1, **DEADLINE)
    assert client.complete("abc", 1).status == 200
    assert serving.send("sleep", epoch, level=7, **DEADLINE).status_code == 400
    assert serving.send("wake", epoch, tags=[], **DEADLINE).status_code == 400
    assert serving.send("wake", epoch, tags=["scheduling"], **DEADLINE).status_code == 400
    serving.close(epoch, 1)
    assert "Close comes before Sleep" in refused(serving, "sleep", epoch + 1, level=1, **DEADLINE), "of another epoch"
    serving.do("cancel", epoch + 1)
    assert client.complete("abc", 1).status == 200


def test_repeats_are_harmless_and_another_level_is_not_a_repeat(serving: Operator, client: Client, models: Models):
    epoch, state = fall_asleep(serving, 1)
    assert operation_of(serving.finish("sleep", epoch, level=1, **DEADLINE)) == operation_of(state)
    assert "asleep at level 1: Wake comes before another Sleep" in refused(serving, "sleep", epoch, level=2, **DEADLINE)
    wake(serving, epoch)
    serving.succeed("sleep", epoch, level=1, **DEADLINE)
    wake(serving, epoch, Tag.WEIGHTS)
    wake(serving, epoch)
    serve_on(serving, client, models, epoch, 1)


def test_silence_reopens_nobody_who_sleeps(serving: Operator, client: Client, models: Models):
    epoch = serving.next_epoch()
    serving.close(epoch, 1, silence_s=3.0)
    serving.succeed("sleep", epoch, level=1, **DEADLINE)
    state = serving.state()
    assert serving.state(after=state.sequence, wait_s=5).sequence == state.sequence
    assert closed_reason(client) == "Asleep"
    wake(serving, epoch)
    serve_on(serving, client, models, epoch, 1)


def test_who_is_kept_is_not_put_to_sleep(serving: Operator, client: Client, models: Models):
    def start() -> Any:
        stream = client.stream(models.short_prompt, 1900)
        context = stream.open()
        context.__enter__()
        return context

    context, epoch, _ = catch_running(serving, start, 1, "keep")
    failed = serving.finish("sleep", epoch, level=1, **DEADLINE)
    operation = operation_of(failed)
    assert operation.status is OperationStatus.FAILED
    assert operation.failure is not None
    assert operation.failure.reason is FailureReason.SLEEP_FAILED
    assert "1 requests are kept" in operation.failure.message
    assert failed.sleep.level == 0
    state = serving.do("cancel", epoch)
    assert held(state) == (WeightsState.VERIFIED, 1, models.digest(1))
    context.__exit__(None, None, None)


def test_the_engine_s_own_log_says_that_it_slept(engine: EngineProcess, serving: Operator):
    assert '"operation": "Sleep"' in engine.log()
