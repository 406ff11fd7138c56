"""An engine of two data-parallel ranks that holds requests: what concerns all ranks, and who waits at its gate."""

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import httpx
import pytest

from devtools import vllm_venv
from rollfleet_cli.conformance.running import Result
from rollfleet_protocol.refusals import SPANS_HEADER
from rollfleet_protocol.state import Gate
from tests.contract.client import LONG_ANSWER, Answer, Client, Operator, catch_running, operation_of, wait_in_flight
from tests.contract.conforming import BY_ID, run
from tests.contract.conftest import VLLM, run_engine
from tests.contract.models import Models
from tests.contract.process import EngineProcess, Kind, Site, until
from tests.contract.trainer import Trainer
from tests.support import damage

T = TypeVar("T")
RANKS = 2
HOLD_S = 4
MOST_HELD = 2
KEPT_ANSWER = 1200  # long enough to be caught running by a machine that is busy
RANK_HEADER = "X-data-parallel-rank"


@pytest.fixture(scope="module")
def wide(kind: Kind, site: Site, models: Models) -> Iterator[EngineProcess]:
    """Two ranks, and a gate at which requests wait."""
    hold = {"seconds": HOLD_S, "maxRequests": MOST_HELD}
    transfer = {"weightTransfer": {"backend": backend_of(kind)}}
    mode = {"mode": "Disaggregated"} if backend_of(kind) == "gloo" else {"mode": "Colocated", "sleepMode": True}
    yield from run_engine(
        kind, site, "wide", models.folder(0), models, dataParallelSize=RANKS, hold=hold, **transfer, **mode
    )


def backend_of(kind: Kind) -> str:
    """gloo needs torch, which the simulator's interpreter has not."""
    return "gloo" if kind.name == VLLM else "shm"


@pytest.fixture(scope="module")
def operator(wide: EngineProcess, site: Site) -> Iterator[Operator]:
    one = Operator(wide, site)
    yield one
    one.close_client()


@pytest.fixture(scope="module")
def client(wide: EngineProcess) -> Iterator[Client]:
    one = Client(wide)
    yield one
    one.close_client()


class Asking:
    """A request in a thread."""

    def __init__(self, client: Client, prompt: str, tokens: int, headers: dict[str, str]) -> None:
        self._answers: list[Answer] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(client.complete(prompt, tokens, headers=headers)), daemon=True
        )
        self._thread.start()

    def answer(self) -> Answer:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self._answers[0]


def on(rank: int) -> dict[str, str]:
    return {RANK_HEADER: str(rank)}


def on_every_rank(client: Client, models: Models, tokens: int = LONG_ANSWER) -> list[Asking]:
    return [Asking(client, models.short_prompt, tokens, on(rank)) for rank in range(RANKS)]


@pytest.fixture
def trainer(wide: EngineProcess, site: Site, models: Models) -> Iterator[Trainer]:
    if not vllm_venv.is_complete(vllm_venv.venv_path()):
        pytest.skip("no torch for the trainer: `make vllm-venv`")
    one = Trainer(wide, site, models)
    yield one
    one.close()


def test_c17_a_push_reaches_every_rank_of_an_engine(
    kind: Kind, trainer: Trainer, operator: Operator, client: Client, models: Models
):
    """Ranks 1 and 2 of a group of three."""
    backend = backend_of(kind)
    epoch, digest = operator.next_epoch(), models.digest(2)
    trainer.arm(epoch, 2)
    trainer.order(epoch, 2, backend, workers=RANKS, worldSize=1 + RANKS)
    assert trainer.send(backend, 2, workers=RANKS) == {"digest": digest}
    trainer.ended()
    operator.verify(epoch, 2, digest)
    operator.do("open", epoch, version=2, digest=digest)
    for rank in range(RANKS):
        answer = client.complete(models.short_prompt, models.longest_answer, headers=on(rank))
        assert (answer.version, answer.text) == (2, models.answer(2, models.short_prompt))


def test_c20_every_rank_sleeps_and_wakes(operator: Operator, client: Client, models: Models):
    operator.update(1, "step-1")
    epoch, digest = operator.next_epoch(), models.digest(1)
    operator.close(epoch, 1)
    operator.succeed("sleep", epoch, level=1, deadlineSeconds=60)
    for tag in ("weights", "kv_cache"):
        state = operator.succeed("wake", epoch, tags=[tag], deadlineSeconds=60)
        assert state.paused
    operator.verify(epoch, 1, digest)
    operator.do("open", epoch, version=1, digest=digest)
    for rank in range(RANKS):
        answer = client.complete(models.short_prompt, models.longest_answer, headers=on(rank))
        assert (answer.version, answer.text) == (1, models.answer(1, models.short_prompt))


