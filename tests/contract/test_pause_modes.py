"""What becomes of requests that run when the gate closes, in modes wait and keep."""

import json
import threading
from contextlib import suppress

from rollfleet_protocol.state import Gate
from tests.contract.client import LONG_ANSWER, Answer, Client, Operator, Stream, catch_running, wait_in_flight
from tests.contract.models import Models
from tests.contract.process import until

KEPT_ANSWER = 1200  # long enough to be caught running by a machine that is busy


class Running:
    """A request in a thread."""

    def __init__(self, client: Client, prompt: str, tokens: int, headers: dict[str, str] | None = None) -> None:
        self._answers: list[Answer] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(client.complete(prompt, tokens, headers=headers)), daemon=True
        )
        self._thread.start()

    def ended(self) -> bool:
        """Whether there is an answer."""
        return bool(self._answers)

    def answer(self) -> Answer:
        """It, once it is there."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._answers[0]


class Listening:
    """A stream in a thread."""

    def __init__(self, client: Client, prompt: str, tokens: int) -> None:
        self.stream: Stream = client.stream(prompt, tokens)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self.stream.open() as pieces:
            for _ in pieces:
                pass

    def end(self) -> Stream:
        """The whole of it."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.stream


def test_wait_lets_requests_end_by_themselves(serving: Operator, client: Client, models: Models):
    running = Running(client, models.short_prompt, LONG_ANSWER)
    wait_in_flight(serving, 1)
    epoch = serving.next_epoch()
    state = serving.close(epoch, 2, mode="wait", drainTimeoutSeconds=40)
    assert (state.gate, state.in_flight, state.kept, state.paused) == (Gate.CLOSED, 0, 0, True)
    answer = running.answer()
    assert (answer.status, answer.finish_reason, answer.version) == (200, "length", 1)
    serving.do("cancel", epoch)


def test_wait_aborts_what_is_left(serving: Operator, client: Client, models: Models):
    running = Running(client, models.short_prompt, LONG_ANSWER)
    wait_in_flight(serving, 1)
    epoch = serving.next_epoch()
    state = serving.close(epoch, 2, mode="wait", drainTimeoutSeconds=0.2)
    assert (state.in_flight, state.kept) == (0, 0)
    assert running.answer().finish_reason == "abort"
    serving.do("cancel", epoch)


def test_c18_keep_answers_from_both_versions_and_says_where(serving: Operator, client: Client, models: Models):
    prompt = models.short_prompt
    old = client.complete(prompt, KEPT_ANSWER).text
    digest = models.digest(2)
    assert client.complete(models.long_prompt, 1).version == 1  # fills blocks of the cache

    def start() -> tuple[Running, Listening]:
        whole, streamed = Running(client, prompt, KEPT_ANSWER), Listening(client, prompt, KEPT_ANSWER)
        until(lambda: len(streamed.stream.answer.text) > 20, 20, "the stream has begun")
        with suppress(AssertionError):  # of a machine that is so slow that they have ended
            wait_in_flight(serving, 2)
            heard = len(streamed.stream.answer.text)
            until(lambda: len(streamed.stream.answer.text) > heard + 20, 5, "the engine works on both")
        return whole, streamed

    (whole, streamed), epoch, state = catch_running(serving, start, 2, "keep", "step-2")
    assert (state.gate, state.in_flight, state.kept, state.paused) == (Gate.CLOSED, 0, 2, True)
    heard = len(streamed.stream.answer.text)
    serving.do("arm", epoch)
    serving.transfer(epoch, 2, digest)
    state = serving.verify(epoch, 2, digest)
    assert (state.in_flight, state.kept) == (0, 2)
    assert not whole.ended()
    serving.do("open", epoch, version=2, digest=digest)
    first = client.complete(models.long_prompt, 16)
    assert (first.cached_tokens, first.text) == (0, models.answer(2, models.long_prompt)[:16])
    answer, stream = whole.answer(), streamed.end()
    spans = json.loads(answer.headers["X-Weight-Version-Spans"])
    for told, text in ((spans, answer.text), (stream.spans, stream.answer.text)):
        assert [span["version"] for span in told] == [1, 2]
        assert told[0]["fromToken"] == [0]
        ((change,),) = [span["fromToken"] for span in told[1:]]
        assert 0 < change < KEPT_ANSWER
        assert text[:change] == old[:change]
        # What a fresh request says under the new weights to the same tokens: nothing of the old cache was used.
        assert text[change : change + 16] == client.complete(prompt + text[:change], 16).text
    assert stream.spans[1]["fromToken"][0] >= heard
    assert (answer.status, answer.finish_reason, answer.version) == (200, "length", 1)
    assert (stream.done, stream.answer.finish_reason, stream.answer.version) == (True, "length", 1)
    assert client.complete(prompt, 4).headers.get("X-Weight-Version-Spans") is None


def test_a_cancelled_keep_changes_nothing_for_the_request(serving: Operator, client: Client, models: Models):
    old = client.complete(models.short_prompt, KEPT_ANSWER).text
    running, epoch, _ = catch_running(serving, lambda: Running(client, models.short_prompt, KEPT_ANSWER), 1, "keep")
    serving.do("cancel", epoch)
    answer = running.answer()
    assert (answer.text, answer.finish_reason, answer.version) == (old, "length", 1)
    assert "X-Weight-Version-Spans" not in answer.headers


def test_a_request_that_demands_its_version_is_not_kept(serving: Operator, client: Client, models: Models):
    running = Running(client, models.short_prompt, LONG_ANSWER, {"X-Weight-Version-Required": "1"})
    wait_in_flight(serving, 1)
    epoch = serving.next_epoch()
    state = serving.close(epoch, 2, mode="keep")
    assert (state.in_flight, state.kept) == (0, 0)
    assert running.answer().finish_reason == "abort"
    serving.do("cancel", epoch)


def test_kept_requests_end_where_the_update_is_given_up_for_one_that_aborts(
    serving: Operator, client: Client, models: Models
):
    running, epoch, _ = catch_running(serving, lambda: Running(client, models.short_prompt, LONG_ANSWER), 1, "keep")
    state = serving.close(epoch + 1, 2)
    assert (state.in_flight, state.kept) == (0, 0)
    answer = running.answer()
    assert (answer.status, answer.finish_reason, answer.version) == (200, "abort", 1)
    serving.do("cancel", epoch + 1)


def test_nobody_is_kept_for_ever(serving: Operator, client: Client, models: Models):
    running, epoch, _ = catch_running(
        serving, lambda: Running(client, models.short_prompt, LONG_ANSWER), 1, "keep", keepSeconds=1
    )
    assert running.answer().status == 503
    until(lambda: serving.state().kept == 0, 5, "nobody is kept")
    serving.do("cancel", epoch)
    assert client.complete(models.short_prompt, 8).text == models.answer(1, models.short_prompt)[:8]
