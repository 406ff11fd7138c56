"""The simulator's HTTP surface: the route table of vLLM 0.27.1."""

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Lifespan

from rollfleet_engine.simulator.answers import (
    DONE,
    Chat,
    Completion,
    model_list,
    prompt_logprobs,
    sse,
    token_logprobs,
    usage,
)
from rollfleet_engine.simulator.core import Core, CoreDeadError, End, Generation, Step, TooManyRequestsError
from rollfleet_engine.simulator.metrics import render
from rollfleet_engine.simulator.native import native_routes
from rollfleet_engine.simulator.requests import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    Limits,
    RequestError,
    TokensBody,
    chat_tokens,
    prompt_tokens,
    read_body,
    wanted_rank,
)
from rollfleet_engine.simulator.tokens import decode, encode

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    model: str
    limits: Limits
    tell_cached_tokens: bool  # --enable-prompt-tokens-details


class TokenizeBody(BaseModel):
    """POST /tokenize."""

    prompt: str


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    tokens: list[int]


class Simulator:
    """The handlers of one server."""

    def __init__(self, core: Core, settings: Settings) -> None:
        self._core = core
        self._settings = settings
        self._created = int(time.time())

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await read_body(request, CompletionBody)
        self._settings.limits.check_logprobs(body.logprobs)
        prompt = prompt_tokens(body)
        form = Completion(self._settings.limits.served_name, body.logprobs, token_ids=body.return_token_ids)
        return await self._answer(request, body, prompt, body.max_tokens, form)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await read_body(request, ChatBody)
        top = body.top_logprobs if body.logprobs else None
        self._settings.limits.check_logprobs(top)
        form = Chat(self._settings.limits.served_name, top, token_ids=body.return_token_ids)
        return await self._answer(request, body, chat_tokens(body), body.max_completion_tokens or body.max_tokens, form)

    async def tokens(self, request: Request) -> Response:
        """POST /inference/v1/generate: tokens in, tokens out."""
        body = await read_body(request, TokensBody)
        if body.stream:
            raise RequestError(400, "the simulator does not stream on this route", param="stream")
        self._settings.limits.check_logprobs(body.sampling_params.logprobs)
        generation = self._generation(request, body, tuple(body.token_ids), body.sampling_params.max_tokens)
        steps, reason = await _whole(request, self._core.generate(generation))
        logprobs = token_logprobs(steps, body.sampling_params.logprobs)
        choice = {
            "index": 0,
            "logprobs": logprobs,
            "finish_reason": reason,
            "token_ids": [step.token for step in steps],
        }
        return JSONResponse(
            {
                "request_id": "generate-tokens",
                "model": self._settings.limits.served_name,
                "created": int(time.time()),
                "choices": [choice | {"routed_experts": None}],
                "usage": self._usage(generation),
                "prompt_logprobs": None,
            }
        )

    def _generation(
        self, request: Request, body: GenerateBody, prompt: tuple[int, ...], wanted: int | None
    ) -> Generation:
        limits = self._settings.limits
        limits.check_model(body.model)
        count = limits.check_length(len(prompt), wanted)
        rank = wanted_rank(request, self._core.ranks)
        return Generation(prompt=prompt, max_tokens=count, cache_salt=body.cache_salt or "", rank=rank)

    def _usage(self, generation: Generation, *, chunk: bool = False) -> dict[str, Any]:
        cached = generation.cached_tokens if self._settings.tell_cached_tokens else None
        return usage(len(generation.prompt), len(generation.output), cached, chunk=chunk)

    async def _answer(
        self, request: Request, body: GenerateBody, prompt: tuple[int, ...], wanted: int | None, form: Completion | Chat
    ) -> Response:
        generation = self._generation(request, body, prompt, wanted)
        self._core.require_alive()
        if body.stream:
            tell_usage = body.stream_options is not None and body.stream_options.include_usage
            events = self._stream(generation, form, tell_usage=tell_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        steps, reason = await _whole(request, self._core.generate(generation))
        logprobs = None
        if body.prompt_logprobs is not None:
            logprobs = prompt_logprobs(self._core.weights.digest, prompt)
        return JSONResponse(form.whole(prompt, steps, reason, self._usage(generation), logprobs))

    async def _stream(
        self, generation: Generation, form: Completion | Chat, *, tell_usage: bool
    ) -> AsyncIterator[bytes]:
        for event in form.opening():
            yield sse(event)
        place = 0
        waiting: Step | None = None  # the last token goes out together with the reason
        try:
            async with aclosing(self._core.generate(generation)) as steps:
                async for step in steps:
                    reason = step.reason if isinstance(step, End) else None
                    if waiting is not None or reason is not None:
                        yield sse(form.chunk(waiting, place, reason))
                        place += 1
                    waiting = step if isinstance(step, Step) else None
        except CoreDeadError as error:
            yield sse(_dead(error)) + DONE
            return
        if tell_usage:
            yield sse(form.closing(self._usage(generation, chunk=True)))
        yield DONE

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        tokens = encode((await read_body(request, TokenizeBody)).prompt)
        limit = self._settings.limits.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": list(tokens), "token_strs": None})

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        return JSONResponse({"prompt": decode((await read_body(request, DetokenizeBody)).tokens)})

    async def health(self, request: Request) -> Response:
        """GET /health, and /ping as SageMaker asks."""
        return Response(status_code=200 if self._core.alive() else 503)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": "0.27.1"})

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        settings = self._settings
        limits = settings.limits
        return JSONResponse(model_list(limits.served_name, settings.model, limits.max_model_len, self._created))

    async def load(self, request: Request) -> Response:
        """GET /load."""
        return JSONResponse({"server_load": self._core.running})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return PlainTextResponse(render(self._core, self._settings.limits.served_name))


async def _whole(request: Request, steps: AsyncGenerator[Step | End, None]) -> tuple[list[Step], str]:
    """All tokens and the reason; a client that went away ends its request, as in vLLM."""
    gone = asyncio.ensure_future(_disconnected(request))
    collected = asyncio.ensure_future(_collect(steps))
    try:
        await asyncio.wait({gone, collected}, return_when=asyncio.FIRST_COMPLETED)
        return await collected if collected.done() else ([], "abort")
    finally:
        gone.cancel()
        collected.cancel()


async def _collect(steps: AsyncGenerator[Step | End, None]) -> tuple[list[Step], str]:
    found: list[Step] = []
    async with aclosing(steps):
        async for step in steps:
            if isinstance(step, End):
                return found, step.reason
            found.append(step)
    raise RuntimeError("a generation ended without a reason")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _dead(error: CoreDeadError) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": "InternalServerError", "param": None, "code": 500}}


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)  # noqa: S101 - Starlette calls it for this class only
    return JSONResponse(error.body, status_code=error.status)