def test_all_workers_are_told(operator: Operator):
    facts = operator.state().facts
    assert (facts.world_size, facts.data_parallel_size) == (RANKS, RANKS)


def test_every_rank_is_loaded_probed_and_starts_with_an_empty_cache(operator: Operator, client: Client, models: Models):
    operator.update(1, "step-1")
    prompt = models.long_prompt
    for rank in range(RANKS):
        client.complete(prompt, 1, headers=on(rank))
        assert client.complete(prompt, 1, headers=on(rank)).cached_tokens == 128
    state = operator.update(2, "step-2")
    assert state.probe is not None
    assert len(state.probe.by_rank) == RANKS
    for logprobs in (*state.probe.by_rank, *operator.probe().by_rank):
        assert logprobs == pytest.approx(models.probe(2) or state.probe.logprobs, abs=1e-4)
    assert len(operator.probe().by_rank) == RANKS
    for rank in range(RANKS):
        answer = client.complete(prompt, 32, headers=on(rank))
        assert (answer.version, answer.cached_tokens, answer.text) == (2, 0, models.answer(2, prompt)[:32])


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_closing_ends_what_runs_on_every_rank(operator: Operator, client: Client, models: Models, mode: str):
    operator.update(1, "step-1")
    running = on_every_rank(client, models)
    wait_in_flight(operator, RANKS)
    epoch = operator.next_epoch()
    state = operator.close(epoch, 2, mode=mode, drainTimeoutSeconds=0.2)
    assert (state.gate, state.in_flight, state.paused) == (Gate.CLOSED, 0, True)
    assert [asking.answer().finish_reason for asking in running] == ["abort"] * RANKS
    operator.do("cancel", epoch)
    for rank in range(RANKS):
        assert (
            client.complete(models.short_prompt, 8, headers=on(rank)).text == models.answer(1, models.short_prompt)[:8]
        )


def test_every_rank_keeps_its_requests(operator: Operator, client: Client, models: Models):
    operator.update(1, "step-1")
    old = client.complete(models.short_prompt, KEPT_ANSWER).text
    digest = models.digest(2)
    running, epoch, _ = catch_running(
        operator, lambda: on_every_rank(client, models, KEPT_ANSWER), RANKS, "keep", "step-2"
    )
    operator.do("arm", epoch)
    operator.transfer(epoch, 2, digest)
    operator.verify(epoch, 2, digest)
    operator.do("open", epoch, version=2, digest=digest)
    for asking in running:
        answer = asking.answer()
        assert answer.finish_reason == "length"
        if SPANS_HEADER not in answer.headers:  # it had not begun
            assert (answer.version, answer.text[:64]) == (2, models.answer(2, models.short_prompt)[:64])
            continue
        first, second = json.loads(answer.headers[SPANS_HEADER])
        assert (first["version"], second["version"]) == (1, 2)
        (change,) = second["fromToken"]
        assert answer.text[:change] == old[:change]
        assert answer.text[change : change + 16] == client.complete(models.short_prompt + old[:change], 16).text


def test_c07_a_transfer_that_fails_on_every_rank_does_not_block_the_next(
    operator: Operator, client: Client, models: Models
):
    operator.update(1, "step-1")
    name = "changing-under-two-ranks"
    shutil.copytree(models.folder(2), models.root / name)
    epoch = operator.next_epoch()
    state = operator.prepare(epoch, 2, name)
    assert state.staged is not None
    damage.flipped_bit(models.root / name)
    operator.close(epoch, 2)
    operator.do("arm", epoch)
    state = operator.finish("transfer", epoch, version=2, digest=state.staged.digest, deadlineSeconds=60)
    assert operation_of(state).failure is not None
    assert state.weights.state.value == "Uncertain"
    operator.update(1, "step-1")
    for rank in range(RANKS):
        answer = client.complete(models.short_prompt, 16, headers=on(rank))
        assert (answer.version, answer.text) == (1, models.answer(1, models.short_prompt)[:16])


