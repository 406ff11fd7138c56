"""A plan: the same seed gives the same faults, every rule strikes exactly its calls, and mistakes are named."""

import io
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfleet_engine.faults import __main__ as replay
from rollfleet_engine.faults.injector import LOGGER, Injector, plan_of_log, told
from rollfleet_engine.faults.plan import (
    DRAWN,
    LONGEST_S,
    Call,
    FaultType,
    Plan,
    PlanError,
    Rule,
    drawn_plan,
    parse_plan,
    read_plan,
)
from rollfleet_engine.guard.log import GuardLog

CALLS = st.sampled_from([Call.PREPARE, Call.TRANSFER, Call.STATE, Call.INFERENCE])
HTTP_FAULTS = st.sampled_from([FaultType.REFUSE, FaultType.DELAY, FaultType.CUT, FaultType.BAD_GATEWAY, FaultType.DIE])
NUMBERS = st.integers(1, 60)


@st.composite
def rules(draw) -> Rule:
    by_number = draw(st.booleans())
    return Rule(
        call=draw(CALLS),
        fault=draw(HTTP_FAULTS),
        at=draw(st.lists(NUMBERS, min_size=1, max_size=4)) if by_number else (),
        probability=None if by_number else draw(st.floats(0.01, 1)),
        until=None if by_number else draw(st.none() | NUMBERS),
        times=draw(st.none() | st.integers(1, 5)),
    )


PLANS = st.builds(Plan, seed=st.integers(), rules=st.lists(rules(), max_size=5))


def injector_of(plan: Plan) -> tuple[Injector, io.StringIO]:
    """One that logs to memory."""
    stream = io.StringIO()
    return Injector(plan, GuardLog({}, stream, LOGGER)), stream


@given(PLANS, st.lists(CALLS, max_size=80), st.randoms(use_true_random=False))
def test_faults_depend_on_the_seed_and_the_number_of_the_call_alone(
    plan: Plan, calls: list[Call], shuffler: random.Random
):
    def lived(order: list[Call]) -> dict[tuple[Call, int], Rule]:
        injector, _ = injector_of(plan)
        struck = [(call, injector.strike(call)) for call in order]
        return {(call, strike.number): strike.rule for call, strike in struck if strike is not None}

    other = list(calls)
    shuffler.shuffle(other)
    assert lived(calls) == lived(other)


@given(st.lists(NUMBERS, min_size=1, max_size=5), st.integers(1, 6))
def test_a_rule_strikes_exactly_its_calls(at: list[int], times: int):
    plan = Plan(rules=(Rule(call=Call.CLOSE, fault=FaultType.CUT, at=tuple(at), times=times),))
    struck = {number for number in range(1, 100) if plan.strike(Call.CLOSE, number)}
    assert struck == {first + more for first in at for more in range(times)}
    assert not any(plan.strike(Call.ARM, number) for number in range(1, 100))


@given(st.integers(), st.floats(0.01, 1), st.integers(1, 200))
def test_drawn_faults_end_where_they_must(seed: int, probability: float, until: int):
    rule = Rule(call=Call.STATE, fault=FaultType.BAD_GATEWAY, probability=probability, until=until)
    plan = Plan(seed=seed, rules=(rule,))
    assert not any(plan.strike(Call.STATE, number) for number in range(until + rule.lasts, until + 100))


@given(PLANS, st.lists(CALLS, max_size=60))
def test_what_was_done_is_told_so_that_it_can_be_done_again(plan: Plan, calls: list[Call]):
    first, stream = injector_of(plan)
    struck = [first.strike(call) for call in calls]
    again, _ = injector_of(plan_of_log(["noise", *stream.getvalue().splitlines(), "more {noise}"]))
    repeated = [again.strike(call) for call in calls]
    assert [told(s.rule, s.number) if s else None for s in repeated] == [
        told(s.rule, s.number) if s else None for s in struck
    ]


def test_502_comes_twice_unless_told_otherwise():
    rule = Rule(call=Call.VERIFY, fault=FaultType.BAD_GATEWAY, at=(3,))
    plan = Plan(rules=(rule,))
    assert [n for n in range(1, 9) if plan.strike(Call.VERIFY, n)] == [3, 4]


def test_of_several_rules_the_first_one_counts():
    first = Rule(call=Call.OPEN, fault=FaultType.DIE, at=(2,))
    second = Rule(call=Call.OPEN, fault=FaultType.CUT, at=(1, 2))
    plan = Plan(rules=(first, second))
    assert [plan.strike(Call.OPEN, n) for n in (1, 2, 3)] == [second, first, None]


def test_the_seed_s_own_mix_hits_as_often_as_it_says():
    for rule in DRAWN:
        plan = Plan(seed=11, rules=(rule,))
        hits = sum(plan.strike(rule.call, n) is not None for n in range(1, 4001)) / rule.lasts
        assert rule.probability is not None
        assert hits / 4000 == pytest.approx(rule.probability, rel=0.5)
    assert {rule.fault for rule in DRAWN} == set(FaultType)
    assert drawn_plan(3) == drawn_plan(3)
    ways = {tuple(drawn_plan(seed).strike(Call.TRANSFER, n) is None for n in range(1, 40)) for seed in range(10)}
    assert len(ways) == 10


