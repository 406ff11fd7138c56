"""Agreement of probes."""

from decimal import Decimal

import pytest

from rollfleet_operator.core.probes import Disagreement, compare
from rollfleet_protocol.state import ProbeResult
from tests.support.builders import make_probe

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
