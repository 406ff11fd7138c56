"""Agreement of probes."""

from decimal import Decimal

import pytest

from rollfleet_operator.core.probes import Disagreement, agree, compare, unlike
from rollfleet_protocol.state import ProbeResult
from tests.support.builders import LOGPROBS, make_probe

LIMIT = Decimal("0.001")


def test_the_largest_difference_is_told() -> None:
    probes = [(f"e{i}", make_probe(1, logprobs=(-1.0 - i * 1e-4, -2.0))) for i in range(4)]
    found = compare([(name, probe) for name, probe in probes], LIMIT)
    assert found == "0.0003"


def test_two_that_disagree_are_named() -> None:
    probes = [
        ("e0", make_probe(1)),
        ("e1", make_probe(1)),
        ("e2", make_probe(1, logprobs=(-1.0, -2.0, -0.5, -3.0, -0.2))),
    ]
    found = compare([(name, probe) for name, probe in probes], LIMIT)
    assert isinstance(found, Disagreement)
    assert "e2" in found.text
    assert "0.05" in found.text


def test_bit_equality_can_be_asked_for() -> None:
    assert compare([("e0", make_probe(1)), ("e1", make_probe(1))], Decimal(0)) == "0"
    off = make_probe(1, logprobs=(-1.0, -2.0, -0.5, -3.0, -0.25000000001))
    assert isinstance(compare([("e0", make_probe(1)), ("e1", off)], Decimal(0)), Disagreement)


@pytest.mark.parametrize("bad", [None, make_probe(1, logprobs=()), make_probe(1, logprobs=(float("nan"),) * 5)])
def test_no_answer_is_never_agreement(bad: ProbeResult | None) -> None:
    assert isinstance(compare([("e0", make_probe(1)), ("e1", bad)], LIMIT), Disagreement)


def test_different_tokens_cannot_agree() -> None:
    other = make_probe(1).model_copy(update={"tokens": (9, 9, 9, 9, 9, 9)})
    found = compare([("e0", make_probe(1)), ("e1", other)], LIMIT)
    assert isinstance(found, Disagreement)
    assert "different probes" in found.text


def test_every_rank_of_a_data_parallel_engine_counts() -> None:
    agreeing = make_probe(1).model_copy(update={"other_ranks": (make_probe(1).logprobs,)})
    assert compare([("e0", agreeing)], LIMIT) == "0"
    off = make_probe(1).model_copy(update={"other_ranks": ((-1.0, -2.0, -0.5, -3.0, -0.2),)})
    for probed in ([("e0", off)], [("e0", make_probe(1)), ("e1", off)]):
        found = compare(probed, LIMIT)
        assert isinstance(found, Disagreement)
        assert "rank 1" in found.text
    short = make_probe(1).model_copy(update={"other_ranks": ((-1.0,),)})
    assert isinstance(compare([("e0", short)], LIMIT), Disagreement)
    silent = make_probe(1).model_copy(update={"other_ranks": ((),)})
    assert isinstance(compare([("e0", silent)], LIMIT), Disagreement)


def test_one_engine_has_nobody_to_agree_with() -> None:
    assert compare([("e0", make_probe(1))], LIMIT) == ""


OTHER_TOKENS = make_probe(1, logprobs=(-1.0, -2.0)).model_copy(update={"tokens": (9, 9, 9)})


def answers(*firsts: float) -> list[tuple[str, ProbeResult | None]]:
    return [(f"e{i}", make_probe(1, logprobs=(first, -2.0))) for i, first in enumerate(firsts)]


@pytest.mark.parametrize(
    ("firsts", "odd"),
    [
        ((-1.0, -1.0, -1.0), set()),
        ((-1.0, -1.5, -1.0), {"e1"}),
        ((-1.5, -1.0, -1.0005, -0.5, -1.0), {"e0", "e3"}),
        ((-1.0, -1.0009, -1.0015), {"e0"}),
        ((float("nan"), -1.0, -1.0), {"e0"}),
        ((float("nan"), -1.0, -1.5), None),
        ((float("nan"), -1.0), None),
        ((-1.0, -1.5), None),
        ((-1.0, -1.0, -1.5, -1.5), None),
        ((-1.0, -1.1, -1.2), None),
        ((-1.0,) * 9 + (-2.0,) * 4, None),
    ],
)
def test_who_answers_unlike_a_majority(firsts: tuple[float, ...], odd: set[str] | None) -> None:
    found = agree(answers(*firsts), LIMIT, most=3)
    assert isinstance(found, Disagreement) if odd is None else found == odd


@pytest.mark.parametrize("bad", [None, make_probe(1, logprobs=()), make_probe(1, logprobs=(-1.0,)), OTHER_TOKENS])
def test_an_engine_without_a_proper_answer_is_unlike_a_majority(bad: ProbeResult | None) -> None:
    assert agree([("bad", bad), *answers(-1.0, -1.0)], LIMIT, most=1) == {"bad"}
    assert isinstance(agree([("bad", bad), *answers(-1.0)], LIMIT, most=1), Disagreement)
    assert agree([("bad", bad), *answers(-1.0, -1.0, -9.0, -1.0)], LIMIT, most=2) == {"bad", "e2"}
    assert isinstance(agree([("bad", bad), *answers(-1.0, -1.0, -9.0, -1.0)], LIMIT, most=1), Disagreement)


def test_where_nobody_answers_nobody_is_like_the_others() -> None:
    assert isinstance(agree([("e0", None), ("e1", None)], LIMIT, most=3), Disagreement)


OFF = (*LOGPROBS[:-1], LOGPROBS[-1] - 0.05)


def test_the_trainer_s_values_count_as_an_answer() -> None:
    near = tuple(value - 2e-4 for value in LOGPROBS)
    assert compare([("e0", make_probe(1))], LIMIT, near) == "0.0002"
    found = compare([("e0", make_probe(1)), ("e1", make_probe(1))], LIMIT, OFF)
    assert isinstance(found, Disagreement)
    assert found.text.startswith("e1 and the trainer differ by 0.05")
    assert isinstance(compare([("e0", make_probe(1))], LIMIT, LOGPROBS[1:]), Disagreement), "another number of values"


def test_who_answers_unlike_the_trainer_is_out_by_itself_and_all_are_none() -> None:
    other_rank = make_probe(1).model_copy(update={"other_ranks": (OFF,)})
    for bad in (make_probe(1, logprobs=OFF), other_rank, None):
        found = unlike([("e0", make_probe(1)), ("e1", bad), ("e2", make_probe(1))], LIMIT, 10, LOGPROBS)
        assert not isinstance(found, Disagreement)
        assert list(found) == ["e1"]
        assert "e1" in found["e1"]
    found = unlike([("e0", make_probe(1)), ("e1", make_probe(1))], LIMIT, 10, OFF)
    assert isinstance(found, Disagreement)
    assert "no engine answers the probe as the trainer: e0 and the trainer differ by 0.05" in found.text
    many = [("e0", make_probe(1)), *((f"f{i}", make_probe(1, logprobs=OFF)) for i in range(3))]
    assert isinstance(unlike(many, LIMIT, 2, LOGPROBS), Disagreement), "more than may be left out"
    assert unlike(many, LIMIT, 0, ()) == {}
