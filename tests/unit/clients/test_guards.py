"""The guards' client against a real TLS server on the loopback."""

import asyncio
import gzip
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web

from rollfleet_operator.clients import guards as module
from rollfleet_operator.clients.certificates import Authority, make_authority
from rollfleet_operator.clients.errors import (
    Denied,
    NotLeading,
    Refused,
    RollfleetError,
    StaleAttempt,
    Unguarded,
    Unreachable,
    Unsupported,
)
from rollfleet_operator.clients.guards import MAX_BODY, Endpoint, GuardClient
from rollfleet_protocol.commands import Arm, Verify
from rollfleet_protocol.engine_config import FleetIdentity
from rollfleet_protocol.refusals import Refusal, RefusalDetail, RefusalReason
from tests.support.cluster import SilentMeter
from tests.support.guard_server import FLEET, Handler, OneToken, Server
from tests.support.states import make_state

ARM = Arm(incarnation="i-1", epoch=3)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return make_authority(datetime.now(UTC))


@pytest.fixture
async def server(authority: Authority, tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(authority, tmp_path)
    yield made
    await made.stop()


@pytest.fixture
def tokens() -> OneToken:
    return OneToken()


@pytest.fixture
async def client(authority: Authority, tokens: OneToken) -> AsyncIterator[GuardClient]:
    made = GuardClient(authority.pem, tokens, SilentMeter(), lambda: True)  # type: ignore[arg-type]
    yield made
    await made.close()


def endpoint(server: Server) -> Endpoint:
    return Endpoint(FLEET, "qwen-0-0-abcde", "p-1", "127.0.0.1", server.port)


async def test_a_poll_and_a_command(server: Server, client: GuardClient) -> None:
    await server.start()
    assert await client.state(endpoint(server), None) == make_state(4)
    assert await client.state(endpoint(server), 4) == make_state(4)
    assert await client.command(
        endpoint(server), Verify(incarnation="i-1", epoch=3, version=0, probe_tokens=(1, 2), deadline_seconds=5)
    ) == make_state(4)
    bearer = "Bearer token for rollfleet.io/rl/qwen/f-1/p-1"
    assert server.requests == [
        ("GET", "/rollfleet/v1/state", bearer),
        ("GET", f"/rollfleet/v1/state?after=4&waitSeconds={module.POLL_S}", bearer),
        ("POST", "/rollfleet/v1/verify", bearer),
    ]


async def test_who_does_not_lead_may_look_and_not_command(
    server: Server, authority: Authority, tokens: OneToken
) -> None:
    await server.start()
    client = GuardClient(authority.pem, tokens, SilentMeter(), lambda: False)  # type: ignore[arg-type]
    try:
        assert await client.state(endpoint(server), None) == make_state(4)
        with pytest.raises(NotLeading):
            await client.command(endpoint(server), Arm(incarnation="i-1", epoch=3))
        assert [method for method, _, _ in server.requests] == ["GET"]
        assert client.waiting() == 0
    finally:
        await client.close()


async def test_a_fleet_whose_engines_hang_holds_up_no_other(
    server: Server, client: GuardClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More commands, and more first questions, than there are slots in all; none of them ends by itself meanwhile."""
    monkeypatch.setattr(module, "CONNECT_S", 120.0)
    monkeypatch.setattr(module, "COMMAND_S", 120.0)
    await server.start()
    over = asyncio.Event()

    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    mute = await asyncio.start_server(say_nothing, "0.0.0.0", 0)  # noqa: S104 - all of 127.0.0.0/8
    large = FleetIdentity(namespace="rl", name="large", uid="f-2")
    port = mute.sockets[0].getsockname()[1]
    ends = [Endpoint(large, f"large-{n}-0-a", f"p-{n}", f"127.0.{n // 250}.{2 + n % 250}", port) for n in range(400)]
    hanging = [asyncio.create_task(client.command(end, ARM)) for end in ends]
    hanging += [asyncio.create_task(client.state(end, None)) for end in ends]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(30):
            assert client.waiting() == 800 - module.MAX_COMMANDS_PER_FLEET - module.MAX_QUESTIONS_PER_FLEET
            assert await client.state(endpoint(server), None) == make_state(4)
            assert await client.command(endpoint(server), ARM) == make_state(4)
    finally:
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        over.set()
        mute.close()
    assert client.waiting() == 0


async def test_tls_connections_are_small_and_take_long_answers(server: Server, client: GuardClient) -> None:
    async def padded(_: web.Request) -> web.Response:
        state = make_state(4).model_dump(by_alias=True, mode="json") | {"newerField": "x" * 500_000}
        return web.json_response(state)

    server.handler = padded
    await server.start()
    assert await client.state(endpoint(server), None) == make_state(4)
    assert SSLProtocol.max_size == module.TLS_BUFFER


async def test_a_server_of_another_fleet_is_shown_no_token(server: Server, client: GuardClient) -> None:
    await server.start("other.rl.engine.rollfleet.io")
    with pytest.raises(Unreachable, match="certificate"):
        await client.state(endpoint(server), None)
    assert server.requests == []


async def test_a_server_of_another_ca_is_shown_no_token(server: Server, client: GuardClient) -> None:
    server.authority = make_authority(datetime.now(UTC))
    await server.start()
    with pytest.raises(Unreachable, match="certificate"):
        await client.command(endpoint(server), ARM)
    assert server.requests == []


def refusing(reason: RefusalReason, code: int) -> Handler:
    body = Refusal(error=RefusalDetail(message="in its own words", code=code, reason=reason))

    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=code, text=body.model_dump_json(by_alias=True), content_type="application/json")

    return handler


@pytest.mark.parametrize(
    ("reason", "code", "expected"),
    [
        (RefusalReason.ORDER_VIOLATION, 409, Refused),
        (RefusalReason.STALE_EPOCH, 409, StaleAttempt),
        (RefusalReason.UNAUTHENTICATED, 401, Denied),
    ],
)
async def test_refusals_keep_the_guards_words(
    server: Server,
    client: GuardClient,
    tokens: OneToken,
    reason: RefusalReason,
    code: int,
    expected: type[RollfleetError],
) -> None:
    server.handler = refusing(reason, code)
    await server.start()
    with pytest.raises(expected, match="in its own words"):
        await client.command(endpoint(server), ARM)
    assert bool(tokens.discarded) == (expected is Denied)


async def test_an_endless_answer_is_cut_off(server: Server, client: GuardClient) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(2 * MAX_BODY // 65536 + 2):
            await answer.write(b"x" * 65536)
        return answer

    server.handler = handler
    await server.start()
    with pytest.raises(Unsupported, match="longer than"):
        await client.state(endpoint(server), None)


async def test_nothing_is_decompressed(server: Server, client: GuardClient) -> None:
    async def bomb(request: web.Request) -> web.Response:
        assert "Accept-Encoding" not in request.headers
        packed = gzip.compress(b"{" + b" " * (8 * MAX_BODY) + b"}")
        return web.Response(body=packed, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})

    server.handler = bomb
    await server.start()
    with pytest.raises(Unsupported, match="not a guard's state"):
        await client.state(endpoint(server), None)


@pytest.mark.parametrize(
    "lie",
    [
        {"epoch": 2**70},
        {"epoch": -1},
        {"incarnation": "x" * 1000},
        {"weights": {"state": "Loaded", "version": 2**63}},
        {"weights": {"state": "Loaded", "version": 1, "digest": "x" * 1000}},
    ],
)
async def test_what_no_status_could_hold_is_no_state(
    server: Server, client: GuardClient, lie: dict[str, object]
) -> None:
    async def told(_: web.Request) -> web.Response:
        return web.json_response(make_state(4).model_dump(mode="json", by_alias=True) | lie)

    server.handler = told
    await server.start()
    with pytest.raises(Unsupported, match=next(iter(lie))):
        await client.state(endpoint(server), None)


async def test_what_is_no_state_is_named(server: Server, client: GuardClient) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text='{"sequence": 1}')

    server.handler = handler
    await server.start()
    with pytest.raises(Unsupported, match=r"qwen-0-0-abcde.*not a guard's state"):
        await client.state(endpoint(server), None)


async def test_a_redirect_is_not_followed(server: Server, client: GuardClient) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": "https://example.com/"})

    server.handler = handler
    await server.start()
    with pytest.raises(Unsupported):
        await client.state(endpoint(server), None)
    assert len(server.requests) == 1


async def test_a_connection_that_was_closed_meanwhile_is_dialled_again(server: Server, client: GuardClient) -> None:
    async def hang_up_once(request: web.Request) -> web.StreamResponse:
        if len(server.requests) == 1:
            assert request.transport is not None
            request.transport.abort()
        return await server.answer_state(request)

    server.handler = hang_up_once
    await server.start()
    assert await client.command(endpoint(server), ARM) == make_state(4)
    assert len(server.requests) == 2


async def test_nobody_there(server: Server, client: GuardClient) -> None:
    await server.start()
    await server.stop()
    with pytest.raises(Unreachable, match=r"guard of qwen-0-0-abcde \(127.0.0.1"):
        await client.state(endpoint(server), None)


async def test_an_address_that_is_another_pods_by_now_speaks_for_nobody(server: Server, client: GuardClient) -> None:
    """Its guard would refuse the token; one that does not must not be taken for ours either."""

    def of(uid: str) -> Handler:
        async def answer(_: web.Request) -> web.Response:
            state = make_state(4).model_copy(update={"pod_uid": uid})
            return web.Response(text=state.model_dump_json(by_alias=True), content_type="application/json")

        return answer

    await server.start()
    server.handler = of("p-1")
    assert (await client.state(endpoint(server), None)).pod_uid == "p-1"
    server.handler = of("p-2")
    with pytest.raises(Unreachable, match="the address is another pod's by now, uid p-2"):
        await client.state(endpoint(server), None)
    with pytest.raises(Unreachable, match="another pod's"):
        await client.command(endpoint(server), ARM)


async def test_engines_of_two_cas_are_reached_while_both_are_trusted(
    authority: Authority, tokens: OneToken, tmp_path: Path
) -> None:
    """Both have one name; which of the two signed a certificate is told by its key identifier."""
    newer = make_authority(datetime.now(UTC))
    servers = [Server(each, tmp_path / str(number)) for number, each in enumerate((authority, newer))]
    for each in servers:
        each.folder.mkdir()
        await each.start()
    client = GuardClient(authority.trusted, tokens, SilentMeter(), lambda: True)  # type: ignore[arg-type]
    try:
        await client.state(endpoint(servers[0]), None)
        with pytest.raises(Unreachable, match="certificate was not accepted"):
            await client.state(endpoint(servers[1]), None)
        client.trust(replace(newer, before=(authority.certificate,)).trusted)
        for each in servers:
            await client.state(endpoint(each), None)
        client.trust(newer.trusted)
        await client.state(endpoint(servers[1]), None)
        with pytest.raises(Unreachable, match="certificate was not accepted"):
            await client.state(endpoint(servers[0]), None)
    finally:
        await client.close()
        for each in servers:
            await each.stop()


def to_a_stranger(status: int, reason: RefusalReason | None) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        assert "Authorization" not in request.headers
        if reason is None:
            return web.Response(status=status, text="<html>")
        detail = RefusalDetail(message="send a token", code=status, reason=reason)
        return web.Response(status=status, text=Refusal(error=detail).model_dump_json(by_alias=True))

    return answer


@pytest.mark.parametrize(
    ("status", "reason", "error"),
    [
        (401, RefusalReason.UNAUTHENTICATED, None),
        (401, None, Unguarded),  # somebody's gateway, not a guard
        (401, RefusalReason.CLOSED, Unguarded),
        (400, RefusalReason.INVALID_REQUEST, Unguarded),  # it read the command before it asked who sends it
        (403, RefusalReason.FORBIDDEN, Unguarded),
        (404, None, Unguarded),
        (200, None, Unguarded),
        (302, None, Unguarded),
        (502, None, Unreachable),
        (503, RefusalReason.CLOSED, Refused),
    ],
)
async def test_only_a_guards_own_refusal_proves_a_guard(
    server: Server, client: GuardClient, status: int, reason: RefusalReason | None, error: type[Exception] | None
) -> None:
    await server.start()
    server.handler = to_a_stranger(status, reason)
    if error is None:
        await client.canary(endpoint(server))
    else:
        with pytest.raises(error, match=rf"HTTP {status}" if error is Unguarded else r"."):
            await client.canary(endpoint(server))
    assert server.requests == [("POST", "/rollfleet/v1/open", "")]
