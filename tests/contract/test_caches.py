"""Nothing that old weights computed is used after an update."""

import pytest

from rollfleet_protocol.commands import PauseMode
from rollfleet_protocol.state import Gate
from tests.contract.client import LONG_ANSWER, PROBE_TOKENS, Client, Operator
from tests.contract.models import Models


@pytest.mark.parametrize("mode", [mode.value for mode in PauseMode])
def test_c03_first_request_after_an_update_uses_no_old_cache(
    serving: Operator, client: Client, models: Models, fresh_operator: Operator, fresh_client: Client, mode: str
):
    prompt, count = models.long_prompt, 16
    if fresh_operator.state().gate != "Open":
        fresh_operator.serve_initial()
    assert fresh_operator.state().weights.version == 0
    client.complete(prompt, count)
    warm = client.complete(prompt, count, logprobs=0)
    assert (warm.version, warm.cached_tokens) == (1, 128)

    serving.update(2, "step-2", mode=mode)
    first = client.complete(prompt, count, logprobs=0)
    assert (first.version, first.cached_tokens) == (2, 0)
    again = client.complete(prompt, count, logprobs=0)
    assert again.cached_tokens == 128

    reference = fresh_client.complete(prompt, count, logprobs=0, cache_salt=mode)
    assert reference.cached_tokens == 0
    assert first.text == reference.text == models.answer(2, prompt)[:count]
    assert first.logprobs == pytest.approx(reference.logprobs, abs=1e-5)
    assert again.logprobs == pytest.approx(reference.logprobs, abs=1e-5)
    assert warm.logprobs != pytest.approx(reference.logprobs, abs=1e-3)


def test_the_probe_neither_uses_nor_fills_the_cache_of_requests(serving: Operator, client: Client, models: Models):
    prompt = models.long_prompt
    tokens = client.http.post("/tokenize", json={"model": "policy", "prompt": prompt}).json()["tokens"]
    epoch = serving.next_epoch()
    serving.prepare(epoch, 2, "step-2")
    digest = models.digest(2)
    serving.close(epoch, 2)
    serving.do("arm", epoch)
    serving.transfer(epoch, 2, digest)
    state = serving.succeed("verify", epoch, version=2, digest=digest, probeTokens=tokens, deadlineSeconds=60)
    assert state.probe is not None
    assert len(state.probe.logprobs) == len(tokens) - 1
    serving.do("open", epoch, version=2, digest=digest)
    first = client.complete(prompt, 4, prompt_logprobs=0)
    assert first.cached_tokens == 0
    told = [next(iter(entry.values()))["logprob"] for entry in first.prompt_logprobs[1:]]
    assert state.probe.logprobs == pytest.approx(told, abs=1e-4)


def test_a_serving_engine_is_probed_beside_its_requests(serving: Operator, client: Client, models: Models):
    running = client.stream(models.short_prompt, LONG_ANSWER)
    with running.open() as pieces:
        next(pieces)
        before = serving.state()
        reports = [serving.probe() for _ in range(2)]
        assert serving.state().sequence == before.sequence
    for report in reports:
        assert report.weights == before.weights
        assert (report.gate, report.incarnation, report.tokens) == (Gate.OPEN, before.incarnation, PROBE_TOKENS)
        assert len(report.by_rank) == before.facts.data_parallel_size
        assert before.probe is not None
        for logprobs in report.by_rank:
            assert logprobs == pytest.approx(before.probe.logprobs, abs=1e-4)
    epoch = serving.next_epoch()
    serving.close(epoch, 2)
    status, reason, message = serving.refused_probe()
    assert (status, reason) == (409, "OrderViolation")
    assert "paused" in message
    serving.do("cancel", epoch)
    assert serving.probe().weights.version == 1


def test_cached_blocks_survive_a_cancelled_update_whose_weights_were_not_touched(
    serving: Operator, client: Client, models: Models
):
    prompt = models.long_prompt
    reference = client.complete(prompt, 8)
    epoch = serving.next_epoch()
    serving.close(epoch, 2)
    serving.do("cancel", epoch)
    after = client.complete(prompt, 8)
    assert after.text == reference.text == models.answer(1, prompt)[:8]
    assert after.version == 1
