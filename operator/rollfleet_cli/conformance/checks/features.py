"""What only some fleets ask for, and what the operator rests on: the probe."""

import ast
import base64
import binascii
from collections.abc import Iterator, Sequence

from pydantic import ValidationError

from rollfleet_cli.conformance.checks.asking import (
    MOST,
    chat,
    completion,
    generation,
    tells_logprobs,
    tokens_only,
    without_text,
)
from rollfleet_cli.conformance.checks.check import Check, Fault, Promise, Steps, Subject
from rollfleet_cli.conformance.checks.judging import (
    alike,
    completed,
    generated,
    has_status,
    numbers,
    prompt_values,
    tells_version,
    token_values,
)
from rollfleet_cli.conformance.checks.wire import Call, Exchange, Identity, Port, Together, post
from rollfleet_protocol.commands import PROBE_PATH, Probe
from rollfleet_protocol.launch_settings import LogprobsMode, TokenEndpoint
from rollfleet_protocol.state import ProbeReport

PROBE_S = 45.0
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
BATCH = 7  # requests beside the one that is looked at
ALONE = 8  # tokens of it
NPY = b"\x93NUMPY"  # how numpy's files begin, then two bytes of version and the length of the head
NPY_HEAD = 10  # bytes before the head, of version 1.0
EXPERT_TYPES = ("|u1", "<u2", "<u4")  # unsigned numbers of experts (vLLM: uint8 or uint16)


def probe_call(subject: Subject) -> Call:
    """The operator's probe of an engine that may be serving: it changes and pauses nothing."""
    probe = Probe(incarnation=subject.state.incarnation, tokens=subject.probe_tokens, deadline_seconds=PROBE_S)
    body = probe.model_dump_json(by_alias=True).encode()
    return post(PROBE_PATH, body, port=Port.CONTROL, identity=Identity.OPERATOR)


def report_of(exchange: Exchange) -> ProbeReport | None:
    """What it said to the probe; None where it is no report."""
    try:
        return ProbeReport.model_validate_json(exchange.body) if exchange.status == 200 else None
    except ValidationError:
        return None


def _probe(subject: Subject) -> Steps:
    (answer,) = yield (probe_call(subject),)
    report = report_of(answer)
    if report is None:
        return (Fault("the probe must be answered while the engine serves", answer.told),)
    return tuple(probed(report, subject))


def probed(report: ProbeReport, subject: Subject) -> Iterator[Fault]:
    """Every rank answered all tokens, and alike."""
    if report.tokens != subject.probe_tokens or report.incarnation != subject.state.incarnation:
        yield Fault(f"the report is of other tokens or another process: {report.tokens}, {report.incarnation}")
    if len(report.by_rank) != subject.ranks:
        yield Fault(f"{len(report.by_rank)} of {subject.ranks} data-parallel ranks answered the probe")
    for rank, values in enumerate(report.by_rank):
        yield from numbers(f"probe of rank {rank}", values, len(subject.probe_tokens) - 1)
    for rank, values in enumerate(report.by_rank[1:], start=1):
        yield from alike(f"probe of ranks 0 and {rank}", report.by_rank[0], values, subject.exact)


def _as_served(subject: Subject) -> Steps:
    answer, probe = yield (completion(subject, 1, prompt_logprobs=0), probe_call(subject))
    report = report_of(probe)
    found = [*generated(answer, subject, 1), *has_status(probe, 200)]
    if not found and report is not None and report.by_rank:
        found += as_probed(answer, report.by_rank[0], subject)
    elif not found:
        found.append(Fault("the probe's answer is no report", probe.told))
    return tuple(found)


def as_probed(exchange: Exchange, values: Sequence[float], subject: Subject) -> Iterator[Fault]:
    """What a client gets for these tokens is what the operator compares."""
    told = prompt_values(exchange, subject.probe_tokens)
    yield from numbers("prompt_logprobs", told, len(subject.probe_tokens) - 1)
    if told:
        yield from alike("prompt_logprobs of a request and the operator's probe", told, values, subject.allowed)


def _only_raw(subject: Subject) -> str:
    mode = subject.config.features.logprobs_mode
    raw = mode in (None, LogprobsMode.RAW_LOGPROBS)
    return without_text(subject) or (
        "" if raw else f"spec.features.logprobs.mode is {mode}: requests tell other numbers"
    )


def _tokens(subject: Subject) -> Steps:
    (answer,) = yield (generation(subject),)
    found = [*generated(answer, subject, MOST)]
    known = completed(answer)
    ids = known.choice.get("token_ids") if known is not None else None
    if not found and (not isinstance(ids, list) or len(ids) != MOST):
        found.append(Fault(f"token_ids must name {MOST} tokens, they are {str(ids)[:200]}"))
    return tuple(found)


def _without_token_endpoint(subject: Subject) -> str:
    asked = subject.config.features.token_endpoint is not TokenEndpoint.DISABLED
    return "" if asked else "spec.features.tokenEndpoint is Disabled"


def _tools(subject: Subject) -> Steps:
    (answer,) = yield (chat(subject, tools=[TOOL], tool_choice="auto"),)
    if answer.status == 400 and "chat template" in answer.text:
        return (Fault("tools need a chat template, and the model has none", answer.told),)
    return (*has_status(answer, 200), *tells_version(answer, subject.version))


def _without_tools(subject: Subject) -> str:
    return "" if subject.config.features.tool_parser else "spec.features.toolCalling is not set"


def _experts(subject: Subject) -> Steps:
    ask = generation if tokens_only(subject) else completion
    (answer,) = yield (ask(subject),)
    return (*generated(answer, subject, MOST), *routed(answer, len(subject.probe_tokens) + MOST - 1))


