"""Operator and client of one engine, as small as the wire allows: what the operator's guard client and users send."""

import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from rollfleet_protocol.commands import PREFIX, PROBE_PATH, STATE_PATH
from rollfleet_protocol.refusals import Refusal
from rollfleet_protocol.state import EngineState, Operation, OperationStatus, ProbeReport, WeightsState
from tests.contract.process import OPERATOR_UID, SUBJECT, EngineProcess, Site, until
from tests.support.issuer import TOKEN_LIFE_S

T = TypeVar("T")
CATCHES = 8
PROBE_TOKENS = (1, 2, 3, 5, 7, 11)
STEP_TIMEOUT_S = 60.0
SILENCE_S = 600.0
FRESH_S = TOKEN_LIFE_S / 3
# Of a request that is to be caught running: vLLM needs 2.5 s for it on an idle machine.
LONG_ANSWER = 1900
SPANS_COMMENT = ": x-weight-version-spans "


class Operator:
    """Says what the operator says."""

    def __init__(self, engine: EngineProcess, site: Site) -> None:
        self._site = site
        self._engine = engine
        context = ssl.create_default_context(cadata=site.authority.pem.decode())
        self.http = httpx.Client(base_url=engine.control_url, verify=context, timeout=STEP_TIMEOUT_S + 10)
        self._token = self.make_token()
        self._minted = time.monotonic()

    @property
    def token(self) -> str:
        """The operator's, minted again while there is time: who is of a whole session outlives one."""
        if time.monotonic() - self._minted > FRESH_S:
            self._token, self._minted = self.make_token(), time.monotonic()
        return self._token

    def make_token(self, **changes: Any) -> str:
        """A token of the operator's, apart from the changes."""
        fields = {"subject": SUBJECT, "uid": OPERATOR_UID, "audience": self._engine.config.audience} | changes
        return self._site.issuer.token(**fields)

    def request(self, method: str, path: str, *, token: str | None = None, **arguments: Any) -> httpx.Response:
        """One call under the name that the certificate must have."""
        name = self._engine.config.fleet.control_server_name
        headers = {"Host": name, **arguments.pop("headers", {})}
        token = self.token if token is None else token
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return self.http.request(method, path, headers=headers, extensions={"sni_hostname": name}, **arguments)

    def state(self, after: int | None = None, wait_s: float = 0) -> EngineState:
        """The state, or the next one."""
        parameters = {"waitSeconds": wait_s} | ({} if after is None else {"after": after})
        answer = self.request("GET", STATE_PATH, params=parameters)
        assert answer.status_code == 200, answer.text
        return EngineState.model_validate_json(answer.content)

    def send(self, command: str, epoch: int, *, incarnation: str | None = None, **fields: Any) -> httpx.Response:
        """A command, whatever comes of it."""
        body = {"incarnation": incarnation or self.state().incarnation, "epoch": epoch, **fields}
        return self.request("POST", f"{PREFIX}/{command}", json=body)

    def refused(self, command: str, epoch: int, **fields: Any) -> tuple[int, str, str]:
        """Status, reason and message of a command that must be refused."""
        answer = self.send(command, epoch, **fields)
        assert answer.status_code >= 400, answer.text
        error = Refusal.model_validate_json(answer.content).error
        assert error.code == answer.status_code
        return answer.status_code, error.reason.value, error.message

    def do(self, command: str, epoch: int, **fields: Any) -> EngineState:
        """A command that must be obeyed."""
        answer = self.send(command, epoch, **fields)
        assert answer.status_code in (200, 202), answer.text
        return EngineState.model_validate_json(answer.content)

    def finish(self, command: str, epoch: int, **fields: Any) -> EngineState:
        """A command that takes time, to its end, followed by long polls."""
        state = self.do(command, epoch, **fields)
        while state.operation is not None and state.operation.status is OperationStatus.RUNNING:
            state = self.state(after=state.sequence, wait_s=30)
        return state

    def succeed(self, command: str, epoch: int, **fields: Any) -> EngineState:
        """To its good end."""
        state = self.finish(command, epoch, **fields)
        operation = operation_of(state)
        assert operation.status is OperationStatus.SUCCEEDED, operation
        return state

    def _ask_probe(self) -> httpx.Response:
        body = {"incarnation": self.state().incarnation, "tokens": PROBE_TOKENS}
        return self.request("POST", PROBE_PATH, json=body)

    def probe(self) -> ProbeReport:
        """What the engine says to the probe tokens now."""
        answer = self._ask_probe()
        assert answer.status_code == 200, answer.text
        return ProbeReport.model_validate_json(answer.content)

    def refused_probe(self) -> tuple[int, str, str]:
        """Status, reason and message of a probe that must be refused."""
        answer = self._ask_probe()
        error = Refusal.model_validate_json(answer.content).error
        return answer.status_code, error.reason.value, error.message

    # --- the steps of an update

    def next_epoch(self) -> int:
        """One that nobody has used at this engine."""
        return self.state().epoch + 1

    def prepare(self, epoch: int, version: int, path: str, root: str = "Checkpoints") -> EngineState:
        """To its end, good or bad."""
        source = {"type": "Checkpoint", "root": root, "path": path}
        return self.finish("prepare", epoch, version=version, source=source, deadlineSeconds=STEP_TIMEOUT_S)

    def close(self, epoch: int, version: int, silence_s: float = SILENCE_S, **fields: Any) -> EngineState:
        """Gate closed, paused, nothing in flight."""
        return self.succeed(
            "close", epoch, version=version, deadlineSeconds=STEP_TIMEOUT_S, operatorSilenceSeconds=silence_s, **fields
        )

    def transfer(self, epoch: int, version: int, digest: str) -> EngineState:
        """To its good end."""
        return self.succeed("transfer", epoch, version=version, digest=digest, deadlineSeconds=STEP_TIMEOUT_S)

    def verify(self, epoch: int, version: int, digest: str | None) -> EngineState:
        """To its good end."""
        return self.succeed(
            "verify",
            epoch,
            version=version,
            digest=digest,
            probeTokens=PROBE_TOKENS,
            deadlineSeconds=STEP_TIMEOUT_S,
        )

    def update(
        self, version: int, path: str, *, root: str = "Checkpoints", open_after: bool = True, mode: str = "abort"
    ) -> EngineState:
        """A whole update under an epoch of its own."""
        epoch = self.next_epoch()
        state = self.prepare(epoch, version, path, root)
        assert state.staged is not None, operation_of(state)
        digest = state.staged.digest
        self.close(epoch, version, mode=mode)
        self.do("arm", epoch)
        state = self.transfer(epoch, version, digest)
        assert state.transferred is not None
        assert state.transferred.digest == digest
        state = self.verify(epoch, version, digest)
        return self.do("open", epoch, version=version, digest=digest) if open_after else state

    def serve_initial(self) -> EngineState:
        """Version 0 as loaded at start."""
        epoch = self.next_epoch()
        self.verify(epoch, 0, None)
        return self.do("open", epoch, version=0, digest=None)

    def close_client(self) -> None:
        """Let go of connections."""
        self.http.close()


