"""What is asked of an engine: bodies for its three routes, at first and again with what there is already. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"


class OnAbort(StrEnum):
    """What becomes of a sample that an update interrupts."""

    RETURN = "return"  # it is handed out as it is, with finish_reason "abort"
    RESTART = "restart"  # asked for anew, under the weights that serve then
    CONTINUE = "continue"  # prompt and partial output are submitted again: a sample over versions, token by token known


# What this client needs to say itself.
OURS = frozenset(
    {"model", "prompt", "messages", "token_ids", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"}
    | {"return_token_ids", "stream", "stream_options", "sampling_params", "routed_experts_prompt_start"}
    | {"trace_decode_token_ids"}
)
# One prompt gives one sample here, whose tokens are those that were sampled.
NEVER = frozenset({"best_of", "use_beam_search", "echo", "suffix"})
# Of these an engine keeps a state over the output, which would begin anew in the middle of it.
NOT_CONTINUED = frozenset(
    {"frequency_penalty", "presence_penalty", "response_format", "structured_outputs", "tools"}
    | {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "thinking_token_budget"}
)
# Of the conversation, not of sampling: what a continuation, which is a completion of tokens, knows nothing of.
_OF_CHAT = frozenset(
    {"add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "documents"}
    | {"tool_choice", "parallel_tool_calls", "reasoning_effort", "include_reasoning", "add_special_tokens"}
)
MOST_SEED = 2**63


@dataclass(frozen=True)
class Ask:
    """One prompt, to one route."""

    route: str
    model: str
    prompt: str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
    max_tokens: int
    logprobs: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)  # of sampling, by the route's own names
    trace: tuple[int, ...] = ()  # tokens that the engine must emit

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens}: must be at least 1")
        if not self.prompt:
            raise ValueError("the prompt is empty")
        ours = sorted(self.fields.keys() & OURS)
        if ours:
            raise ValueError(f"{ours[0]}: is said by this client itself")
        never = sorted(name for name in self.fields.keys() & NEVER if self.fields[name])
        if never or self.fields.get("n", 1) != 1:
            raise ValueError(f"{never[0] if never else 'n'}: one prompt gives one sample here")

    def require_continuable(self) -> None:
        """ValueError where what was generated so far cannot be gone on with as if nothing had been."""
        found = sorted(name for name in self.fields.keys() & NOT_CONTINUED if self.fields[name])
        if found:
            raise ValueError(f"{found[0]}: cannot go on in the middle of an output: on_abort must be return or restart")
        contents = [message.get("content") for message in self.prompt if isinstance(message, Mapping)]
        if any(not isinstance(content, str | None) for content in contents):  # images, which tokens do not hold
            raise ValueError("messages: content in parts cannot be continued: on_abort must be return or restart")


def body_of(ask: Ask, prompt_tokens: Sequence[int], done: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """Route and body. `done`: output so far, to be gone on with after `prompt_tokens`; empty at first."""
    left = ask.max_tokens - len(done)
    fields = dict(ask.fields)
    if done and isinstance(fields.get("seed"), int):
        # An engine draws from the seed's beginning again: the same numbers must not decide twice.
        fields["seed"] = (fields["seed"] + len(done)) % MOST_SEED
    if done and isinstance(fields.get("min_tokens"), int):
        fields["min_tokens"] = max(0, fields["min_tokens"] - len(done))
    if ask.route == TOKENS:
        return TOKENS, _tokens_body(ask, fields, [*(prompt_tokens or ask.prompt), *done], left, len(done))
    if done and ask.route == CHAT:
        fields = {name: value for name, value in fields.items() if name not in _OF_CHAT | NOT_CONTINUED}
    body = fields | {"model": ask.model, "max_tokens": left, "return_token_ids": True}
    if done or ask.route == COMPLETIONS:
        prompt = [*prompt_tokens, *done] if done else ask.prompt
        told = {"logprobs": 0} if ask.logprobs else {}
        return COMPLETIONS, body | told | {"prompt": list(prompt) if isinstance(prompt, tuple) else prompt}
    told = {"logprobs": True, "top_logprobs": 0} if ask.logprobs else {}
    return CHAT, body | told | {"messages": list(ask.prompt)}


# Fields of the token route that are not sampling parameters (vLLM 0.27.1, token_in_token_out/protocol.py).
_OF_TOKENS = frozenset({"request_id", "cache_salt", "priority", "features", "kv_transfer_params"})


def _tokens_body(ask: Ask, fields: dict[str, Any], tokens: list[Any], left: int, done: int) -> dict[str, Any]:
    around = {name: fields.pop(name) for name in _OF_TOKENS & fields.keys()}
    if done:
        around.pop("request_id", None)  # the engine may not have let go of the one that it aborted
    sampling = fields | {"max_tokens": left} | ({"logprobs": 0} if ask.logprobs else {})
    if ask.trace:
        sampling["trace_decode_token_ids"] = list(ask.trace[done:])
    return around | {"model": ask.model, "token_ids": tokens, "sampling_params": sampling}
