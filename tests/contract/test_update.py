"""A whole update, and what clients see of it."""

import threading

import pytest

from rollfleet_protocol.state import Gate, OperationStatus, WeightsState
from tests.contract.client import (
    LONG_ANSWER,
    PROBE_TOKENS,
    Answer,
    Client,
    Operator,
    held,
    operation_of,
    wait_in_flight,
)
from tests.contract.models import Models
from tests.contract.process import EngineProcess, until


def test_greedy_output_is_that_of_each_checkpoint(operator: Operator, client: Client, models: Models):
    for version, path, root in ((1, "step-1", "Checkpoints"), (2, "step-2", "Checkpoints"), (0, ".", "Model")):
        state = operator.update(version, path, root=root)
        assert held(state) == (WeightsState.VERIFIED, version, models.digest(version))
        assert state.gate is Gate.OPEN
        assert state.ready
        assert not state.paused
        assert not state.armed
        for prompt in (models.short_prompt, models.long_prompt):
            answer = client.complete(prompt, models.longest_answer)
            assert answer.text == models.answer(version, prompt)
            assert (answer.status, answer.finish_reason, answer.version) == (200, "length", version)
            streamed = client.stream(prompt, models.longest_answer)
            with streamed.open() as pieces:
                assert "".join(pieces) == models.answer(version, prompt)
            assert (streamed.done, streamed.answer.finish_reason, streamed.answer.version) == (True, "length", version)


def test_what_a_transfer_tells(operator: Operator, models: Models):
    state = operator.update(3, "step-3")
    transferred, staged = state.transferred, state.staged
    assert transferred is not None
    assert transferred.digest == models.digest(3)
    assert transferred.tensors > 10
    assert transferred.bytes > 1000
    assert transferred.layers > 2
    assert set(transferred.phase_seconds) == {"init", "start", "update", "finish"}
    assert transferred.epoch == state.epoch
    assert staged is None or staged.digest == transferred.digest


def test_the_probe_tells_versions_apart_and_is_repeatable(operator: Operator, models: Models):
    found = {}
    for version in (1, 2, 1):
        state = operator.update(version, f"step-{version}")
        assert state.probe is not None
        assert state.probe.tokens == PROBE_TOKENS
        assert (state.probe.version, state.probe.epoch) == (version, state.epoch)
        assert all(value < 0 for value in state.probe.logprobs)
        expected = found.setdefault(version, models.probe(version) or state.probe.logprobs)
        assert state.probe.logprobs == pytest.approx(expected, abs=1e-4)
    assert found[1] != pytest.approx(found[2], abs=1e-2)


def test_a_version_can_be_pushed_again_under_another_number(operator: Operator, client: Client, models: Models):
    operator.update(41, "step-1")
    assert client.complete(models.short_prompt, 8).version == 41
    assert client.complete(models.short_prompt, 8).text == models.answer(1, models.short_prompt)[:8]


