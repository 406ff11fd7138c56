"""An engine as data for the checks of conformance: it answers as ours do, every feature on, in memory.

What a lie changes of its answers is a test's; that these are what real engines answer is the contract suite's.
"""

import base64
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from rollfleet_cli.conformance.checks.check import Check, Fault, Subject
from rollfleet_cli.conformance.checks.locked import HARMLESS_POSTS, READS
from rollfleet_cli.conformance.checks.wire import Call, Exchange, Identity, Port
from rollfleet_protocol.commands import LOOK_PATH, PROBE_PATH, PauseMode
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.refusals import (
    MINIMUM_HEADER,
    REQUIRED_HEADER,
    WEIGHT_VERSION_HEADER,
    Refusal,
    RefusalDetail,
    RefusalReason,
)
from rollfleet_protocol.state import EngineState, Facts, Gate, Host, ProbeReport, Weights, WeightsState

RANKS, VERSION, MOST_LOGPROBS = 2, 7, 3
TOKENS = (1, 2, 3, 5, 7, 11)
LAYERS, TOP = 3, 2  # of its experts
RELEASE = "0.32.0"
CAPABILITIES = (
    *("source/Checkpoint", "source/Trainer", "verify/Digest", "verify/Coverage", "verify/Logprobs"),
    *(f"pause/{mode.value}" for mode in PauseMode),
    *("sleep/1", "sleep/2", "backend/hccl"),
)
Lie = Callable[[Exchange], Exchange]
CONFIG = EngineConfig.model_validate(
    {
        "fleet": {"namespace": "rl", "name": "qwen", "uid": "f-1"},
        "podUid": "u-1",
        "operator": {"subject": "system:serviceaccount:rollfleet-system:rollfleet-operator", "uid": "o-1"},
        "model": {"path": "/model", "servedName": "policy"},
        "rlConfig": {"enabled": True, "enableBatchInvariant": True},
        "sleepMode": True,
        "weightTransfer": {"backend": "hccl"},
        "features": {
            "tokenEndpoint": "Enabled",
            "routedExperts": True,
            "traceReplay": True,
            "toolParser": "hermes",
            "maxLogprobs": MOST_LOGPROBS,
        },
        "dataParallelSize": RANKS,
    }
)
STATE = EngineState(
    sequence=9,
    incarnation="incarnation-1",
    pod_uid="u-1",
    facts=Facts(
        guard_version="0.1.0",
        engine="vllm",
        engine_version=f"{RELEASE} with vllm_ascend 0.32.0",
        model="/model",
        world_size=RANKS,
        data_parallel_size=RANKS,
        capabilities=CAPABILITIES,
        host=Host(platform="Ascend", software={"CANN": "9.1.0"}, chip="A2", npus=(0, 1)),
    ),
    alive=True,
    gate=Gate.OPEN,
    ready=True,
    epoch=4,
    weights=Weights(state=WeightsState.VERIFIED, version=VERSION, digest="sha256:d"),
)


def make_subject(**changes: Any) -> Subject:
    """Of this engine."""
    given: dict[str, Any] = {
        "pod": "qwen-0-0-abcde",
        "pod_uid": "u-1",
        "config": CONFIG,
        "state": STATE,
        "probe_tokens": TOKENS,
        "allowed": Decimal("0.001"),
        "salt": "salt",
    }
    return Subject(**(given | changes))


def logprob(place: int) -> float:
    """Of the token at this place of a prompt or an answer."""
    return -1.0 - place / 8