def test_a_rule_left_out_changes_no_other():
    plan = drawn_plan(5)
    fewer = plan.model_copy(update={"rules": tuple(rule for rule in plan.rules if rule.fault is not FaultType.CORRUPT)})
    for call in Call:
        for number in range(1, 300):
            strike = plan.strike(call, number)
            if strike is not None and strike.fault is not FaultType.CORRUPT:
                assert fewer.strike(call, number) == strike


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"call": "transfers", "fault": "die", "at": [1]}, "rules.0.call"),
        ({"call": "transfer", "fault": "explode", "at": [1]}, "rules.0.fault"),
        ({"call": "transfer", "fault": "die", "at": [0]}, "rules.0.at.0"),
        ({"call": "transfer", "fault": "die"}, "at (numbers of calls, from 1) or probability"),
        ({"call": "transfer", "fault": "die", "at": [1], "probability": 0.5}, "either at"),
        ({"call": "transfer", "fault": "die", "at": [1], "until": 5}, "until belongs to probability"),
        ({"call": "transfer", "fault": "die", "at": [1], "seconds": 5}, "seconds belongs to delay, hang, not to die"),
        ({"call": "transfer", "fault": "hang", "at": [1], "seconds": LONGEST_S + 1}, "rules.0.seconds"),
        ({"call": "transfer", "fault": "refuse", "at": [1], "status": 200}, "rules.0.status"),
        ({"call": "transfer", "fault": "skip", "at": [1]}, "skip is for engine.apply and prepare, not for transfer"),
        ({"call": "close", "fault": "corrupt", "at": [1]}, "corrupt is for prepare and transfer, not for close"),
        ({"call": "engine.pause", "fault": "cut", "at": [1]}, "cut is for calls over HTTP"),
        ({"call": "engine.pause", "fault": "refuse", "at": [1], "status": 500}, "status is HTTP's"),
        ({"call": "transfer", "fault": "die", "at": [1], "when": "now"}, "rules.0.when"),
        ({"call": "transfer", "fault": "die", "at": [1], "times": 1000}, "rules.0.times"),
    ],
)
def test_mistakes_are_named(tmp_path, rule, words):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"rules": [rule]}))
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    assert "Value error" not in str(caught.value)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_are_no_plans(tmp_path):
    with pytest.raises(PlanError, match="No such file"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(PlanError, match=r"the file: Invalid JSON"):
        parse_plan("rules: []", "plan.yaml")
    large = tmp_path / "large.json"
    large.write_text(" " * (1 << 20) + "{}")
    with pytest.raises(PlanError, match="larger than"):
        read_plan(large)


def test_another_seed_than_the_file_s(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"seed": 1, "rules": [{"call": "arm", "fault": "cut", "probability": 0.5}]}')
    assert (read_plan(path).seed, read_plan(path, 7).seed) == (1, 7)


def test_a_new_plan_counts_anew_and_a_bad_one_changes_nothing():
    old, new = (Plan(rules=(Rule(call=Call.ARM, fault=fault, at=(1,)),)) for fault in (FaultType.CUT, FaultType.DIE))
    injector, stream = injector_of(old)
    assert injector.strike(Call.ARM) is not None

    def unreadable() -> Plan:
        raise PlanError("half-written")

    injector.replace(unreadable)
    assert injector.plan is old
    assert "half-written" in stream.getvalue()
    assert injector.counts() == {"arm": 1}
    injector.replace(lambda: new)
    strike = injector.strike(Call.ARM)
    assert strike is not None
    assert strike.rule.fault is FaultType.DIE


def test_counts_outlive_a_restart():
    plan = Plan(rules=(Rule(call=Call.ARM, fault=FaultType.RESTART, at=(2,)),))
    first, _ = injector_of(plan)
    first.strike(Call.ARM)
    first.strike(Call.ARM)
    second = Injector(plan, GuardLog({}, io.StringIO(), LOGGER), first.counts())
    assert second.strike(Call.ARM) is None
    assert second.counts() == {"arm": 3}


def test_the_log_as_a_plan(tmp_path, capsys):
    injector, stream = injector_of(Plan(seed=4, rules=(Rule(call=Call.ARM, fault=FaultType.CUT, probability=1),)))
    injector.strike(Call.ARM)
    log = tmp_path / "log"
    log.write_text("vLLM says hello\n" + stream.getvalue())
    assert replay.main([str(log)]) == 0
    assert parse_plan(capsys.readouterr().out, "replay") == Plan(
        seed=4, rules=(Rule(call=Call.ARM, fault=FaultType.CUT, at=(1,), times=1),)
    )
    assert replay.main([str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
