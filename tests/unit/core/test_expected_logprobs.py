"""spec.verify.probe.expectedLogprobs: engines that hold the trainer's bytes must also compute what the trainer does."""

import pytest

from rollfleet_operator.api.weightversion import Phase, Probe, VerifySpec
from tests.support.simulated_engine import probe_logprob
from tests.support.simulated_pushes import NO_RETRY, make_world, push
from tests.support.simulated_trainer import Trainer, digest_sent
from tests.support.simulated_updates import condition

TOKENS = (4, 5, 6)


def expecting(version: int, off: float = 0.0) -> VerifySpec:
    """The values of an honest engine, or others."""
    values = [probe_logprob(digest_sent(version), token) + off for token in TOKENS[1:]]
    return VerifySpec(probe=Probe(tokens=TOKENS, expected_logprobs=tuple(f"{value:.12f}" for value in values)))


@pytest.mark.parametrize("replicas", [1, 3])
def test_engines_that_answer_as_the_trainer_expects_commit_and_the_difference_is_kept(replicas: int) -> None:
    world = make_world(replicas)
    push(world, 1, verify=expecting(1, off=-0.0005))
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    assert world.status().history[-1].max_abs_logprob_diff == "0.0005"
    committed = world.fleet.status.committed
    assert committed is not None
    assert committed.probe is not None, "one engine's answer is enough where the trainer expected it"


def test_engines_that_answer_otherwise_are_out_and_the_rest_commits_though_it_is_fewer() -> None:
    world = make_world()
    push(world, 1, verify=expecting(1))
    assert world.run(30, lambda: world.in_phase(Phase.TRANSFERRING))
    for ordinal in (1, 2):
        world.pods[world.uid_of(ordinal)].temper.skew = -0.5
    assert world.run(60, lambda: world.ended(1))
    assert world.status().phase is Phase.ACTIVE
    out = {each.name: (each.reason, each.message) for each in world.status().progress.failed}
    assert len(out) == 2
    for name, (reason, message) in out.items():
        assert reason == "ProbesDisagree"
        assert f"{name} and the trainer differ by 0.5" in message
    committed = world.fleet.status.committed
    assert committed is not None
    assert len(committed.excluded) == 2


def test_where_no_engine_answers_as_expected_the_update_fails_and_names_the_trainer() -> None:
    world = make_world()
    push(world, 1, verify=expecting(1, off=-0.25), on_failure=NO_RETRY)
    assert world.run(120, lambda: world.ended(1))
    message = condition(world, "Active")[2]
    assert "no engine answers the probe as the trainer" in message
    assert "and the trainer differ by 0.25" in message
    assert not world.all_serve(1)


def test_what_all_engines_agree_upon_is_not_tried_again() -> None:
    """Their weights are the trainer's, by the digest: another attempt would keep the fleet closed for nothing."""
    world = make_world()
    push(world, 1, verify=expecting(1, off=-0.25))
    assert world.run(120, lambda: world.ended(1))
    assert world.status().attempt == 1
    assert "it is not tried again: the same weights would end alike" in condition(world, "Active")[2]


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_that_is_alone_and_some_that_differ_are_tried_again(replicas: int) -> None:
    """They may have loaded badly."""
    world = make_world(replicas)
    push(world, 1, verify=expecting(1, off=-0.25))
    assert world.run(30, lambda: world.in_phase(Phase.TRANSFERRING))
    world.pods[world.uid_of(0)].temper.skew = -0.5
    assert world.run(200, lambda: world.ended(1))
    assert world.status().attempt == 3


def test_bytes_that_nobody_vouches_for_are_sent_again() -> None:
    """The trainer's end may have garbled them, for all engines alike."""
    world = make_world(2)
    garbled = dict.fromkeys(range(2), "sha256:garbled")
    trainer = push(world, 1, Trainer(tells_digest=False, received=garbled), verify=expecting(1))
    assert world.run(60, lambda: world.in_phase(Phase.VERIFYING))
    trainer.received = {}
    assert world.run(120, lambda: world.ended(1) and world.all_serve(1))
    assert world.status().attempt == 2


def test_another_attempt_waits_for_the_trainer_s_own_time_and_takes_nothing_of_the_one_before_for_it() -> None:
    """Engines hold what the attempt before brought, verified; its trainer forms a group first."""
    world = make_world(2)
    trainer = push(world, 1, verify=expecting(1))
    assert world.run(30, lambda: world.in_phase(Phase.TRANSFERRING))
    for ordinal in range(2):  # both loaded badly, and not alike
        world.pods[world.uid_of(ordinal)].temper.skew = -0.5 - 0.3 * ordinal
    assert world.run(60, lambda: world.status().attempt == 2)
    for ordinal in range(2):
        world.pods[world.uid_of(ordinal)].temper.skew = 0.0
    trainer.stalls = True
    assert world.run(60, lambda: world.in_phase(Phase.TRANSFERRING))
    world.run(25)  # longer than verifySeconds
    assert world.in_phase(Phase.TRANSFERRING), "nothing has come"
    trainer.stalls = False
    assert world.run(60, lambda: world.ended(1) and world.all_serve(1))
    assert world.status().attempt == 2


def test_fewer_than_must_serve_fail_it_in_the_words_of_the_first() -> None:
    world = make_world()
    push(world, 1, verify=expecting(1), on_failure=NO_RETRY, min_serving=3)
    assert world.run(30, lambda: world.in_phase(Phase.TRANSFERRING))
    world.pods[world.uid_of(2)].temper.skew = -0.5
    assert world.run(120, lambda: world.ended(1))
    message = condition(world, "Active")[2]
    assert "answered unlike the trainer" in message
    assert "differ by 0.5" in message
