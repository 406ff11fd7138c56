"""Answers of vLLM, read: versions of each token, routed experts, and what is no answer of it."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfleet_protocol.refusals import ClosedReason, Refusal, RefusalDetail, RefusalReason
from rollfleet_trainer.asking import CHAT, COMPLETIONS
from rollfleet_trainer.judging import Answered, Demand, Fail, NotSent, Take, Unanswered, Wait, delay_s, judge
from rollfleet_trainer.reading import read_answer
from rollfleet_trainer.rollout_errors import BadAnswerError, RefusedError, RoutedExpertsError, VersionPassedError
from rollfleet_trainer.routing import decode_routed_experts
from rollfleet_trainer.samples import Gathered, Segment
from tests.support.scripted_fleet import encoded

ENGINE = "http://engine:8000"
PROMPT = (1, 2, 3)


def choice(tokens: list[int], **changes: Any) -> dict[str, Any]:
    """Of a completion."""
    return {
        "index": 0,
        "text": "text",
        "finish_reason": "stop",
        "stop_reason": 7,
        "token_ids": tokens,
        "prompt_token_ids": list(PROMPT),
        "logprobs": {"token_logprobs": [-0.5] * len(tokens)},
    } | changes


def read(found: dict[str, Any], route: str = COMPLETIONS, **headers: str) -> Segment:
    told = {"x-weight-version": "7"} | {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"choices": [found], "prompt_token_ids": list(PROMPT)}
    return read_answer(route, told, json.dumps(body).encode(), ENGINE, PROMPT, logprobs=True)


def spans(*told: tuple[int, int | None]) -> str:
    return json.dumps([{"version": version, "fromToken": [start]} for version, start in told])


@pytest.mark.parametrize(
    ("told", "versions"),
    [
        (spans((7, 0), (8, 2)), (7, 7, 8, 8)),
        (spans((7, 0), (8, 0)), (8, 8, 8, 8)),
        (spans((7, 0), (8, 2), (9, 3)), (7, 7, 8, 9)),
        (spans((7, 0), (8, 4)), (7, 7, 7, 7)),
        (spans((7, 0), (8, None)), (7, 7, 7, 7)),
    ],
)
def test_spans_of_a_kept_answer(told: str, versions: tuple[int, ...]) -> None:
    assert read(choice([1, 2, 3, 4]), x_weight_version_spans=told).versions == versions


@pytest.mark.parametrize(
    ("found", "headers", "words"),
    [
        (choice([1]), {"x_weight_version": ""}, "no guard of rollfleet stands there"),
        (choice([1]), {"x_weight_version": "seven"}, "no guard of rollfleet"),
        (choice([1]), {"x_weight_version_spans": "[7"}, "cannot be read"),
        (choice([1, 2], logprobs={"token_logprobs": [-1.0]}), {}, "2 tokens came with 1 logprobs"),
        (choice([1], logprobs=None), {}, "1 tokens came with 0 logprobs"),
        (choice([1], logprobs={"token_logprobs": [None]}), {}, "is not vLLM's"),
        (choice([1], token_ids=None), {}, "is not vLLM's"),
        (choice([-1]), {}, "is not vLLM's"),
        (choice([1 << 31]), {}, "is not vLLM's"),
        (choice([1]), {"x_weight_version": "9" * 5000}, "no guard of rollfleet"),
        (choice([1]), {"x_weight_version_spans": "[" * 50000}, "cannot be read"),
        (choice([1], finish_reason=None), {}, "finish_reason None"),
        ({}, {}, "is not vLLM's: KeyError: 'token_ids'"),
    ],
)
def test_what_is_no_answer(found: dict[str, Any], headers: dict[str, str], words: str) -> None:
    with pytest.raises(BadAnswerError, match=words) as raised:
        read(found, **headers)
    assert ENGINE in str(raised.value)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"choices": []}', b"<html>", b"\xff"])
def test_what_is_not_even_json(raw: bytes) -> None:
    with pytest.raises(BadAnswerError, match="is not vLLM's"):
        read_answer(CHAT, {"x-weight-version": "1"}, raw, ENGINE, (), logprobs=False)


def test_text_that_a_parser_took_apart_is_none() -> None:
    content = {"content": [{"token": "a", "logprob": -0.5}]}
    message = {"role": "assistant", "content": "42", "reasoning": None, "tool_calls": []}
    whole = read(choice([1], message=message, logprobs=content), CHAT)
    assert (whole.text, whole.message) == ("42", message)
    for part in ({"reasoning": "hm"}, {"tool_calls": [{"id": "1"}]}):
        found = read(choice([1], message=message | part, logprobs=content), CHAT)
        assert (found.text, found.message) == (None, message | part)


def test_an_answer_that_is_too_deep_is_none() -> None:
    raw = b'{"choices": ' + b"[" * 200_000
    with pytest.raises(BadAnswerError, match="RecursionError"):
        read_answer(COMPLETIONS, {"x-weight-version": "7"}, raw, ENGINE, PROMPT, logprobs=True)


# --- routed experts


@given(
    tokens=st.integers(1, 40),
    layers=st.integers(1, 4),
    experts=st.integers(1, 4),
    dtype=st.sampled_from([np.uint8, np.uint16, np.int32]),
)
def test_routing_comes_back_as_it_was(tokens: int, layers: int, experts: int, dtype: type[Any]) -> None:
    array = np.arange((tokens - 1) * layers * experts).reshape(tokens - 1, layers, experts).astype(dtype)
    found = decode_routed_experts(encoded(array), tokens)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert (found == array).all()


def test_routing_in_the_other_order_of_elements_is_the_same() -> None:
    array = np.asfortranarray(np.arange(24, dtype=np.int16).reshape(4, 3, 2))
    assert (decode_routed_experts(encoded(array), 5) == array).all()


def npy(header: str) -> str:
    """A file without data, by a header that numpy would evaluate, and believe."""
    return base64.b64encode(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()).decode()


ROUTED = np.ones((4, 2, 2), dtype=np.uint8)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("%%%", "cannot be decoded"),
        ("", "is no .npy file"),
        (base64.b64encode(b"not numpy").decode(), "is no .npy file"),
        (encoded(ROUTED)[:-8], "cannot be decoded|follow"),
        (base64.b64encode(base64.b64decode(encoded(ROUTED)) + b"x").decode(), "17 bytes follow its header"),
        (encoded(np.array([[[{"a": 1}]]] * 4, dtype=object), allow_pickle=True), "is no .npy file of integers"),
        (encoded(ROUTED.astype(np.float32)), "is no .npy file of integers.*<f4"),
        (encoded(ROUTED[0]), "is no .npy file of integers in 3 dimensions"),
        (encoded(ROUTED[:3]), "has 3 rows, 5 tokens have 4"),
        (encoded(np.full((4, 2, 2), -1, dtype=np.int32)), "names expert -1"),
        (
            npy("{'descr': '<i8', 'fortran_order': False, 'shape': (4, 999999999, 999999999), }"),
            "0 bytes follow its head",
        ),
        (npy("{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999999999, 1, 1), }"), "is no .npy file"),
        (npy("{'descr': '<i8', 'fortran_order': False, 'shape': (4, 2, -2), }"), "is no .npy file"),
        (npy("{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (4, 2, 2), }"), "is no .npy file"),
        (npy("(" * 5000), "is no .npy file"),
        (npy("{'descr': '<i8"), "is no .npy file"),
        (base64.b64encode(b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}").decode(), "is no .npy file"),
    ],
)
def test_what_is_no_routing_of_these_tokens(told: str, words: str) -> None:
    with pytest.raises(RoutedExpertsError, match=words):
        decode_routed_experts(told, 5)


def test_of_an_aborted_answer_only_routing_that_fits() -> None:
    whole = encoded(ROUTED)
    assert read(choice([1, 2], routed_experts=whole)).routed_experts is not None
    assert read(choice([1, 2, 3], routed_experts=whole, finish_reason="abort")).routed_experts is None
    assert read(choice([1, 2], routed_experts=whole, finish_reason="abort")).routed_experts is not None
    with pytest.raises(RoutedExpertsError):
        read(choice([1, 2, 3], routed_experts=whole))


@pytest.mark.parametrize(
    ("demand", "allowed"),
    [
        (Demand(), "3 4 5"),
        (Demand(required=4), "4"),
        (Demand(minimum=4), "4 5"),
        (Demand(required=0), ""),
        (Demand(minimum=0), "3 4 5"),
    ],
)
def test_an_answer_by_another_version_than_was_demanded_is_none(demand: Demand, allowed: str) -> None:
    """What stands between may drop headers that it does not know; the engine never heard of the demand then."""
    for version in "345":
        verdict = judge(Answered(200, {"x-weight-version": version}), demand, ENGINE)
        if version in allowed:
            assert verdict == Take()
        else:
            assert isinstance(verdict, Fail)
            assert isinstance(verdict.error, BadAnswerError)
            assert "drop that header" in str(verdict.error)


def segment(prompt: int, tokens: int, mark: int, *, routed: bool = True) -> Segment:
    rows = np.full((prompt + tokens - 1, 2, 1), mark, dtype=np.uint8) if routed else None
    some = tuple(range(tokens))
    return Segment(tuple(range(prompt)), some, None, (mark,) * tokens, "abort", None, "x", None, rows, ENGINE)


def test_a_continued_sample_has_the_routing_of_who_generated_each_token() -> None:
    gathered = Gathered()
    gathered.add(segment(3, 4, 1))  # rows 0 to 5
    gathered.add(segment(7, 2, 2))  # computes rows 0 to 5 anew; rows 6 and 7 are its own
    found = gathered.sample("stop").routed_experts
    assert found is not None
    assert found[:, 0, 0].tolist() == [1] * 6 + [2] * 2
    assert len(found) == 3 + 6 - 1
    gathered.add(segment(9, 0, 3, routed=False))  # nothing of it is in the sample
    assert gathered.sample("stop").routed_experts is not None
    gathered.add(segment(9, 1, 4, routed=False))
    assert gathered.sample("stop").routed_experts is None


# --- judging


def refusal(status: int, reason: RefusalReason, closed: ClosedReason | None = None, **headers: str) -> Answered:
    detail = RefusalDetail(message="words", code=status, reason=reason, closed_reason=closed)
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answered(status, told, Refusal(error=detail).model_dump_json(by_alias=True).encode())


ANY = Demand()


@pytest.mark.parametrize("closed", list(ClosedReason))
def test_a_closed_gate_is_waited_for(closed: ClosedReason) -> None:
    found = judge(refusal(503, RefusalReason.CLOSED, closed, retry_after="3"), ANY, "x")
    assert found == Wait("x: HTTP 503: words", 3.0)


@pytest.mark.parametrize("reason", [each for each in RefusalReason if each is not RefusalReason.CLOSED])
@pytest.mark.parametrize("status", [400, 404, 408, 413, 429, 500, 503])
def test_every_other_refusal_is_an_end(reason: RefusalReason, status: int) -> None:
    found = judge(refusal(status, reason), ANY, "x")
    assert isinstance(found, Fail)
    assert isinstance(found.error, RefusedError)
    assert found.error.status == status


def test_judgements() -> None:
    assert judge(Answered(200), ANY, "x") == Take()
    assert judge(NotSent("refused"), ANY, "x") == Wait("x: refused")
    assert isinstance(judge(Unanswered("reset"), ANY, "x"), Fail)
    assert isinstance(judge(Unanswered("reset"), ANY, "x", resend_unanswered=True), Wait)
    assert isinstance(judge(Answered(503, {}, b"No available workers"), ANY, "x"), Wait)
    assert isinstance(judge(Answered(503, {}, b"upstream connect error"), ANY, "x"), Fail)
    wrong = refusal(409, RefusalReason.WRONG_VERSION, x_weight_version="5")
    assert isinstance(judge(wrong, Demand(required=6), "x"), Wait)
    assert isinstance(judge(wrong, Demand(minimum=6), "x"), Wait)
    passed = judge(wrong, Demand(required=4), "x")
    assert isinstance(passed, Fail)
    assert isinstance(passed.error, VersionPassedError)
    assert isinstance(judge(refusal(409, RefusalReason.WRONG_VERSION), Demand(required=4), "x"), Wait)


@given(status=st.integers(100, 599).filter(lambda each: each != 200), body=st.binary(max_size=200))
def test_whatever_comes_is_judged(status: int, body: bytes) -> None:
    found = judge(Answered(status, {"retry-after": "x"}, body), ANY, "x")
    assert isinstance(found, Fail)


@given(tries=st.integers(0, 10**6), after_s=st.one_of(st.none(), st.floats(0, 60)), chance=st.floats(0, 0.999))
def test_there_is_a_pause_before_each_try(tries: int, after_s: float | None, chance: float) -> None:
    pause = delay_s(tries, after_s, chance)
    assert 0.05 <= pause <= 75
    if after_s is not None:
        assert pause >= after_s


def test_who_demands_two_versions_gets_none() -> None:
    with pytest.raises(ValueError, match="one of them"):
        Demand(1, 2)
