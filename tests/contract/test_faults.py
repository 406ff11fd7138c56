"""The nine faults, done by the simulator and by the proxy in front of real vLLM: what clients and operator then see.

Each is done to an engine in mid-update, and must end as the guard promises: a call that failed changed nothing, a call
whose answer was lost is not done twice, and nothing is answered from weights that are not verified.
"""

import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from rollfleet_protocol.state import EngineState, FailureReason, Gate, OperationStatus, WeightsState
from tests.contract.client import PROBE_TOKENS, Client, Operator, held, operation_of
from tests.contract.faulty import FaultyEngine
from tests.contract.models import Models
from tests.contract.process import START_TIMEOUT_S, Kind, Site, until

HANG_S = 10.0
DELAY_S = 1.0
LATE_S, PATIENCE_S = 10.0, 1.5  # of an order, and of its sender


@pytest.fixture(scope="module")
def faulty(kind: Kind, site: Site, models: Models) -> Iterator[FaultyEngine]:
    """The engine of this module; the last test kills it."""
    engine = FaultyEngine(kind, site, f"{kind.name}-faulty", models, proxied=kind.name == "vllm")
    yield engine
    engine.process.stop()


@pytest.fixture(scope="module")
def control(faulty: FaultyEngine, site: Site) -> Iterator[Operator]:
    """Who controls it."""
    operator = Operator(faulty.process, site)
    yield operator
    operator.close_client()


@pytest.fixture(scope="module")
def user(faulty: FaultyEngine) -> Iterator[Client]:
    """Who uses it."""
    client = Client(faulty.process)
    yield client
    client.close_client()


@pytest.fixture(autouse=True)
def _serving(faulty: FaultyEngine, control: Operator, models: Models) -> None:
    """Every test begins with version 1 in service, and no faults."""
    faulty.plan()
    state = control.state()
    if not (state.gate is Gate.OPEN and state.weights.version == 1):
        control.update(1, "step-1")


def to_transfer(control: Operator) -> tuple[int, str]:
    """Epoch and digest of an update to version 2 that is quiesced and armed."""
    epoch = control.next_epoch()
    staged = control.prepare(epoch, 2, "step-2").staged
    assert staged is not None
    control.close(epoch, 2)
    control.do("arm", epoch)
    return epoch, staged.digest


def complete(control: Operator, user: Client, models: Models, epoch: int, digest: str) -> None:
    """The update to version 2 goes on to its end as if nothing had happened."""
    control.transfer(epoch, 2, digest)
    control.verify(epoch, 2, digest)
    control.do("open", epoch, version=2, digest=digest)
    answer = user.complete(models.short_prompt, 8)
    assert (answer.version, answer.text) == (2, models.answer(2, models.short_prompt)[:8])


def refused_for(user: Client, reason: str) -> None:
    """Nobody is answered."""
    answer = user.complete("abc", 1)
    assert (answer.status, answer.body["error"]["closedReason"]) == (503, reason)


def still_serves(control: Operator, user: Client, models: Models) -> None:
    """Version 1, as before."""
    state = control.state()
    assert held(state) == (WeightsState.VERIFIED, 1, models.digest(1))
    answer = user.complete(models.short_prompt, 8)
    assert (answer.status, answer.version, answer.text) == (200, 1, models.answer(1, models.short_prompt)[:8])


def failed(state: EngineState, reason: FailureReason) -> str:
    """The operation failed for this reason; its message."""
    operation = operation_of(state)
    assert operation.status is OperationStatus.FAILED
    assert operation.failure is not None
    assert operation.failure.reason is reason
    return operation.failure.message


def test_refuse(faulty: FaultyEngine, control: Operator, user: Client, models: Models):
    epoch, digest = to_transfer(control)
    rule = {"call": "transfer", "fault": "refuse", "at": [1], "message": "NPU out of memory"}
    faulty.plan(rule)
    answer = control.send("transfer", epoch, version=2, digest=digest, deadlineSeconds=60)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "NPU out of memory")
    state = control.state()
    assert (state.armed, state.gate, held(state)[1]) == (True, Gate.CLOSED, 1)
    refused_for(user, "Updating")
    complete(control, user, models, epoch, digest)
    assert faulty.done() == [rule | {"times": 1}]


