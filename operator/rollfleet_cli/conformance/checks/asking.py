"""Requests for inference, as small as they can be: what a check asks costs the fleet that serves next to nothing."""

from typing import Any

from rollfleet_cli.conformance.checks.check import Subject
from rollfleet_cli.conformance.checks.wire import Call, post
from rollfleet_protocol.launch_settings import LogprobsMode, TokenEndpoint

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
MOST = 4  # tokens of an ordinary answer
RANK_HEADER = "X-data-parallel-rank"
Headers = tuple[tuple[str, str], ...]


def completion(subject: Subject, most: int = MOST, headers: Headers = (), **fields: Any) -> Call:
    """POST /v1/completions of the probe's tokens, greedy, to its full length."""
    body: dict[str, Any] = {
        "model": subject.config.model.served_name,
        "prompt": list(subject.probe_tokens),
        "max_tokens": most,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": subject.salt,
    }
    return post(COMPLETIONS, body | fields, headers=headers)


def generation(subject: Subject, most: int = MOST, headers: Headers = (), **parameters: Any) -> Call:
    """POST /inference/v1/generate of the same."""
    sampling = {"max_tokens": most, "temperature": 0, "ignore_eos": True}
    body = {"token_ids": list(subject.probe_tokens), "sampling_params": sampling | parameters}
    return post(GENERATE, body | {"cache_salt": subject.salt}, headers=headers)


def request(subject: Subject, most: int = MOST, headers: Headers = ()) -> Call:
    """One of the two: a server of tokens only has no other route."""
    return generation(subject, most, headers) if tokens_only(subject) else completion(subject, most, headers)


def chat(subject: Subject, most: int = MOST, **fields: Any) -> Call:
    """POST /v1/chat/completions."""
    body: dict[str, Any] = {
        "model": subject.config.model.served_name,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": most,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": subject.salt,
    }
    return post(CHAT, body | fields)


def tokens_only(subject: Subject) -> bool:
    """Whether the server has no text."""
    return subject.config.features.token_endpoint is TokenEndpoint.TOKENS_ONLY


def without_text(subject: Subject) -> str:
    """Why what needs text is not asked."""
    return "spec.features.tokenEndpoint is TokensOnly: there is no route for text" if tokens_only(subject) else ""


def tells_logprobs(subject: Subject) -> bool:
    """Whether what is called logprobs in answers is that, and not logits."""
    mode = subject.config.features.logprobs_mode
    return mode in (None, LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS)
