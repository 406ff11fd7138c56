"""Rollouts: prompts in, samples out, from a fleet whose weights change under them."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from rollfleet_protocol.words import fitted
from rollfleet_trainer.answers import BYTES_BESIDE, largest_answer, read_body
from rollfleet_trainer.asking import CHAT, COMPLETIONS, TOKENS, Ask, OnAbort, body_of
from rollfleet_trainer.judging import (
    Answered,
    Demand,
    Fail,
    NotSent,
    Outcome,
    Unanswered,
    Wait,
    delay_s,
    judge,
)
from rollfleet_trainer.pacing import Pace
from rollfleet_trainer.reading import read_answer, require_asked, served_version
from rollfleet_trainer.rollout_errors import (
    BadAnswerError,
    ClosedError,
    NotServedError,
    OverdueError,
    RoutedExpertsError,
    TraceError,
    VersionPassedError,
)
from rollfleet_trainer.samples import ABORT, LENGTH, Gathered, Sample, Segment

CONNECT_TIMEOUT_S = 10.0
HEALTH_S = 10.0  # of one look whether a server is up
RANK_HEADER = "X-data-parallel-rank"
TRUNCATED = ("truncate_prompt_tokens", "truncation_side")  # a field by which an engine answers a part of the prompt


@dataclass
class _Endpoint:
    url: str
    in_flight: int = 0


@dataclass
class _Waiting:
    """One prompt's tries since it was last answered."""

    until: float  # by the loop's clock
    asked: str = ""  # the endpoint that was asked last
    tries: dict[str, int] = field(default_factory=dict)  # by endpoint
    resting: dict[str, float] = field(default_factory=dict)  # endpoint -> not to be asked before


