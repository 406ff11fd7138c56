"""Driving checks: updates that come between, probes that wait their turn, silent engines, tokens that are no good."""

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from rollfleet_cli.conformance import running
from rollfleet_cli.conformance.checks.catalogue import CHECKS, ENGINE_CHECKS
from rollfleet_cli.conformance.checks.check import Fault, Steps, Subject
from rollfleet_cli.conformance.checks.wire import Call, Exchange, Identity, Port, get
from rollfleet_cli.conformance.choosing import choose
from rollfleet_cli.conformance.forging import forged
from rollfleet_cli.conformance.running import Result, judged, member_of, run_check
from rollfleet_cli.errors import NotPossibleError
from rollfleet_protocol.refusals import ClosedReason, RefusalReason
from rollfleet_protocol.state import Gate
from tests.support.honest_engine import STATE, HonestEngine, make_subject, refuse

BY_ID = {check.id: check for check in ENGINE_CHECKS}
ANSWERS, PROBE = BY_ID["version-on-answers"], BY_ID["probe"]


class Scripted(HonestEngine):
    """Closes, moves on or is busy for its first calls."""

    def __init__(self, closed: int = 0, busy: int = 0, wrong: int = 0) -> None:
        super().__init__()
        self.closed, self.busy, self.wrong = closed, busy, wrong

    async def carry(self, call: Call) -> Exchange:
        if call.port is Port.SERVING and self.closed:
            self.closed -= 1
            self.state = self.state.model_copy(update={"epoch": self.state.epoch + 1})
            return refuse(call, 503, RefusalReason.CLOSED, closed_reason=ClosedReason.UPDATING)
        if call.path == "/rollfleet/v1/probe" and self.busy:
            self.busy -= 1
            return refuse(call, 429, RefusalReason.BUSY)
        answer = await super().carry(call)
        if call.port is Port.SERVING and self.wrong:
            self.wrong -= 1
            self.state = self.state.model_copy(update={"epoch": self.state.epoch + 1})
            return replace(answer, headers=())
        return answer


async def test_a_check_that_an_update_interrupts_is_done_anew() -> None:
    for engine in (Scripted(closed=2), Scripted(wrong=1)):
        assert (await run_check(ANSWERS, engine, make_subject())).result is Result.PASSED
    often = await run_check(ANSWERS, Scripted(closed=99), make_subject())
    assert (often.result, often.late) == (Result.SKIPPED, True)
    assert "updates interrupted it" in often.skipped


async def test_a_closed_engine_is_waited_for_and_then_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "OPENS_S", 0.0)
    engine = HonestEngine(state=STATE.model_copy(update={"gate": Gate.CLOSED, "closed_reason": "Uncertain"}))
    verdict = await run_check(BY_ID["state"], engine, make_subject())
    assert verdict.result is Result.FAILED
    assert "Uncertain" in verdict.faults[0].cause


async def test_another_probe_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "BUSY_S", 0.0)
    assert (await run_check(PROBE, Scripted(busy=3), make_subject())).result is Result.PASSED
    member = await member_of(Scripted(busy=3), make_subject())
    assert member.report is not None
    busy = await member_of(Scripted(busy=99), make_subject())
    assert (busy.report, "429" in busy.error) == (None, True)


async def test_an_engine_that_says_nothing_fails_in_time() -> None:
    class Silent(HonestEngine):
        async def carry(self, call: Call) -> Exchange:
            await asyncio.Event().wait()
            raise AssertionError

    verdict = await run_check(ANSWERS, Silent(), make_subject(), within_s=0.05)
    assert verdict.result is Result.FAILED
    assert "within" in verdict.faults[0].cause
    dumb = await run_check(ANSWERS, HonestEngine(lambda each: Exchange(each.call, error="reset")), make_subject())
    assert (dumb.result, dumb.faults[0].told) == (Result.FAILED, "reset")