def _died(request: Request, error: Exception) -> Response:
    assert isinstance(error, CoreDeadError)  # noqa: S101
    return JSONResponse(_dead(error), status_code=500)


def _overloaded(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error), "type": "Overloaded", "param": None, "code": 503}}, 503)


@asynccontextmanager
async def heap_frozen(_: Any) -> AsyncIterator[None]:
    """A lifespan that, as vLLM's does (server_utils.lifespan, 0.23 to 0.32), leaves what the start has made out of
    every later collection: torch and the rest are 200,000 objects, which would cost each request 150 us under load.
    """
    gc.collect()
    gc.freeze()
    yield


def build_app(core: Core, settings: Settings, lifespan: Lifespan[Starlette] | None = None) -> Starlette:
    """The application that the guard stands in front of."""
    simulator = Simulator(core, settings)
    handlers: dict[tuple[str, str], Handler] = {
        ("POST", "/v1/completions"): simulator.completions,
        ("POST", "/v1/chat/completions"): simulator.chat,
        ("POST", "/inference/v1/generate"): simulator.tokens,
        ("POST", "/tokenize"): simulator.tokenize,
        ("POST", "/detokenize"): simulator.detokenize,
        ("GET", "/health"): simulator.health,
        ("GET", "/ping"): simulator.health,
        ("POST", "/ping"): simulator.health,
        ("GET", "/version"): simulator.version,
        ("GET", "/v1/models"): simulator.models,
        ("GET", "/load"): simulator.load,
        ("GET", "/metrics"): simulator.metrics,
        **native_routes(core),
    }
    routes = [_route(method, path, handler) for (method, path), handler in handlers.items()]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            RequestError: _refused,
            CoreDeadError: _died,
            TooManyRequestsError: _overloaded,
        },
    )


def _route(method: str, path: str, handler: Handler) -> Route:
    route = Route(path, handler, methods=[method])
    route.methods = {method}  # FastAPI, unlike Starlette, adds no HEAD to a GET
    return route


def print_routes(app: Starlette) -> None:
    """As vLLM does at start: the table that really is served, for whoever checks that each route is classified."""
    for route in app.routes:
        if isinstance(route, Route) and route.methods:
            print(f"Route: {route.path}, Methods: {', '.join(sorted(route.methods))}", flush=True)
