"""Calls at several engines at once: who has given up, and in which words."""

from concurrent.futures import Future

from rollfleet_trainer.errors import TransferError
from rollfleet_trainer.fan_out import given_up


def ended(error: Exception | None = None) -> Future[None]:
    call: Future[None] = Future()
    if error is None:
        call.set_result(None)
    else:
        call.set_exception(error)
    return call


def test_who_gave_up_is_told_in_its_own_words_while_others_are_under_way():
    under_way: Future[None] = Future()
    broken = ended(TransferError("qwen-1: update_weights: no answer: connection closed\nat 0x7f"))
    refused = ended(TransferError("qwen-2: update_weights: not today"))
    assert given_up([under_way, ended()]) == ""
    assert given_up([under_way, ended(), broken]) == "qwen-1: update_weights: no answer: connection closed"
    assert given_up([broken, refused]).endswith("connection closed; qwen-2: update_weights: not today")