def operation_of(state: EngineState) -> Operation:
    """The newest operation, which there must be."""
    assert state.operation is not None
    return state.operation


def held(state: EngineState) -> tuple[WeightsState, int | None, str | None]:
    """What is held."""
    return state.weights.state, state.weights.version, state.weights.digest


@dataclass
class Answer:
    """What a client got for one prompt."""

    status: int
    text: str = ""
    finish_reason: str | None = None
    version: int | None = None
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int | None = None
    prompt_logprobs: list[Any] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)
    headers: httpx.Headers = field(default_factory=httpx.Headers)


class Client:
    """A user of the serving port."""

    def __init__(self, engine: EngineProcess) -> None:
        self.http = httpx.Client(base_url=engine.serving_url, timeout=60)

    def complete(self, prompt: str, max_tokens: int, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        """POST /v1/completions, greedy."""
        body = {"model": "policy", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return _answer(self.http.post("/v1/completions", json=body | fields, headers=headers))

    def stream(self, prompt: str, max_tokens: int) -> "Stream":
        """The same as server-sent events."""
        return Stream(self.http, prompt, max_tokens)

    def get(self, path: str) -> httpx.Response:
        """Any GET."""
        return self.http.get(path)

    def close_client(self) -> None:
        """Let go of connections."""
        self.http.close()


def _answer(response: httpx.Response) -> Answer:
    version = response.headers.get("X-Weight-Version")
    answer = Answer(
        response.status_code,
        version=None if version is None else int(version),
        body=response.json(),
        headers=response.headers,
    )
    if response.status_code == 200:
        choice, usage = answer.body["choices"][0], answer.body["usage"]
        answer.text, answer.finish_reason = choice["text"], choice["finish_reason"]
        answer.logprobs = (choice["logprobs"] or {}).get("token_logprobs", [])
        details = usage["prompt_tokens_details"]  # of 0.23 none where nothing was cached
        answer.cached_tokens = 0 if details is None else details["cached_tokens"]
        answer.prompt_logprobs = choice["prompt_logprobs"] or []
    return answer


class Stream:
    """A streamed completion, read as it comes."""

    def __init__(self, http: httpx.Client, prompt: str, max_tokens: int) -> None:
        self._http = http
        self._body = {"model": "policy", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        self._body |= {"stream": True, "ignore_eos": True}
        self.answer = Answer(0)
        self.spans: list[dict[str, Any]] = []
        self.done = False

    @contextmanager
    def open(self) -> Iterator[Iterator[str]]:
        """Text pieces; after the last one `answer` and `done` are complete."""
        with self._http.stream("POST", "/v1/completions", json=self._body) as response:
            version = response.headers.get("X-Weight-Version")
            self.answer = Answer(response.status_code, version=None if version is None else int(version))
            yield self._pieces(response)

    def _pieces(self, response: httpx.Response) -> Iterator[str]:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                self.done = True
            elif line.startswith(SPANS_COMMENT):
                assert not self.done
                self.spans = json.loads(line.removeprefix(SPANS_COMMENT))
            elif line.startswith("data: "):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                self.answer.text += choice["text"]
                self.answer.finish_reason = choice["finish_reason"]
                yield choice["text"]


def wait_in_flight(operator: Operator, count: int) -> None:
    """Until so many requests are inside."""
    until(lambda: operator.state().in_flight >= count, 10, f"{count} requests in flight")


def catch_running(
    operator: Operator, start: Callable[[], T], count: int, mode: str, path: str = "", **fields: Any
) -> tuple[T, int, EngineState]:
    """Start requests and close on them, under one epoch; again where the machine was so slow that they had ended.

    With a path, version 2 is staged from it first.
    """
    for _ in range(CATCHES):
        epoch = operator.next_epoch()
        if path:
            operator.prepare(epoch, 2, path)
        started = start()
        with suppress(AssertionError):
            until(lambda: operator.state().in_flight >= count, 3, f"{count} requests in flight")
        state = operator.close(epoch, 2, mode=mode, **fields)
        if state.kept == count:
            return started, epoch, state
        operator.do("cancel", epoch)
    raise AssertionError(f"in {CATCHES} attempts never {count} requests were running when the gate closed")