def routed(exchange: Exchange, tokens: int) -> Iterator[Fault]:
    """An array (tokens, layers, experts of each token); the last token has not been through the model."""
    found = completed(exchange)
    text = found.choice.get("routed_experts") if found is not None else None
    shape = _npy_shape(text)
    if isinstance(shape, str):
        yield Fault(f"routed_experts must be a base64 .npy file of {tokens} tokens: {shape}")
    elif len(shape) != 3 or shape[0] != tokens or min(shape) < 1:
        yield Fault(f"routed_experts must have the shape ({tokens}, layers, experts per token), it has {shape}")


def _npy_shape(text: object) -> tuple[int, ...] | str:
    """Shape of an array in numpy's own format, version 1; else what is wrong with it. Nothing is unpickled."""
    if not isinstance(text, str):
        return f"it is {text!r}"
    try:
        content = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        return str(error)
    if not content.startswith(NPY) or len(content) < NPY_HEAD:
        return "it does not begin as such a file"
    length = int.from_bytes(content[8:NPY_HEAD], "little")
    try:
        head = ast.literal_eval(content[NPY_HEAD : NPY_HEAD + length].decode("latin-1").strip())
        shape, kind = tuple(int(size) for size in head["shape"]), str(head["descr"])
    except (ValueError, SyntaxError, LookupError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        return f"its head cannot be read: {error}"
    return shape if kind in EXPERT_TYPES else f"its values are {kind}, no numbers of experts"


def _without_experts(subject: Subject) -> str:
    return "" if subject.config.features.routed_experts else "spec.features.routedExperts is Disabled"


def _replay(subject: Subject) -> Steps:
    trace = list(subject.probe_tokens)[:MOST]
    (answer,) = yield (generation(subject, len(trace), trace_decode_token_ids=trace, logprobs=0),)
    found = [*generated(answer, subject, len(trace))]
    known = completed(answer)
    if known is not None and known.choice.get("token_ids") != trace:
        found.append(Fault(f"the tokens {trace} were prescribed, {known.choice.get('token_ids')} came"))
    if known is not None and not known.choice.get("logprobs"):
        found.append(Fault("the prescribed tokens have no log-probabilities"))
    return tuple(found)


def _without_replay(subject: Subject) -> str:
    return "" if subject.config.features.trace_replay else "spec.features.traceReplay is Disabled"


def _invariant(subject: Subject) -> Steps:
    looked_at = completion(subject, ALONE, logprobs=0, return_token_ids=True)
    others = [completion(subject, ALONE + 8 * number, prompt=_another(subject, number)) for number in range(BATCH)]
    (alone,) = yield (looked_at,)
    together = yield Together((looked_at, *others))
    return tuple(invariant(alone, together[0], subject))


def _another(subject: Subject, number: int) -> list[int]:
    """Prompts of several lengths, of the same tokens."""
    tokens = list(subject.probe_tokens)
    return (tokens[number % len(tokens) :] + tokens) * (1 + number)


def invariant(alone: Exchange, together: Exchange, subject: Subject) -> Iterator[Fault]:
    """The same request by itself and among others: the same tokens, with bit-equal log-probabilities."""
    yield from generated(alone, subject, ALONE)
    yield from generated(together, subject, ALONE)
    one, other = completed(alone), completed(together)
    if one is None or other is None:
        return
    if one.choice.get("token_ids") != other.choice.get("token_ids"):
        told = f"{one.choice.get('token_ids')} alone, {other.choice.get('token_ids')} among others"
        yield Fault(f"the same request gave other tokens: {told}")
    values = token_values(one.choice), token_values(other.choice)
    yield from alike("log-probabilities alone and among others", *values, subject.exact)


def _without_invariance(subject: Subject) -> str:
    if not subject.config.rl_config.batch_invariant:
        return "spec.rlConfig.enableBatchInvariant is not in effect"
    return without_text(subject) or ("" if tells_logprobs(subject) else "spec.features.logprobs.mode tells logits")


CHECKS = (
    Check(
        "probe",
        "the operator's probe is answered beside requests, by every rank, and alike",
        Promise.NEVER_STALE,
        "ranks that differ hold other weights or compute otherwise: `rollfleet verify NAME`, then replace the pod",
        _probe,
    ),
    Check(
        "probe-as-served",
        "prompt_logprobs of a request are the numbers that the operator's probe compares",
        Promise.NEVER_STALE,
        "the probe looks at something else than requests do: report it with this file",
        _as_served,
        _only_raw,
    ),
    Check(
        "token-endpoint",
        "/inference/v1/generate takes token ids and gives token ids",
        Promise.FEATURES,
        "spec.features.tokenEndpoint; docs/launch-table.md has the words of each release",
        _tokens,
        _without_token_endpoint,
    ),
    Check(
        "tool-calling",
        "tools may be offered for the model to choose",
        Promise.FEATURES,
        "spec.features.toolCalling.parser, and the model's chat template",
        _tools,
        _without_tools,
    ),
    Check(
        "routed-experts",
        "answers carry which experts each token took",
        Promise.FEATURES,
        "spec.features.routedExperts; MoE models only",
        _experts,
        _without_experts,
    ),
    Check(
        "trace-replay",
        "prescribed tokens are generated, with the model's own log-probabilities",
        Promise.FEATURES,
        "spec.features.traceReplay; vLLM 0.29 or newer with Model Runner V2",
        _replay,
        _without_replay,
    ),
    Check(
        "batch-invariance",
        "a request alone and the same among others give bit-equal log-probabilities",
        Promise.FEATURES,
        "spec.rlConfig.enableBatchInvariant; look for preemption in the engine's log, which changes results",
        _invariant,
        _without_invariance,
    ),
)
