"""`rollfleet verify`: nothing passes that differs, is silent, or is not there."""

from typing import Any

import pytest

from rollfleet_cli.asking import Answer
from rollfleet_cli.verifying import Verification, probe_of, verify
from rollfleet_operator.api.rolloutengine import Committed, Previous, RolloutEngine
from rollfleet_operator.api.weightversion import Probe
from rollfleet_protocol.state import Gate, ProbeReport, Weights, WeightsState
from tests.support.cli import NOW, make_condition, make_fleet, make_version

TOKENS = (1, 2, 3)
LOGPROBS = (-1.0, -2.0)


def report(version: int = 3, **changes: Any) -> ProbeReport:
    given: dict[str, Any] = {
        "incarnation": "i",
        "epoch": 4,
        "gate": Gate.OPEN,
        "weights": weights(version),
        "tokens": TOKENS,
        "by_rank": (LOGPROBS,),
        "seconds": 0.01,
    }
    return ProbeReport(**(given | changes))


def weights(version: int, digest: str | None = "", state: WeightsState = WeightsState.VERIFIED) -> Weights:
    return Weights(state=state, version=version, digest=f"sha256:{version}" if digest == "" else digest)


def fleet_at(version: int = 3, digest: str | None = "sha256:3") -> RolloutEngine:
    return make_fleet(committed=Committed(version=version, digest=digest, time=NOW))


def verified(*reports: ProbeReport | str, fleet: RolloutEngine | None = None) -> Verification:
    """A string is why an engine said nothing."""
    answers = tuple(
        Answer(f"qwen-{place}", f"u-{place}", error=each)
        if isinstance(each, str)
        else Answer(f"qwen-{place}", f"u-{place}", each)
        for place, each in enumerate(reports)
    )
    return verify(fleet or fleet_at(), Probe(), answers)


def test_engines_that_hold_and_say_the_same_pass() -> None:
    found = verified(report(), report())
    assert found.holds
    assert (found.committed, found.digest, found.max_abs_logprob_diff) == (3, "sha256:3", "0")
    assert found.to_json()["holds"] is True


PROBLEMS: dict[str, tuple[list[ProbeReport | str], str]] = {
    "another version": ([report(), report(2)], "qwen-1: holds version 2, and 3 is committed"),
    "another digest": (
        [report(), report(weights=weights(3, "sha256:x"))],
        "qwen-1: holds digest sha256:x, and sha256:3 is committed",
    ),
    "no digest": ([report(weights=weights(3, None)), report()], "qwen-0: holds digest none, and sha256:3 is committed"),
    "not verified": (
        [report(), report(weights=weights(3, state=WeightsState.UNCERTAIN))],
        "qwen-1: its weights are Uncertain",
    ),
    "another answer": (
        [report(), report(by_rank=((-1.0, -2.5),)), report()],
        "qwen-1: answers the probe unlike the others, by more than 0.001",
    ),
    "two answers": ([report(), report(by_rank=((-1.0, -2.5),))], "qwen-0 and qwen-1 differ by 0.5"),
    "a rank apart": ([report(by_rank=(LOGPROBS, (-9.0, -2.0))), report()], "qwen-0"),
    "no numbers": ([report(by_rank=((float("nan"), -2.0),)), report()], "qwen-0 has no answer to the probe"),
    "no answer at all": ([report(by_rank=()), report()], "qwen-0 has no answer to the probe"),
    "silence": ([report(), "connection refused"], "qwen-1: can't be asked: connection refused"),
    "missing": ([report()], "1 of 2 engines have no pod"),
    "nobody": ([], "2 of 2 engines have no pod"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_is_wrong_is_named(case: str) -> None:
    reports, words = PROBLEMS[case]
    found = verified(*reports)
    assert not found.holds
    assert words in found.words


def test_a_fleet_scaled_to_nothing_or_without_commit_is_not_well() -> None:
    empty = fleet_at()
    empty = empty.model_copy(update={"spec": empty.spec.model_copy(update={"replicas": 0})})
    assert verified(fleet=empty).words == "the fleet has no engines"
    assert "nothing is committed" in verified(report(), report(), fleet=make_fleet()).words


def test_version_0_has_a_digest_only_where_it_was_loaded_again() -> None:
    fleet = fleet_at(0, None)
    start, again = report(weights=weights(0, None)), report(weights=weights(0, "sha256:m"))
    assert verified(start, again, fleet=fleet).holds
    other = report(weights=weights(0, "sha256:x"))
    assert "most hold sha256:m" in verified(again, again, other, fleet=fleet).words


def test_the_fleets_own_probe_is_asked() -> None:
    version = make_version(3)
    probe = Probe(tokens=(7, 8), max_abs_logprob_diff="0")
    own = version.spec.model_copy(update={"verify": version.spec.verify.model_copy(update={"probe": probe})})
    assert probe_of(version.model_copy(update={"spec": own})).tokens == (7, 8)
    assert probe_of(None) == Probe()
    answers = (Answer("a", "a", report()), Answer("b", "b", report(by_rank=((-1.0, -2.0001),))))
    assert verify(fleet_at(), Probe(), answers).holds
    assert not verify(fleet_at(), probe, answers).holds, "equal to the last bit was asked for"


def rolling(previous: str | None = "sha256:2") -> RolloutEngine:
    before = Previous(version=2, digest=previous)
    return make_fleet(committed=Committed(version=3, digest="sha256:3", time=NOW, previous=before))


OTHER = ((-5.0, -6.0),)


@pytest.mark.parametrize("digest", ["sha256:2", None])
def test_a_fleet_that_rolls_is_called_so_and_versions_are_not_compared_with_each_other(digest: str | None) -> None:
    found = verified(report(), report(2, by_rank=OTHER), report(2, by_rank=OTHER), fleet=rolling(digest))
    assert not found.holds
    assert found.problems == (
        "the fleet rolls from version 2 to version 3 (condition MixedVersions): ask again when it has",
    )
    behind = ("holds version 2 until the roll to 3 comes to it",)
    assert [engine.problems for engine in found.engines] == [(), behind, behind]
    assert (found.digest, found.max_abs_logprob_diff) == ("sha256:3", "0")


def test_engines_that_have_not_moved_are_compared_with_each_other() -> None:
    found = verified(report(), report(2), report(2), report(2, by_rank=OTHER), fleet=rolling())
    assert "answers the probe unlike the others, by more than 0.001" in found.engines[3].problems
    assert "answers the probe" not in found.engines[2].problems[0]


def test_a_version_that_is_neither_is_wrong_in_a_roll_too() -> None:
    found = verified(report(), report(2, weights=weights(2, "sha256:x")), report(1), fleet=rolling())
    assert "holds version 2, and 3 is committed" in found.engines[1].problems
    assert "holds version 1, and 3 is committed" in found.engines[2].problems


def test_an_update_that_has_closed_engines_is_named_where_one_says_nothing() -> None:
    fleet = fleet_at()
    updating = make_condition("Progressing", reason="Updating")
    closed = fleet.model_copy(update={"status": fleet.status.model_copy(update={"conditions": (updating,)})})
    assert "an update has closed engines" in verified(report(), "the gate is closed", fleet=closed).words
    assert verified(report(), report(), fleet=closed).holds, "all have answered all the same"
    assert "an update" not in verified(report(), "no route to host").words