class InFlight:
    """Requests that run when the gate closes."""

    def __init__(self, client: Client, prompt: str) -> None:
        self._client = client
        self._prompt = prompt
        self.answers: list[Answer] = []
        self._threads = [
            threading.Thread(target=self._whole, daemon=True),
            threading.Thread(target=self._streamed, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _whole(self) -> None:
        self.answers.append(self._client.complete(self._prompt, LONG_ANSWER))

    def _streamed(self) -> None:
        stream = self._client.stream(self._prompt, LONG_ANSWER)
        with stream.open() as pieces:
            for _ in pieces:
                pass
        assert stream.done
        self.answers.append(stream.answer)

    def finished(self) -> list[Answer]:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        return self.answers


def test_c18_aborted_requests_answer_with_a_strict_prefix(serving: Operator, client: Client, models: Models):
    prompt = models.short_prompt
    running = InFlight(client, prompt)
    wait_in_flight(serving, 2)
    epoch = serving.next_epoch()
    state = serving.close(epoch, 2)
    assert (state.gate, state.in_flight, state.paused) == (Gate.CLOSED, 0, True)
    answers = running.finished()
    serving.do("cancel", epoch)
    whole = client.complete(prompt, LONG_ANSWER).text
    assert whole.startswith(models.answer(1, prompt)[: models.longest_answer])
    assert len(answers) == 2
    for answer in answers:
        assert (answer.status, answer.finish_reason, answer.version) == (200, "abort", 1)
        assert whole.startswith(answer.text)
        assert len(answer.text) < len(whole)


def test_serving_goes_on_while_the_next_version_is_prepared(serving: Operator, client: Client, models: Models):
    epoch = serving.next_epoch()
    state = serving.prepare(epoch, 2, "step-2")
    assert operation_of(state).status is OperationStatus.SUCCEEDED
    assert state.staged is not None
    assert (state.staged.digest, state.staged.version, state.staged.epoch) == (models.digest(2), 2, epoch)
    assert state.gate is Gate.OPEN
    assert client.complete(models.short_prompt, 4).version == 1
    serving.do("cancel", epoch)
    assert serving.state().staged is None
    assert client.complete(models.short_prompt, 4).version == 1


def test_cancel_before_touch_reopens_on_the_old_version(serving: Operator, client: Client, models: Models):
    epoch = serving.next_epoch()
    serving.prepare(epoch, 2, "step-2")
    serving.close(epoch, 2)
    assert client.complete("abc", 1).status == 503
    serving.do("arm", epoch)
    assert client.complete("abc", 1).status == 503
    state = serving.do("cancel", epoch)
    assert (state.gate, state.armed, state.paused) == (Gate.OPEN, False, False)
    assert held(state) == (WeightsState.VERIFIED, 1, models.digest(1))
    answer = client.complete(models.short_prompt, 8)
    assert (answer.version, answer.text) == (1, models.answer(1, models.short_prompt)[:8])


def test_nothing_is_admitted_from_closing_to_opening(serving: Operator, client: Client, engine: EngineProcess):
    epoch = serving.next_epoch()
    digest = _digest(serving.prepare(epoch, 2, "step-2"))
    for step in (
        lambda: serving.close(epoch, 2),
        lambda: serving.do("arm", epoch),
        lambda: serving.transfer(epoch, 2, digest),
        lambda: serving.verify(epoch, 2, digest),
    ):
        step()
        answer = client.complete("abc", 1)
        assert answer.status == 503
        assert answer.body["error"]["closedReason"] == "Updating"
        assert client.get("/health").status_code == 200
        assert client.get("/readyz").status_code == 200
    serving.do("open", epoch, version=2, digest=digest)
    assert client.complete("abc", 1).version == 2

    def changes() -> list[dict[str, object]]:
        """Of this update; the launcher passes lines on."""
        found = [line for line in engine.guard_log() if str(line["event"]).startswith("gate.")][-2:]
        return found if found and found[-1]["event"] == "gate.opened" and found[-1]["epoch"] == epoch else []

    closed, opened = until(changes, 10, "the opening is in the log")
    assert (closed["event"], closed["version"]) == ("gate.closed", 1)
    assert (opened["event"], opened["version"], opened["digest"]) == ("gate.opened", 2, digest)
    last, first = closed["lastAdmissionNs"], opened["timeNs"]
    assert isinstance(last, int)
    assert isinstance(first, int)
    assert last < first


def _digest(state: object) -> str:
    staged = getattr(state, "staged", None)
    assert staged is not None
    return str(staged.digest)


def test_repeated_commands_start_nothing(serving: Operator):
    epoch = serving.next_epoch()
    digest = _digest(serving.prepare(epoch, 2, "step-2"))
    again = serving.prepare(epoch, 2, "step-2")
    assert operation_of(again) == operation_of(serving.state())
    serving.close(epoch, 2)
    serving.close(epoch, 2)
    serving.do("arm", epoch)
    serving.do("arm", epoch)
    first = serving.transfer(epoch, 2, digest)
    second = serving.transfer(epoch, 2, digest)
    assert first.transferred == second.transferred
    serving.verify(epoch, 2, digest)
    serving.verify(epoch, 2, digest)
    state = serving.do("open", epoch, version=2, digest=digest)
    assert serving.do("open", epoch, version=2, digest=digest).sequence == state.sequence
