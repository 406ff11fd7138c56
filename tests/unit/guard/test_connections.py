"""What requests may write into the container's log by way of uvicorn."""

import logging

from rollfleet_engine.guard.connections import LOGGED_EVERY_S, Rarely

INVALID, BROKEN = "Invalid HTTP request received.", "Exception in ASGI application\n"  # as uvicorn 0.54 says them


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("uvicorn.error", logging.ERROR, __file__, 1, message, None, None)


def test_each_kind_of_line_comes_once_a_second_with_the_number_of_those_left_out() -> None:
    now = [100.0]
    rarely = Rarely(lambda: now[0])
    for kind in (INVALID, BROKEN):  # the one does not hide the other
        assert [rarely.filter(record(kind)) for _ in range(4)] == [True, False, False, False]
    assert all(rarely.filter(record("Started server process")) for _ in range(4))
    now[0] += LOGGED_EVERY_S
    for kind in (INVALID, BROKEN):
        later = record(kind)
        assert rarely.filter(later)
        assert later.getMessage() == f"{kind.rstrip()} (3 more since the last line of this kind)"
    now[0] += LOGGED_EVERY_S
    last = record(INVALID)
    assert rarely.filter(last)
    assert last.getMessage() == INVALID