def test_delay(faulty: FaultyEngine, control: Operator, user: Client, models: Models):
    epoch, digest = to_transfer(control)
    faulty.plan({"call": "transfer", "fault": "delay", "at": [1], "seconds": DELAY_S})
    began = time.monotonic()
    complete(control, user, models, epoch, digest)
    assert time.monotonic() - began > DELAY_S


def test_an_order_that_comes_after_a_newer_one_is_refused(faulty: FaultyEngine, control: Operator):
    epoch, _ = to_transfer(control)
    faulty.plan({"call": "cancel", "fault": "delay", "at": [1], "seconds": LATE_S})
    late = {"incarnation": control.state().incarnation, "epoch": epoch}
    with pytest.raises(httpx.TimeoutException):
        control.request("POST", "/rollfleet/v1/cancel", json=late, timeout=PATIENCE_S)
    control.close(epoch + 1, 2)

    def outcomes() -> list[object]:
        lines = [line for line in faulty.process.guard_log() if line["event"] == "control"]
        return [line["outcome"] for line in lines if (line["command"], line["epoch"]) == ("cancel", epoch)]

    until(outcomes, LATE_S + 10, "it has come")
    assert outcomes() == ["StaleEpoch"]
    assert control.state().gate is Gate.CLOSED
    control.do("cancel", epoch + 1)


def test_cut_after_executing(faulty: FaultyEngine, control: Operator, user: Client, models: Models):
    epoch, digest = to_transfer(control)
    faulty.plan({"call": "transfer", "fault": "cut", "at": [1]}, {"call": "inference", "fault": "cut", "at": [1]})
    with pytest.raises(httpx.RemoteProtocolError):
        control.send("transfer", epoch, version=2, digest=digest, deadlineSeconds=60)
    control.transfer(epoch, 2, digest)

    def told() -> list[object]:
        lines = [line for line in faulty.process.guard_log() if line["event"] == "operation" and line["epoch"] == epoch]
        return [line["status"] for line in lines if line["operation"] == "Transfer"]

    until(lambda: "Succeeded" in told(), 10, "the launcher has passed the lines on")
    assert told() == ["Running", "Succeeded"], "it was done once"
    control.verify(epoch, 2, digest)
    control.do("open", epoch, version=2, digest=digest)
    with pytest.raises(httpx.RemoteProtocolError):
        user.complete(models.short_prompt, 8)
    assert user.complete(models.short_prompt, 8).version == 2


def test_a_stream_is_cut_before_its_end(faulty: FaultyEngine, user: Client, models: Models):
    faulty.plan({"call": "inference", "fault": "cut", "at": [1]})
    stream = user.stream(models.short_prompt, 20)
    with pytest.raises(httpx.RemoteProtocolError), stream.open() as pieces:
        for _ in pieces:
            pass
    assert models.answer(1, models.short_prompt).startswith(stream.answer.text)
    whole = user.stream(models.short_prompt, 20)
    with whole.open() as pieces:
        assert "".join(pieces) == models.answer(1, models.short_prompt)[:20]
    assert whole.done


def test_502_twice(faulty: FaultyEngine, control: Operator, user: Client, models: Models):
    epoch, digest = to_transfer(control)
    control.transfer(epoch, 2, digest)
    faulty.plan({"call": "verify", "fault": "badGateway", "at": [1]})
    fields = {"version": 2, "digest": digest, "probeTokens": PROBE_TOKENS, "deadlineSeconds": 60}
    assert [control.send("verify", epoch, **fields).status_code for _ in range(2)] == [502, 502]
    assert control.state().weights.state is WeightsState.LOADED
    refused_for(user, "Updating")
    complete(control, user, models, epoch, digest)


def test_a_tensor_that_changes_after_staging_never_becomes_weights(
    faulty: FaultyEngine, control: Operator, user: Client, models: Models
):
    before = models.digest(2)
    faulty.plan({"call": "transfer", "fault": "corrupt", "at": [1], "tensor": "model.norm.weight"})
    epoch, digest = to_transfer(control)
    assert digest == before
    state = control.finish("transfer", epoch, version=2, digest=digest, deadlineSeconds=60)
    message = failed(state, FailureReason.DIGEST_MISMATCH)
    assert "model.norm.weight" in message
    assert state.weights.state is WeightsState.UNCERTAIN
    refused_for(user, "Uncertain")
    assert control.refused("open", epoch, version=2, digest=digest)[0] == 409
    (line,) = faulty.lines("faults.damaged")[-1:]
    assert (line["tensor"], line["checkpoint"]) == ("model.norm.weight", "step-2")
    assert models.digest(2) == before
    # A full reload cures it.
    control.update(1, "step-1")
    still_serves(control, user, models)