class HonestEngine:
    """Answers calls. `lie` changes what leaves it."""

    def __init__(self, lie: Lie = lambda exchange: exchange, state: EngineState = STATE) -> None:
        self._lie = lie
        self.state = state
        self.answered = [0] * RANKS

    async def carry(self, call: Call) -> Exchange:
        """Keeps running.Carrier."""
        return self._lie(self._answer(call))

    def drive(self, check: Check, subject: Subject | None = None) -> tuple[Fault, ...]:
        """Run a check to its end."""
        steps = check.run(subject or make_subject())
        try:
            calls = next(steps)
            while True:
                calls = steps.send(tuple(self._lie(self._answer(call)) for call in calls))
        except StopIteration as ended:
            faults: tuple[Fault, ...] = ended.value
            return faults

    def _answer(self, call: Call) -> Exchange:
        path = call.path.partition("?")[0]
        if call.port is Port.CONTROL:
            return self._control(call, path)
        if call.method == "GET":
            return self._get(call, path)
        if dict(call.headers).get("Content-Length"):
            return refuse(call, 413, RefusalReason.TOO_LARGE)
        generating = {
            "/v1/completions": self._completion,
            "/v1/chat/completions": self._chat,
            "/inference/v1/generate": self._tokens,
        }
        handler = generating.get(path)
        return refuse(call, 404, RefusalReason.NOT_FOUND) if handler is None else self._infer(call, handler)

    def _control(self, call: Call, path: str) -> Exchange:
        if call.identity is Identity.OTHER_ACCOUNT:
            return refuse(call, 403, RefusalReason.FORBIDDEN)
        if call.identity is not Identity.OPERATOR:
            return refuse(call, 401, RefusalReason.UNAUTHENTICATED)
        if call.path == LOOK_PATH:
            return Exchange(call, 200, body=self.state.model_dump_json(by_alias=True).encode())
        if path == PROBE_PATH:
            return self._probe(call)
        known = path in {each.partition("?")[0] for each in (*HARMLESS_POSTS, *READS)}
        reason = RefusalReason.ORDER_VIOLATION if known else RefusalReason.NOT_FOUND
        return refuse(call, 409 if known else 404, reason, f"{path} is closed to everybody")

    def _probe(self, call: Call) -> Exchange:
        tokens = tuple(json.loads(call.body or b"")["tokens"])
        values = tuple(logprob(place) for place in range(1, len(tokens)))
        report = ProbeReport(
            incarnation=self.state.incarnation,
            epoch=self.state.epoch,
            gate=self.state.gate,
            weights=self.state.weights,
            tokens=tokens,
            by_rank=(values,) * RANKS,
            seconds=0.1,
        )
        return Exchange(call, 200, body=report.model_dump_json(by_alias=True).encode())

    def _get(self, call: Call, path: str) -> Exchange:
        series = [
            "vllm:num_requests_running 0.0",
            "rollfleet_guard_gate_open 1.0",
            f"rollfleet_guard_weight_version {float(VERSION)}",
            *(f'vllm:request_success_total{{engine="{n}"}} {count}' for n, count in enumerate(self.answered)),
        ]
        pages: dict[str, Any] = {
            "/health": {},
            "/livez": {},
            "/readyz": {},
            "/version": {"version": RELEASE},
            "/v1/models": {"data": [{"id": "policy"}]},
            "/metrics": "\n".join(series),
        }
        if path not in pages:
            return refuse(call, 404, RefusalReason.NOT_FOUND)
        page = pages[path]
        return Exchange(call, 200, body=page.encode() if isinstance(page, str) else json.dumps(page).encode())

    def _infer(self, call: Call, handler: Callable[[dict[str, Any]], tuple[int, Any]]) -> Exchange:
        headers = dict(call.headers)
        told = ((WEIGHT_VERSION_HEADER, str(VERSION)),)
        for name in (REQUIRED_HEADER, MINIMUM_HEADER):
            text = headers.get(name, str(VERSION))
            if not text.isdecimal():
                return refuse(call, 400, RefusalReason.INVALID_REQUEST)
            if int(text) > VERSION or (name == REQUIRED_HEADER and int(text) != VERSION):
                return refuse(call, 409, RefusalReason.WRONG_VERSION, headers=told)
        rank = headers.get("X-data-parallel-rank", "0")
        if not rank.isdecimal() or int(rank) >= RANKS or len(rank) > 4:
            return refuse(call, 400, RefusalReason.INVALID_REQUEST, f"ranks are 0 to {RANKS - 1}")
        try:
            status, body = handler(json.loads(call.body or b""))
        except (ValueError, KeyError):
            status, body = 400, error(400, "no such request")
        if status == 200:
            self.answered[int(rank)] += 1
        return Exchange(call, status, told, body if isinstance(body, bytes) else json.dumps(body).encode())

    def _completion(self, body: dict[str, Any]) -> tuple[int, Any]:
        most, prompt = body["max_tokens"], body["prompt"]
        if body["model"] != "policy":
            return 404, error(404, "no such model")
        if most > 4096 or body.get("logprobs", 0) > MOST_LOGPROBS:
            return 400, error(400, f"greater than max allowed: {MOST_LOGPROBS}")
        choice = _choice(most) | {"text": "x" * most, "routed_experts": experts(len(prompt) + most - 1)}
        if body.get("stream"):
            events = [{"choices": [{"text": "x", "finish_reason": None}]}] * (most - 1)
            events += [{"choices": [{"text": "x", "finish_reason": "length"}]}]
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            return 200, ("".join(lines) + "data: [DONE]\n\n").encode()
        if "logprobs" in body:
            choice["logprobs"] = {"token_logprobs": [logprob(place) for place in range(most)]}
        if body.get("return_token_ids"):
            choice["prompt_token_ids"] = prompt
        if "prompt_logprobs" in body:
            entries = [{str(token): {"logprob": logprob(place)}} for place, token in enumerate(prompt)]
            choice["prompt_logprobs"] = [None, *entries[1:]]
        return 200, _whole(choice, most)

    def _chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        most = body["max_tokens"]
        return 200, _whole(_choice(most) | {"message": {"content": "x" * most}}, most)

    def _tokens(self, body: dict[str, Any]) -> tuple[int, Any]:
        parameters = body["sampling_params"]
        most = parameters["max_tokens"]
        choice = _choice(most)
        if trace := parameters.get("trace_decode_token_ids"):
            choice |= {"token_ids": trace, "logprobs": {"content": [{"logprob": -1.0}] * len(trace)}}
        return 200, {"choices": [choice]}


def _choice(most: int) -> dict[str, Any]:
    return {"index": 0, "finish_reason": "length", "token_ids": list(range(most)), "logprobs": None}


def _whole(choice: dict[str, Any], most: int) -> dict[str, Any]:
    return {"choices": [choice], "usage": {"completion_tokens": most}}


def error(code: int, message: str) -> dict[str, Any]:
    """As OpenAI's."""
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": code}}


def refuse(
    call: Call,
    status: int,
    reason: RefusalReason,
    message: str = "refused",
    headers: tuple[tuple[str, str], ...] = (),
    **more: Any,
) -> Exchange:
    """As a guard does."""
    body = Refusal(error=RefusalDetail(message=message, code=status, reason=reason, **more))
    return Exchange(call, status, headers, body.model_dump_json(by_alias=True, exclude_none=True).encode())


def experts(tokens: int, *, layers: int = LAYERS, kind: str = "|u1") -> str:
    """numpy's own file format, version 1, without numpy."""
    head = repr({"descr": kind, "fortran_order": False, "shape": (tokens, layers, TOP)}).encode()
    head += b" " * (64 - (len(head) + 11) % 64) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(tokens * layers * TOP)
    return base64.b64encode(content).decode()
