"""A follower: what a guard said last, in order, and what is news."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from rollfleet_operator.clients.errors import Denied, Disowned, Refused, StaleAttempt, Unguarded, Unreachable
from rollfleet_operator.clients.follower import BACKOFF_MAX_S, LOOK_EVERY_S, MAX_REFUSALS
from rollfleet_protocol.commands import Cancel, Close
from rollfleet_protocol.refusals import RefusalReason
from rollfleet_protocol.state import EngineState, Operation, OperationName, OperationStatus
from tests.support.scripted_guards import NOW, Watched, arm, settle
from tests.support.states import make_state

pytestmark = pytest.mark.looptime

UNGUARDED = Unguarded("answered HTTP 200 to a command without identity")


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    made = Watched()
    yield made
    await made.stop()


async def test_a_change_is_known_and_told_at_once(watched: Watched) -> None:
    await watched.hear(make_state(1))
    assert watched.view.state == make_state(1)
    assert (watched.view.reachable, watched.view.last_contact, watched.news) == (True, NOW, 1)
    await watched.hear(make_state(2))
    assert (watched.guards.asked, watched.news) == ([None, 1, 2], 2)


async def test_an_unchanged_state_is_no_news_and_no_tight_loop(watched: Watched) -> None:
    await watched.hear(make_state(1))
    for _ in range(50):
        watched.guards.polls.put_nowait(make_state(1, in_flight=7))
    await settle()
    assert watched.news == 1
    assert len(watched.guards.asked) <= 3


async def test_an_older_answer_does_not_undo_a_newer(watched: Watched) -> None:
    await watched.hear(make_state(1))
    assert await watched.command(arm(), make_state(5, armed=True)) == "ok"
    await watched.hear(make_state(4))
    assert watched.view.state == make_state(5, armed=True)


async def test_a_restart_is_a_new_incarnation_and_the_old_never_comes_back(watched: Watched) -> None:
    await watched.hear(make_state(9))
    await watched.command(arm(), Refused("Close before Arm", RefusalReason.ORDER_VIOLATION))
    assert watched.view.refusals == (("Arm", "Close before Arm"),)
    await watched.hear(make_state(1, "i-2"))
    assert watched.view.state == make_state(1, "i-2")
    assert not watched.view.refusals
    watched.follower.told(make_state(10, "i-1"))
    assert watched.view.state == make_state(1, "i-2")


async def test_an_unreachable_guard_is_asked_afresh_with_a_back_off(watched: Watched) -> None:
    await watched.hear(make_state(7))
    await watched.hear(Unreachable("guard of qwen-0-0-abcde: refused"))
    assert (watched.view.reachable, watched.view.error) == (False, "guard of qwen-0-0-abcde: refused")
    assert watched.view.state == make_state(7)
    assert watched.news == 2
    for _ in range(6):
        watched.guards.polls.put_nowait(Unreachable("guard of qwen-0-0-abcde: refused"))
    await asyncio.sleep(60)
    assert watched.news == 2
    assert watched.guards.asked[2:] == [None] * (len(watched.guards.asked) - 2)
    await watched.hear(make_state(7))
    assert (watched.view.reachable, watched.view.error, watched.news) == (True, "", 3)


async def test_news_of_the_pod_cut_the_back_off_short(watched: Watched) -> None:
    for _ in range(8):
        watched.guards.polls.put_nowait(Unreachable("refused"))
    await asyncio.sleep(60)
    watched.guards.polls.put_nowait(Unreachable("refused"))
    asked = len(watched.guards.asked)
    await settle()
    watched.follower.hurry()
    await settle()
    assert len(watched.guards.asked) == asked + 1


async def test_a_command_that_finds_the_guard_away_makes_the_follower_look(watched: Watched) -> None:
    await watched.hear(make_state(3))
    assert (await watched.command(arm(), Unreachable("no answer"))).startswith("failed")
    assert not watched.view.reachable
    await settle()
    assert watched.guards.asked == [None, 3, None]
    await watched.hear(make_state(3))
    assert watched.view.reachable


async def test_refusals_are_kept_once_bounded_and_for_their_epoch_only(watched: Watched) -> None:
    await watched.hear(make_state(1))
    news = watched.news
    for _ in range(3):
        await watched.command(arm(), Refused("Close before Arm", RefusalReason.ORDER_VIOLATION))
    assert watched.view.refusals == (("Arm", "Close before Arm"),)
    assert (watched.view.setbacks, watched.view.last_setback, watched.view.setback_epoch) == (3, NOW, 1)
    assert watched.news == news + 3
    for n in range(2 * MAX_REFUSALS):
        await watched.command(
            Cancel(incarnation="i-1", epoch=1), Refused(f"refusal {n}", RefusalReason.ORDER_VIOLATION)
        )
    assert len(watched.view.refusals) == MAX_REFUSALS
    assert watched.view.refusals[-1] == ("Cancel", f"refusal {2 * MAX_REFUSALS - 1}")
    await watched.command(arm(epoch=2), make_state(2, epoch=2))
    assert not watched.view.refusals
    assert (watched.view.setbacks, watched.view.last_setback, watched.view.setback_epoch) == (0, None, None)


async def test_refusals_of_a_new_process_are_kept_under_epochs_that_began_anew(watched: Watched) -> None:
    """The fleet's record was lost, and with the restart every guard's memory of its epoch."""
    await watched.hear(make_state(1, epoch=6))
    await watched.command(arm(epoch=6), make_state(2, epoch=6))
    await watched.hear(make_state(1, "i-2"))
    await watched.command(arm(epoch=6), StaleAttempt("incarnation i-1 is over"))
    await watched.command(arm(incarnation="i-2"), Refused("Close before Arm", RefusalReason.ORDER_VIOLATION))
    assert watched.view.refusals == (("Arm", "Close before Arm"),)


async def test_operations_that_fail_are_counted_once_each(watched: Watched) -> None:
    def failing(sequence: int, seconds: float, status: OperationStatus = OperationStatus.FAILED) -> EngineState:
        operation = Operation(name=OperationName.PREPARE, epoch=1, version=3, status=status, seconds=seconds)
        return make_state(sequence, operation=operation)

    await watched.hear(failing(1, 0.0, OperationStatus.RUNNING))
    assert watched.view.setbacks == 0
    await watched.hear(failing(2, 0.1))
    await watched.hear(failing(3, 0.1))
    assert (watched.view.setbacks, watched.view.last_setback, watched.view.setback_epoch) == (1, NOW, 1)
    await watched.hear(failing(4, 0.2))
    assert watched.view.setbacks == 2
    await watched.hear(make_state(1, "i-2"))
    assert (watched.view.setbacks, watched.view.last_setback) == (0, None)


async def test_a_close_that_was_taken_lets_arm_be_given_again(watched: Watched) -> None:
    """Also where nothing was left to close: else Close would be given for ever."""
    await watched.hear(make_state(1))
    await watched.command(arm(), Refused("Close before Arm", RefusalReason.ORDER_VIOLATION))
    news = watched.news
    close = Close(incarnation="i-1", epoch=1, version=1, deadline_seconds=9, operator_silence_seconds=9)
    assert await watched.command(close, make_state(1)) == "ok"
    assert (watched.view.refusals, watched.news) == ((), news + 1)


async def test_refusals_that_mean_another_process_or_epoch_are_not_kept(watched: Watched) -> None:
    await watched.hear(make_state(1))
    await watched.command(arm(incarnation="i-0"), Refused("no", RefusalReason.ORDER_VIOLATION))
    assert (await watched.command(arm(), StaleAttempt("epoch 1 is older than 2"))) == "stale: epoch 1 is older than 2"
    assert watched.view.refusals == ()


async def test_a_guard_that_takes_no_token_of_ours_is_unreachable_in_its_own_words(watched: Watched) -> None:
    await watched.hear(make_state(1))
    assert (await watched.command(arm(), Denied("audience differs"))) == "failed: audience differs"
    assert (watched.view.reachable, watched.view.error, watched.view.refusals) == (False, "audience differs", ())
    assert not watched.view.disowned


async def test_a_guard_that_obeys_another_operator_is_told_from_one_that_is_away(watched: Watched) -> None:
    refused = Disowned("uid b does not control this engine")
    told = []
    for answer in (refused, Unreachable("connection refused"), refused, make_state(1)):
        await watched.hear(answer)
        told.append((watched.view.reachable, watched.view.disowned))
        watched.follower.hurry()
    assert told == [(False, True), (False, False), (False, True), (True, False)]


async def test_whoever_cannot_act_only_looks_until_it_can_again(watched: Watched) -> None:
    await watched.hear(make_state(1))
    watched.follower.be_silent(True)
    await settle()
    for sequence in (2, 3):
        await watched.hear(make_state(sequence))
        await asyncio.sleep(LOOK_EVERY_S + 0.1)
        await settle()
    assert watched.view.state == make_state(3)
    assert (watched.guards.asked, watched.guards.looks) == ([None, 1], 3)
    watched.follower.be_silent(False)
    await settle()
    assert watched.guards.asked[2:] == [None]


async def test_an_epoch_is_vouched_for_by_the_record_or_by_the_first_word(watched: Watched) -> None:
    await watched.hear(make_state(1, epoch=7))  # a lost record: nobody knows better
    assert watched.view.vouched == 7
    await watched.hear(make_state(2, epoch=8))
    assert watched.view.vouched == 7
    watched.follower.vouch(9)
    watched.follower.vouch(3)
    assert watched.view.vouched == 9


@pytest.mark.parametrize(
    "later", [make_state(1, "i-2", epoch=0), make_state(2, epoch=0)], ids=["a new process", "a process that forgets"]
)
async def test_a_first_word_does_not_vouch_for_what_comes_after_it(watched: Watched, later: EngineState) -> None:
    watched.follower.vouch(4)
    await watched.hear(make_state(1, epoch=2**60))
    await watched.hear(later)
    assert watched.view.vouched == 4


async def test_an_engine_is_asked_for_its_guard_once_a_process_and_before_anything_else(watched: Watched) -> None:
    await settle()
    assert (watched.guards.canaries, watched.guards.asked, watched.view.state) == (1, [None], None)
    for sequence in range(1, 6):
        await watched.hear(make_state(sequence))
    assert watched.guards.canaries == 1
    await watched.hear(make_state(1, "i-2"))
    assert (watched.guards.canaries, watched.view.state) == (2, make_state(1, "i-2"))
    await watched.hear(Unreachable("connection reset"))
    await asyncio.sleep(BACKOFF_MAX_S)
    await watched.hear(make_state(2, "i-2"))
    assert watched.guards.canaries == 2, "the same process"


async def test_nothing_is_known_of_an_engine_that_lets_everybody_in() -> None:
    watched = Watched(UNGUARDED)
    await settle()
    assert (watched.view.unguarded, watched.view.reachable, watched.view.error) == (True, False, str(UNGUARDED))
    assert watched.view.state is None
    assert not watched.guards.asked, "it was shown no token"
    assert watched.news == 1
    watched.guards.unguarded = None
    await asyncio.sleep(BACKOFF_MAX_S)
    await watched.hear(make_state(1))
    assert (watched.view.unguarded, watched.view.reachable) == (False, True)
    await watched.stop()


async def test_a_new_process_is_not_believed_before_it_was_seen_to_be_guarded(watched: Watched) -> None:
    await watched.hear(make_state(5))
    watched.guards.unguarded = UNGUARDED
    await watched.hear(make_state(1, "i-2"))
    assert (watched.view.unguarded, watched.view.reachable, watched.view.state) == (True, False, make_state(5))
    assert await watched.command(arm(), make_state(6)) == "ok"
    assert not watched.view.reachable, "the answer to a command proves nothing"


async def test_the_answer_to_a_command_makes_no_new_process_known(watched: Watched) -> None:
    await watched.hear(make_state(5))
    assert await watched.command(arm(), make_state(1, "i-2")) == "ok"
    assert watched.view.state == make_state(5)
    await watched.hear(make_state(1, "i-2"))
    assert (watched.view.state, watched.guards.canaries) == (make_state(1, "i-2"), 2)