class Rollouts:
    """A client of one fleet, in one event loop. An async context manager: leaving it ends what still runs.

    endpoints: the fleet's router, or its engines, each http://host:port; of several the least busy is asked.
    model: the name that the fleet serves it under (spec.model.servedName).
    max_staleness: see pacing.Pace; needs note_version. None: submit whatever the fleet serves.
    on_abort: what becomes of a sample that an update interrupts.
    hold_s: how long a prompt waits for an engine that answers it: through an update, a restart, until a version is
        served. Counted anew after each answer.
    deadline_s: for one sample, from its turn on, whatever happens.
    concurrency: samples at once; more wait for their turn.
    logprobs: of the sampled tokens, with each sample.
    routed_experts: every answer that is not aborted must have them, else RoutedExpertsError.
    resend_unanswered: send a request again whose connection broke before there was an answer, though an engine may have
        worked on it, or still does.
    transport: httpx's, for who has one of their own, with a client certificate say.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        model: str,
        max_staleness: int | None = None,
        on_abort: OnAbort | str = OnAbort.RETURN,
        hold_s: float = 60.0,
        deadline_s: float = 3600.0,
        concurrency: int = 64,
        logprobs: bool = True,
        routed_experts: bool = False,
        resend_unanswered: bool = False,
        api_key: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        urls = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        if not urls or any(not url.startswith(("http://", "https://")) for url in urls):
            raise ValueError(f"endpoints {urls}: must be URLs as http://host:port")
        if hold_s < 0 or deadline_s <= 0 or concurrency < 1:
            raise ValueError("hold_s must not be negative, deadline_s must be positive, concurrency at least 1")
        self._endpoints = [_Endpoint(url.rstrip("/")) for url in urls]
        self._model = model
        self._on_abort = OnAbort(on_abort)
        self._hold_s = hold_s
        self._deadline_s = deadline_s
        self._logprobs = logprobs
        self._routed_experts = routed_experts
        self._resend = resend_unanswered
        self._pace = Pace(max_staleness)
        self._turns = asyncio.Semaphore(concurrency)
        self._running: set[asyncio.Task[Sample]] = set()
        self._closed = False
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            # A request on an idle connection that the engine closes meanwhile (uvicorn: after 5 s) may be lost, and how
            # long one was idle a trainer whose steps keep its event loop busy cannot tell. So each request has its own.
            limits=httpx.Limits(max_keepalive_connections=0),
            headers={"Connection": "close", "Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            trust_env=False,
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End what runs, here and in the engines; whoever waits for it gets ClosedError."""
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await self._http.aclose()

    def note_version(self, version: int) -> None:
        """The trainer's weights are this version now: when it bumps, or when its update has ended."""
        self._pace.note(version)

    @property
    def served_version(self) -> int | None:
        """The newest version that an answer has told of."""
        return self._pace.served

    @property
    def model(self) -> str:
        """The name that it is asked for by."""
        return self._model

    @property
    def on_abort(self) -> OnAbort:
        """What becomes of interrupted samples."""
        return self._on_abort

    async def unreachable(self) -> str:
        """Why no endpoint's server is up; empty where one is. It may be closed all the same, or without weights yet."""
        why = ""
        for endpoint in self._endpoints:
            try:
                async with asyncio.timeout(HEALTH_S), self._http.stream("GET", f"{endpoint.url}/health") as answer:
                    if answer.status_code == httpx.codes.OK:
                        return ""
                    words = (await read_body(answer, BYTES_BESIDE)).decode(errors="replace")
            except (httpx.TransportError, TimeoutError, BadAnswerError) as error:
                why = f"{endpoint.url}/health: {type(error).__name__}: {error}"
                continue
            why = f"{endpoint.url}/health: HTTP {answer.status_code}: {fitted(words, 200)}"
        return why

    async def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        version: int | None = None,
        min_version: int | None = None,
        rank: int | None = None,
        **fields: Any,
    ) -> Sample:
        """/v1/completions. `fields` are sampling parameters by the names of that route.

        version, min_version: which weights may answer (X-Weight-Version-Required, -Min), waited for up to hold_s;
        VersionPassedError where the fleet is past that version. rank: X-data-parallel-rank. Raises the kinds of
        RolloutError, ValueError for what this client does not do.
        """
        asked = prompt if isinstance(prompt, str) else tuple(prompt)
        ask = Ask(COMPLETIONS, self._model, asked, max_tokens, self._logprobs, fields)
        return await self._sample(ask, Demand(version, min_version), rank)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        *,
        version: int | None = None,
        min_version: int | None = None,
        rank: int | None = None,
        **fields: Any,
    ) -> Sample:
        """/v1/chat/completions; else as complete. A continued answer goes on as a completion of the same tokens."""
        ask = Ask(CHAT, self._model, tuple(messages), max_tokens, self._logprobs, fields)
        return await self._sample(ask, Demand(version, min_version), rank)

    async def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        version: int | None = None,
        min_version: int | None = None,
        rank: int | None = None,
        **fields: Any,
    ) -> Sample:
        """/inference/v1/generate, tokens in and out; `fields` are vLLM's SamplingParams. Else as complete."""
        ask = Ask(TOKENS, self._model, tuple(token_ids), max_tokens, self._logprobs, fields)
        return await self._sample(ask, Demand(version, min_version), rank)

    async def replay(
        self, token_ids: Sequence[int], trace: Sequence[int], *, rank: int | None = None, **fields: Any
    ) -> Sample:
        """Logprobs of a given output: the engine must emit `trace`, all of it, after `token_ids`.

        The limit is the trace's own length, which vLLM would otherwise cut at its default of 16 tokens. TraceError
        where other tokens come: by an engine without features.traceReplay, say.
        """
        ask = Ask(TOKENS, self._model, tuple(token_ids), len(trace), True, fields, tuple(trace))
        sample = await self._sample(ask, Demand(), rank)
        if sample.tokens != ask.trace[: len(sample.tokens)] or not (sample.aborted or sample.tokens == ask.trace):
            same = next(
                (i for i, pair in enumerate(zip(sample.tokens, trace, strict=False)) if pair[0] != pair[1]), None
            )
            where = "" if same is None else f", the first other one at {same}"
            told = f"{len(sample.tokens)} tokens came for a trace of {len(trace)}{where}"
            raise TraceError(f"{sample.engine}{TOKENS}: {told}: does the fleet have features.traceReplay?")
        return sample

    # --- one sample

    async def _sample(self, ask: Ask, demand: Demand, rank: int | None) -> Sample:
        if self._on_abort is OnAbort.CONTINUE:
            ask.require_continuable()
        if self._closed:
            raise ClosedError("this client is closed")
        task = asyncio.create_task(self._in_turn(ask, demand, rank))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._closed:
                raise ClosedError("this client was closed before the sample was complete") from None
            task.cancel()
            await asyncio.wait([task])  # its connection is closed when this is over, and so the engine knows
            raise

    async def _in_turn(self, ask: Ask, demand: Demand, rank: int | None) -> Sample:
        gathered = Gathered()
        async with self._turns:
            try:
                async with asyncio.timeout(self._deadline_s):
                    return await self._gather(ask, demand, rank, gathered)
            except TimeoutError:
                partial = gathered.sample(ABORT) if gathered.segments else None
                raise OverdueError(f"{ask.route}: no sample within {self._deadline_s:g} s", partial) from None

    async def _gather(self, ask: Ask, demand: Demand, rank: int | None, gathered: Gathered) -> Sample:
        """Ask, and ask again after an interruption, until there is something to hand out."""
        waiting = self._waiting()
        while True:
            try:
                segment = await self._answer(ask, demand, rank, gathered, waiting)
            except VersionPassedError:
                if not gathered.segments:
                    raise
                return gathered.sample(ABORT)  # what there is of that version
            gathered.add(segment)
            if segment.finish_reason != ABORT:
                return self._finished(gathered, segment.finish_reason)
            if self._on_abort is OnAbort.RETURN:
                return gathered.sample(ABORT)
            if len(gathered.tokens) >= ask.max_tokens:
                return self._finished(gathered, LENGTH)
            if segment.tokens:
                waiting = self._waiting()
            else:  # it was caught before its first token: as good as refused
                gathered.segments.pop()
                self._rest(waiting, waiting.asked, Wait(f"{segment.engine}: aborted before its first token"))
            if self._on_abort is OnAbort.RESTART:
                gathered.forget()

    def _finished(self, gathered: Gathered, reason: str) -> Sample:
        if self._routed_experts and (lacking := gathered.unrouted) is not None:
            told = "came without routed_experts: does the fleet have features.routedExperts?"
            raise RoutedExpertsError(f"{lacking.engine}: an answer of {len(lacking.tokens)} tokens {told}")
        return gathered.sample(reason)

    def _waiting(self) -> _Waiting:
        return _Waiting(asyncio.get_running_loop().time() + self._hold_s)

    # --- one answer

    async def _answer(
        self, ask: Ask, demand: Demand, rank: int | None, gathered: Gathered, waiting: _Waiting
    ) -> Segment:
        """Of whichever endpoint answers within hold_s."""
        prompt, done = gathered.prompt_tokens, gathered.tokens
        route, body = body_of(ask, prompt, done)
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        most = largest_answer(len(content) + ask.max_tokens)
        async with self._pace.turn(waiting.until):
            while True:
                endpoint, wanted = await self._pick(waiting), self._wanted(demand)
                waiting.asked = endpoint.url
                outcome = await self._send(endpoint, route, content, _headers(wanted, rank), most)
                if isinstance(outcome, Answered):
                    self._pace.heard(served_version(outcome.headers))
                where = f"{endpoint.url}{route}"
                verdict = judge(outcome, wanted, where, resend_unanswered=self._resend)
                if isinstance(verdict, Fail):
                    raise verdict.error
                if isinstance(verdict, Wait):
                    self._rest(waiting, endpoint.url, verdict)
                else:
                    break
        assert isinstance(outcome, Answered)  # noqa: S101 - nothing else is taken
        asked = tuple(body["token_ids"]) if route == TOKENS else ()
        segment = read_answer(route, outcome.headers, outcome.body, endpoint.url, asked, logprobs=ask.logprobs)
        sent = body.get("prompt") if not any(name in ask.fields for name in TRUNCATED) else None
        tokens = sent if isinstance(sent, list) else None
        require_asked(segment, tokens, ask.max_tokens - len(done), where)
        return segment

    def _wanted(self, demand: Demand) -> Demand:
        """With what max_staleness asks for by now."""
        floor = self._pace.floor
        if floor is None:
            return demand
        if demand.required is None:
            return Demand(minimum=max(floor, demand.minimum or 0))
        if demand.required < floor:
            raise VersionPassedError(f"version {demand.required} is asked for, max_staleness allows {floor} or later")
        return demand

    async def _pick(self, waiting: _Waiting) -> _Endpoint:
        """The least busy of those that did not just send us away; else the one that may be asked first."""
        now = asyncio.get_running_loop().time()
        awake = [each for each in self._endpoints if waiting.resting.get(each.url, now) <= now]
        if awake:
            return min(awake, key=lambda each: (each.in_flight, random.random()))  # noqa: S311 - not for secrets
        first = min(self._endpoints, key=lambda each: waiting.resting[each.url])
        await asyncio.sleep(min(waiting.resting[first.url], waiting.until) - now)
        return first

    def _rest(self, waiting: _Waiting, url: str, verdict: Wait) -> None:
        """Do not ask it for a while. Raises NotServedError where the patience is over."""
        now = asyncio.get_running_loop().time()
        if now >= waiting.until:
            raise NotServedError(f"nobody has answered for {self._hold_s:g} s; the last one said: {verdict.why}")
        tries = waiting.tries.get(url, 0)
        waiting.tries[url] = tries + 1
        waiting.resting[url] = now + delay_s(tries, verdict.after_s, random.random())  # noqa: S311 - not for secrets

    async def _send(
        self, endpoint: _Endpoint, route: str, content: bytes, headers: dict[str, str], most: int
    ) -> Outcome:
        endpoint.in_flight += 1
        try:
            async with self._http.stream("POST", f"{endpoint.url}{route}", content=content, headers=headers) as answer:
                body = await read_body(answer, most)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return NotSent(f"{type(error).__name__}: {error}{_hint(error)}")
        except httpx.TransportError as error:
            return Unanswered(f"{type(error).__name__}: {error}")
        finally:
            endpoint.in_flight -= 1
        return Answered(answer.status_code, {name.lower(): value for name, value in answer.headers.items()}, body)


def _headers(demand: Demand, rank: int | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json"} | ({} if rank is None else {RANK_HEADER: str(rank)})
    return headers if demand.header is None else headers | {demand.header[0]: str(demand.header[1])}


def _hint(error: BaseException | None) -> str:
    """Of a name that nobody knows, as a fleet's is outside of its cluster."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    known_inside = "a fleet's status.endpoint is known within its cluster only: elsewhere give endpoints (--endpoint)"
    return "" if error is None else f" ({known_inside})"