def test_c30_ranks_in_requests(operator: Operator, client: Client, models: Models, wide: EngineProcess):
    operator.update(1, "step-1")
    before = answered(client)
    for _ in range(12):
        assert client.complete("abc", 1).status == 200
    spread = [now - then for now, then in zip(answered(client), before, strict=True)]
    assert sum(spread) == 12
    assert min(spread) > 0
    for rank in range(RANKS):
        before = answered(client)
        assert client.complete("abc", 1, headers=on(rank)).status == 200
        assert [now - then for now, then in zip(answered(client), before, strict=True)] == [
            float(each == rank) for each in range(RANKS)
        ]


@pytest.mark.parametrize("name", ["state", "facts", "ranks", "probe", "probe-as-served"])
def test_c30_an_engine_of_several_ranks_conforms(wide: EngineProcess, site: Site, operator: Operator, name: str):
    """What is no rank is refused; a probe is answered by each."""
    operator.update(1, "step-1")
    verdict = run(wide, site, operator, BY_ID[name])
    assert (verdict.result, verdict.faults) == (Result.PASSED, ())


def answered(client: Client) -> list[float]:
    """Requests that each rank has finished, by its own count."""
    text = client.get("/metrics").text
    found = [0.0] * RANKS
    for rank, count in re.findall(r'vllm:request_success_total\{[^}]*engine="(\d+)"[^}]*\} ([0-9.]+)', text):
        found[int(rank)] += float(count)
    return found


# --- router.whenClosed Hold


def wait_held(operator: Operator, count: int) -> None:
    until(lambda: operator.state().held == count, 10, f"{count} requests wait at the gate")


def test_held_requests_get_the_version_at_their_admission(operator: Operator, client: Client, models: Models):
    operator.update(1, "step-1")
    epoch, digest = operator.next_epoch(), models.digest(2)
    operator.prepare(epoch, 2, "step-2")
    operator.close(epoch, 2)
    operator.do("arm", epoch)
    operator.transfer(epoch, 2, digest)
    operator.verify(epoch, 2, digest)
    demands: list[dict[str, str]] = [{}, {"X-Weight-Version-Required": "1"}]
    held = [Asking(client, models.short_prompt, 8, headers) for headers in demands]
    wait_held(operator, 2)
    over = client.complete("abc", 1)
    assert (over.status, over.body["error"]["closedReason"]) == (503, "Updating")
    assert operator.state().held == 2, "who found the queue full was not waited with"
    assert operator.state().in_flight == 0
    operator.do("open", epoch, version=2, digest=digest)
    free, bound = (asking.answer() for asking in held)
    assert (free.status, free.version, free.text) == (200, 2, models.answer(2, models.short_prompt)[:8])
    assert (bound.status, bound.body["error"]["reason"]) == (409, "WrongVersion")
    assert operator.state().held == 0


def test_held_requests_wait_no_longer_than_told_and_leave_with_their_clients(operator: Operator, client: Client):
    operator.update(1, "step-1")
    epoch = operator.next_epoch()
    operator.close(epoch, 2)
    began = time.monotonic()
    patient = Asking(client, "abc", 1, {})
    wait_held(operator, 1)
    with pytest.raises(httpx.ReadTimeout):
        client.http.post("/v1/completions", json={"model": "policy", "prompt": "abc"}, timeout=1)
    wait_held(operator, 1)
    answer = patient.answer()
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert time.monotonic() - began >= HOLD_S - 0.5
    operator.do("cancel", epoch)
    assert client.complete("abc", 1).status == 200


def _or_gone(ask: Callable[[], T]) -> T | None:
    """The answer, or None where the process has ended by now, as it soon does."""
    try:
        return ask()
    except httpx.TransportError:
        return None


def test_a_rank_that_dies_takes_the_whole_engine_out(operator: Operator, client: Client, wide: EngineProcess):
    """Comes last: nothing works after it."""
    operator.update(1, "step-1")
    os.kill(wide.core_pids()[-1], signal.SIGKILL)

    def is_noticed() -> bool:
        state = _or_gone(operator.state)
        return state is None or (not state.alive and state.gate is Gate.CLOSED)

    until(is_noticed, 20, "the guard noticed")
    assert _or_gone(lambda: client.complete("abc", 1).status) in (503, None)
    assert wide.wait(60) not in (0, None)
