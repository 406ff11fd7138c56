"""Faults of calls over HTTP, seen by a server in memory."""

import asyncio
import io
import json
from typing import Any

import pytest

from rollfleet_engine.faults.http import FaultyApp, Port, call_of
from rollfleet_engine.faults.injector import LOGGER, Injector
from rollfleet_engine.faults.orders import Orders
from rollfleet_engine.faults.plan import REFUSAL, Call, Plan, Rule
from rollfleet_engine.guard.log import GuardLog
from rollfleet_protocol.commands import CANARY_PATH, PREFIX
from tests.support.guards import make_config
from tests.support.hands import MemoryHands

pytestmark = pytest.mark.looptime


class Served:
    """An application that answers with what it got, behind a plan."""

    def __init__(self, *rules: dict[str, Any], port: Port = Port.CONTROL) -> None:
        log = GuardLog({}, io.StringIO(), LOGGER)
        plan = Plan(rules=tuple(Rule.model_validate(rule) for rule in rules))
        self.hands = MemoryHands()
        self.asked: list[str] = []
        self.bodies: list[bytes | None] = []  # None: it was told that the client has gone
        self.gone = False  # the client, soon after it has asked
        self.app = FaultyApp(self._answer, port, Injector(plan, log), self.hands, Orders(make_config(), log))

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        self.bodies.append((await receive()).get("body"))
        body = scope.get("body", b"pieces")
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body[:3], "more_body": True})
        await send({"type": "http.response.body", "body": body[3:]})

    async def ask(self, path: str, method: str = "POST", **scope: Any) -> tuple[int, bytes, bool, int]:
        """Status, body, whether it came to its end, and the length that was promised."""
        sent: list[dict[str, Any]] = []
        began = asyncio.get_running_loop().time()

        async def receive() -> dict[str, Any]:
            if self.gone and asyncio.get_running_loop().time() > began + 1:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app({"type": "http", "method": method, "path": path, "headers": [], **scope}, receive, send)
        body = b"".join(message.get("body", b"") for message in sent)
        whole = sent[-1]["type"] == "http.response.body" and not sent[-1].get("more_body", False)
        return sent[0]["status"], body, whole, int(dict(sent[0]["headers"])[b"content-length"])


@pytest.mark.parametrize(
    ("port", "method", "path", "call"),
    [
        (Port.CONTROL, "POST", f"{PREFIX}/prepare", Call.PREPARE),
        (Port.CONTROL, "GET", f"{PREFIX}/state", Call.STATE),
        (Port.CONTROL, "POST", f"{PREFIX}/probe", Call.PROBE),
        (Port.CONTROL, "GET", f"{PREFIX}/prepare", None),
        (Port.CONTROL, "POST", "/v1/completions", None),
        (Port.SERVING, "POST", "/v1/chat/completions", Call.INFERENCE),
        (Port.SERVING, "GET", "/health", Call.HEALTH),
        (Port.SERVING, "GET", "/livez", Call.LIVEZ),
        (Port.SERVING, "GET", "/metrics", None),
        (Port.SERVING, "POST", f"{PREFIX}/prepare", None),
    ],
)
def test_what_is_counted(port: Port, method: str, path: str, call: Call | None) -> None:
    assert call_of(port, method, path) is call


async def test_a_refusal_never_reaches_the_engine() -> None:
    served = Served({"call": "close", "fault": "refuse", "at": [1, 2], "status": 503})
    status, body, whole, _ = await served.ask(f"{PREFIX}/close")
    assert (status, json.loads(body)["error"]["message"], whole) == (503, REFUSAL, True)
    assert served.asked == []
    assert (await served.ask(f"{PREFIX}/arm"))[0] == 200


async def test_502_twice() -> None:
    served = Served({"call": "inference", "fault": "badGateway", "at": [1]}, port=Port.SERVING)
    answers = [(await served.ask("/v1/completions"))[0] for _ in range(3)]
    assert (answers, served.asked) == ([502, 502, 200], ["/v1/completions"])


async def test_a_delayed_call_is_executed() -> None:
    served = Served({"call": "arm", "fault": "delay", "at": [1], "seconds": 30})
    began = asyncio.get_running_loop().time()
    assert (await served.ask(f"{PREFIX}/arm"))[:3] == (200, b"pieces", True)
    assert asyncio.get_running_loop().time() - began == pytest.approx(30, abs=0.5)


async def test_a_delayed_order_arrives_though_its_sender_gave_up() -> None:
    served = Served({"call": "open", "fault": "delay", "at": [1], "seconds": 30})
    served.gone = True
    assert (await served.ask(f"{PREFIX}/open"))[0] == 200
    assert served.bodies == [b"{}"]


async def test_a_delayed_request_of_a_client_that_went_away_is_none() -> None:
    served = Served({"call": "inference", "fault": "delay", "at": [1], "seconds": 30}, port=Port.SERVING)
    served.gone = True
    await served.ask("/v1/completions")
    assert served.bodies == [None]


@pytest.mark.parametrize(("body", "got"), [(b"pieces", b"piec"), (b"", b"")])
async def test_a_cut_answer_is_shorter_than_it_says(body: bytes, got: bytes) -> None:
    served = Served({"call": "transfer", "fault": "cut", "at": [1]})
    status, part, whole, length = await served.ask(f"{PREFIX}/transfer", body=body)
    assert (status, part, whole) == (200, got, False)
    assert length > len(part)
    assert served.asked == [f"{PREFIX}/transfer"]


@pytest.mark.parametrize("fault", ["die", "restart"])
async def test_who_asks_an_engine_that_is_killed_gets_no_answer(fault: str) -> None:
    served = Served({"call": "verify", "fault": fault, "at": [1]})
    _, part, whole, length = await served.ask(f"{PREFIX}/verify")
    assert (part, whole, length) == (b"", False, 1)
    assert (served.asked, served.hands.done) == ([], [fault])


async def test_a_call_to_an_engine_that_hangs_goes_on_to_it() -> None:
    served = Served({"call": "state", "fault": "hang", "at": [1]})
    assert (await served.ask(f"{PREFIX}/state", "GET"))[0] == 200
    assert served.hands.done == ["hang"]


async def test_the_question_whether_there_is_a_guard_is_no_command_that_is_counted() -> None:
    served = Served({"call": "open", "fault": "refuse", "at": [1]})
    assert (await served.ask(CANARY_PATH))[0] == 200
    assert (await served.ask(CANARY_PATH, headers=[(b"authorization", b"Bearer x")]))[0] != 200
    assert served.asked == [CANARY_PATH]
