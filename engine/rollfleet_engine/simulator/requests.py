"""What clients ask for: vLLM's request fields as far as they are simulated, and its words where they are wrong."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from rollfleet_engine.simulator.tokens import VOCABULARY, encode

B = TypeVar("B", bound=BaseModel)
TokenId = Annotated[int, Field(ge=0, lt=VOCABULARY)]


class RequestError(Exception):
    """Answered in the form of an OpenAI error, as vLLM words it."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class StreamOptions(BaseModel):
    """OpenAI's."""

    include_usage: bool = False


class GenerateBody(BaseModel):
    """What the generating routes share. Sampling parameters are taken and have no effect: decoding is greedy."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=1)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: str | list[TokenId] | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 16  # OpenAI's default, and vLLM's
    logprobs: Annotated[int, Field(ge=0)] | None = None


class ChatMessage(BaseModel):
    """One turn."""

    role: str
    content: str


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] = 0


class SamplingParams(BaseModel):
    """vLLM's, of the token endpoint."""

    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0)] | None = None


class TokensBody(GenerateBody):
    """POST /inference/v1/generate."""

    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: SamplingParams


@dataclass(frozen=True)
class Limits:
    """What one server allows."""

    served_name: str
    max_model_len: int
    max_logprobs: int = 20  # -1: the whole vocabulary

    def check_model(self, name: str | None) -> None:
        """The model's name may be left out."""
        if name is not None and name != self.served_name:
            raise RequestError(404, f"The model `{name}` does not exist.", "NotFoundError", "model")

    def check_logprobs(self, wanted: int | None) -> None:
        """How many are told for each token."""
        most = VOCABULARY if self.max_logprobs < 0 else self.max_logprobs
        if wanted is not None and wanted > most:
            message = f"Requested sample logprobs of {wanted}, which is greater than max allowed: {most}"
            raise RequestError(400, message, param="logprobs")

    def check_length(self, prompt: int, wanted: int | None) -> int:
        """How many tokens may be generated."""
        limit = self.max_model_len
        if wanted is not None and wanted > limit:
            message = (
                f"max_tokens={wanted} cannot be greater than max_model_len=max_total_tokens={limit}. "
                f"Please request fewer output tokens. (parameter=max_tokens, value={wanted})"
            )
            raise RequestError(400, message, param="max_tokens")
        if prompt + (wanted or 1) > limit:
            message = (
                f"This model's maximum context length is {limit} tokens. However, you requested {wanted or 1} output "
                f"tokens and your prompt contains {prompt} input tokens. Please reduce the length of either one."
            )
            raise RequestError(400, message, param="input_tokens")
        return wanted if wanted is not None else limit - prompt


async def read_body(request: Request, kind: type[B]) -> B:
    """The request's JSON as `kind`."""
    media = request.headers.get("content-type", "").split(";", maxsplit=1)[0].strip().lower()
    if media != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise RequestError(400, message, "Bad Request")
    try:
        return kind.model_validate(json.loads(await request.body()))
    except ValidationError as error:
        raise RequestError(
            400, _words(error.errors(include_url=False, include_context=False)), "Bad Request"
        ) from error
    except ValueError as error:
        raise RequestError(400, f"1 validation error:\n  JSON decode error: {error}", "Bad Request") from error


def _words(errors: list[Any]) -> str:
    lines = [f"  {'.'.join(map(str, ('body', *error['loc'])))}: {error['msg']}" for error in errors]
    return "\n".join([f"{len(errors)} validation error{'s' if len(errors) > 1 else ''}:", *lines])


def prompt_tokens(body: CompletionBody) -> tuple[int, ...]:
    """The prompt, however it is given."""
    if not body.prompt:
        message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise RequestError(400, message, param="prompt")
    return encode(body.prompt) if isinstance(body.prompt, str) else tuple(body.prompt)


def chat_tokens(body: ChatBody) -> tuple[int, ...]:
    """The conversation in the tiny model's chat template."""
    turns = "".join(f"{message.role}: {message.content}\n" for message in body.messages)
    return encode(turns + "assistant:")


def wanted_rank(request: Request, ranks: int) -> int | None:
    """The data-parallel rank that a client asks for. As vLLM: what is no number counts for nothing."""
    text = request.headers.get("X-data-parallel-rank")
    try:
        rank = None if text is None else int(text)
    except ValueError:
        return None
    if rank is not None and not 0 <= rank < ranks:
        raise RequestError(400, f"data_parallel_rank {rank} is out of range [0, {ranks}).")
    return rank