async def test_what_a_check_cannot_judge_is_a_fault_of_that_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(_: Subject) -> Steps:
        (answer,) = yield (get("/health"),)
        return (Fault(str(1 // len(answer.body))),)

    def silent(each: Exchange) -> Exchange:
        return replace(each, body=b"") if each.call.path == "/health" else each

    check = replace(ANSWERS, run=steps)
    verdict = await run_check(check, HonestEngine(silent), make_subject())
    assert (verdict.result, verdict.faults[0].told) == (
        Result.FAILED,
        "ZeroDivisionError: integer division or modulo by zero",
    )
    assert judged(lambda: (Fault(str({}["absent"])),))[0].cause == verdict.faults[0].cause
    assert judged(lambda: ()) == ()


async def test_what_the_spec_does_not_ask_for_is_skipped() -> None:
    config = make_subject().config
    plain = config.model_copy(
        update={
            "features": type(config.features)(),
            "rl_config": config.rl_config.model_copy(update={"enable_batch_invariant": False}),
        }
    )
    subject = make_subject(config=plain, missing={Identity.OTHER_ACCOUNT: "not allowed"})
    skipped = {check.id for check in ENGINE_CHECKS if check.unless(subject)}
    optional = {"token-endpoint", "tool-calling", "routed-experts", "trace-replay", "batch-invariance"}
    assert skipped == optional | {"other-account"}
    verdict = await run_check(BY_ID["trace-replay"], HonestEngine(), subject)
    assert (verdict.result, verdict.late) == (Result.SKIPPED, False)


def test_checks_have_names_of_their_own_and_are_told() -> None:
    assert len(CHECKS) == len({check.title for check in CHECKS.values()})
    for check in CHECKS.values():
        assert check.id == check.id.lower()
        assert check.title
        assert check.remedy


@pytest.mark.parametrize("algorithm", ["RS256", "ES256"])
def test_forged_tokens_are_well_made_and_none_is_good(algorithm: str) -> None:
    key = (
        rsa.generate_private_key(public_exponent=65537, key_size=2048)
        if algorithm == "RS256"
        else ec.generate_private_key(ec.SECP256R1())
    )
    token = jwt.encode({"sub": "s", "aud": "a", "exp": 2**40}, key, algorithm=algorithm, headers={"kid": "k"})
    made = forged(token)
    assert set(made) == {
        Identity.GARBAGE,
        Identity.ALG_NONE,
        Identity.SHARED_SECRET,
        Identity.FORGED_KEY,
        Identity.CHANGED_CLAIMS,
    }
    for identity, text in made.items():
        with pytest.raises(jwt.PyJWTError):
            jwt.decode(text, key.public_key(), algorithms=[algorithm], audience="a")
        if identity is not Identity.GARBAGE:
            header = json.loads(base64.urlsafe_b64decode(text.split(".")[0] + "=="))
            assert header["kid"] == "k"
    claims = jwt.decode(made[Identity.FORGED_KEY], options={"verify_signature": False})
    assert claims["sub"] == "s"


def pods(count: int) -> tuple[dict[str, Any], ...]:
    return tuple({"metadata": {"name": f"qwen-{n}-0-x{n}"}, "spec": {}} for n in range(count))


def names(*chosen: Any) -> list[str]:
    return [pod["metadata"]["name"] for pod in chosen]


def test_a_few_of_many_are_asked_or_those_that_are_named() -> None:
    assert names(*choose(pods(3), (), everything=False).pods) == names(*pods(3))
    sample = choose(pods(9), (), everything=False)
    assert (names(*sample.pods), sample.present) == (["qwen-0-0-x0", "qwen-4-0-x4", "qwen-8-0-x8"], 9)
    assert "--all" in sample.how
    assert len(choose(pods(9), (), everything=True).pods) == 9
    assert names(*choose(pods(12), ("qwen-1", "qwen-4-0-x4", "qwen-1"), everything=False).pods) == [
        "qwen-1-0-x1",
        "qwen-4-0-x4",
    ]
    for wanted in ("qwen", "qwen-9"):
        with pytest.raises(NotPossibleError, match="engines are called"):
            choose(pods(3), (wanted,), everything=False)
    going = tuple(pod | {"metadata": pod["metadata"] | {"deletionTimestamp": "now"}} for pod in pods(2))
    with pytest.raises(NotPossibleError, match="no engine"):
        choose(going, (), everything=False)