def test_a_corrupt_tensor_is_told_by_its_digest(faulty: FaultyEngine, control: Operator, user: Client, models: Models):
    faulty.plan({"call": "prepare", "fault": "corrupt", "at": [1]})
    epoch = control.next_epoch()
    staged = control.prepare(epoch, 2, "step-2").staged
    assert staged is not None
    assert staged.digest != models.digest(2)
    assert control.prepare(epoch, 2, "step-2").staged == staged  # repeated, it is the same order
    control.close(epoch, 2)
    control.do("arm", epoch)
    assert control.refused("transfer", epoch, version=2, digest=models.digest(2), deadlineSeconds=60)[0] == 409
    control.do("cancel", epoch)
    still_serves(control, user, models)


def test_a_skipped_layer_is_found_while_staging(faulty: FaultyEngine, control: Operator, user: Client, models: Models):
    faulty.plan({"call": "prepare", "fault": "skip", "at": [1], "layer": "model.layers.1"})
    epoch = control.next_epoch()
    assert "model.layers.1." in failed(control.prepare(epoch, 2, "step-2"), FailureReason.COVERAGE_FAILED)
    still_serves(control, user, models)
    # The next order gets the checkpoint as it is.
    epoch, digest = to_transfer(control)
    complete(control, user, models, epoch, digest)


def test_hang(faulty: FaultyEngine, control: Operator, user: Client, models: Models):
    epoch, digest = to_transfer(control)
    faulty.plan({"call": "transfer", "fault": "hang", "at": [1], "seconds": HANG_S})
    transfer = threading.Thread(target=control.transfer, args=(epoch, 2, digest), daemon=True)
    transfer.start()
    until(faulty.done, 10, "the engine hangs")
    with pytest.raises(httpx.TimeoutException):
        httpx.get(f"{faulty.process.serving_url}/livez", timeout=1)
    transfer.join(60)
    assert not transfer.is_alive()
    complete(control, user, models, epoch, digest)


def test_restart_with_base_weights(faulty: FaultyEngine, control: Operator, user: Client, models: Models):
    epoch, digest = to_transfer(control)
    before, count = control.state().incarnation, len(faulty.lines("fault"))
    faulty.plan({"call": "transfer", "fault": "restart", "at": [1]})
    with pytest.raises(httpx.TransportError):
        control.send("transfer", epoch, version=2, digest=digest, deadlineSeconds=60)
    faulty.process.wait_live()
    state = control.state()
    assert state.incarnation != before
    assert (state.gate, state.weights.state) == (Gate.CLOSED, WeightsState.INITIAL)
    refused_for(user, "Starting")
    old = {"incarnation": before, "version": 2, "digest": digest, "deadlineSeconds": 60}
    assert control.refused("transfer", epoch, **old)[1] == "WrongIncarnation"
    assert control.refused("open", epoch, version=1, digest=models.digest(1))[1] == "NotVerified"
    control.update(1, "step-1")
    still_serves(control, user, models)
    assert len(faulty.lines("fault")) == count + 1  # calls are counted on: the second transfer was spared


def test_die(faulty: FaultyEngine, control: Operator, user: Client, models: Models):
    (core,) = faulty.process.core_pids()
    assert user.complete(models.short_prompt, 4).status == 200
    faulty.plan({"call": "inference", "fault": "die", "at": [1]})
    with pytest.raises(httpx.TransportError):
        user.complete(models.short_prompt, 4)
    until(lambda: core not in faulty.process.core_pids(), START_TIMEOUT_S, "the core is gone")
    for url in (f"{faulty.process.serving_url}/livez", f"{faulty.process.serving_url}/v1/completions"):
        try:
            assert httpx.get(url, timeout=10).status_code == 502  # of the proxy; the simulator is gone as a whole
        except httpx.TransportError:
            assert faulty.process.wait(10) < 0
