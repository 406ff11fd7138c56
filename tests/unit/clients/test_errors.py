"""One mapping of the outside world's failures."""

import json
import socket
import ssl

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from rollfleet_operator.clients import errors
from rollfleet_protocol.refusals import Refusal, RefusalDetail, RefusalReason


def status(reason: str, message: str = "the server's words") -> bytes:
    return json.dumps({"kind": "Status", "reason": reason, "message": message}).encode()


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (400, "BadRequest", errors.InvalidSpec),
        (401, "Unauthorized", errors.Denied),
        (403, "Forbidden", errors.Denied),
        (404, "NotFound", errors.NotFound),
        (405, "MethodNotAllowed", errors.Unsupported),
        (409, "AlreadyExists", errors.AlreadyExists),
        (409, "Conflict", errors.Conflict),
        (413, "RequestEntityTooLarge", errors.InvalidSpec),
        (415, "UnsupportedMediaType", errors.Unsupported),
        (422, "Invalid", errors.InvalidSpec),
        (429, "TooManyRequests", errors.Busy),
        (500, "InternalError", errors.Unreachable),
        (503, "ServiceUnavailable", errors.Busy),
        (504, "Timeout", errors.Unreachable),
    ],
)
def test_the_api_servers_answers(code: int, reason: str, expected: type[Exception]) -> None:
    error = errors.from_api_server(code, status(reason), "update RolloutEngine rl/qwen/status")
    assert type(error) is expected
    assert str(error) == f"update RolloutEngine rl/qwen/status: the server's words (HTTP {code})"


def test_a_namespace_that_goes_is_no_lack_of_rights() -> None:
    """As the API server of 1.36 words it."""
    body = {
        "kind": "Status",
        "status": "Failure",
        "message": 'pods "a" is forbidden: unable to create new content in namespace rl because it is being terminated',
        "reason": "Forbidden",
        "details": {
            "name": "a",
            "kind": "pods",
            "causes": [
                {
                    "reason": "NamespaceTerminating",
                    "message": "namespace rl is being terminated",
                    "field": "metadata.namespace",
                }
            ],
        },
        "code": 403,
    }
    assert isinstance(errors.from_api_server(403, json.dumps(body).encode(), "create Pod rl/*"), errors.Terminating)


def test_the_wait_that_was_asked_for_is_kept() -> None:
    error = errors.from_api_server(429, status("TooManyRequests"), "list", retry_after="3")
    assert isinstance(error, errors.Busy)
    assert error.after == 3.0
    dated = errors.from_api_server(429, b"", "list", retry_after="Wed, 21 Oct 2026 07:28:00 GMT")
    assert isinstance(dated, errors.Busy)
    assert dated.after is None


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'"text"', b"\xff\xfe"])
def test_an_answer_that_is_no_status_object_keeps_its_text(body: bytes) -> None:
    assert isinstance(errors.from_api_server(502, body, "get"), errors.Unreachable)


def test_long_words_are_clipped() -> None:
    assert len(str(errors.from_api_server(400, status("BadRequest", "x" * 100_000), "get"))) < 2 * errors.MAX_TEXT


def refusal(reason: RefusalReason) -> bytes:
    return (
        Refusal(error=RefusalDetail(message="Close before Arm", code=409, reason=reason))
        .model_dump_json(by_alias=True)
        .encode()
    )


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (RefusalReason.STALE_EPOCH, errors.StaleAttempt),
        (RefusalReason.WRONG_INCARNATION, errors.StaleAttempt),
        (RefusalReason.UNAUTHENTICATED, errors.Denied),
        (RefusalReason.FORBIDDEN, errors.Disowned),
        (RefusalReason.ORDER_VIOLATION, errors.Refused),
        (RefusalReason.NOT_VERIFIED, errors.Refused),
        (RefusalReason.INVALID_REQUEST, errors.Refused),
    ],
)
def test_a_guards_refusal_keeps_its_words(reason: RefusalReason, expected: type[Exception]) -> None:
    error = errors.from_guard(409, refusal(reason), "guard of qwen-0-0-abcde")
    assert type(error) is expected
    assert str(error) == "Close before Arm"


def test_what_is_not_a_guard_is_named() -> None:
    assert type(errors.from_guard(404, b"404 page not found", "guard of a")) is errors.Unsupported
    assert type(errors.from_guard(502, b"Bad Gateway", "guard of a")) is errors.Unreachable


def test_failures_below_http() -> None:
    assert "deadline" in str(errors.from_transport(TimeoutError(), "guard of a"))
    refused = errors.from_transport(aiohttp.ClientOSError(111, "Connect call failed"), "guard of a")
    assert isinstance(refused, errors.Unreachable)
    assert "Connect call failed" in str(refused)
    assert "ServerDisconnectedError" in str(errors.from_transport(aiohttp.ServerDisconnectedError(""), "guard of a"))


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('198.18.0.7', 8001)"), "Connection refused"),
        (OSError(113, "Connect call failed"), "No route to host"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ssl.SSLError(1, "[SSL] wrong version number"), "[SSL] wrong version number"),
        (OSError("Multiple exceptions: ..."), "Multiple exceptions: ..."),
    ],
)
def test_a_connection_that_fails_is_told_without_objects_in_memory(cause: OSError, words: str) -> None:
    key = ConnectionKey("198.18.0.7", 8001, True, ssl.create_default_context(), None, None, None)
    told = str(errors.from_transport(aiohttp.ClientConnectorError(key, cause), "guard of a (198.18.0.7:8001)"))
    assert told.startswith("guard of a (198.18.0.7:8001): ")
    assert words in told
    assert "0x" not in told
    assert told.count("198.18.0.7") == 1
