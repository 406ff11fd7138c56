"""What clients get: the version on every answer, log-probabilities, streams, ranks, errors."""

from collections.abc import Iterator

from rollfleet_cli.conformance.checks.asking import (
    MOST,
    RANK_HEADER,
    Headers,
    chat,
    completion,
    request,
    tells_logprobs,
    without_text,
)
from rollfleet_cli.conformance.checks.check import Check, Fault, Promise, Steps, Subject
from rollfleet_cli.conformance.checks.judging import (
    completed,
    each,
    generated,
    has_status,
    numbers,
    openai_error,
    refused,
    streamed,
    tells_version,
)
from rollfleet_cli.conformance.checks.states import series
from rollfleet_cli.conformance.checks.wire import Exchange, get, post
from rollfleet_protocol.refusals import MINIMUM_HEADER, REQUIRED_HEADER, WEIGHT_VERSION_HEADER, RefusalReason

FINISHED = "vllm:request_success_total"
DEFAULT_MAX_LOGPROBS = 20  # vLLM's
NO_VERSIONS = ("", "-1", "one", "1.0", "0x1")
NO_RANKS = ("-1", "abc", "", "1.0", "99999999")
NO_MODEL = "no-model-of-this-fleet"
SOME_BODY = "something between client and engine changes answers, or the image's guard is not this release's"


def _completion(subject: Subject) -> Steps:
    lies = ((WEIGHT_VERSION_HEADER, str(subject.version + 77)),)
    answers = yield (request(subject), request(subject, headers=lies))
    return tuple(each(answers, lambda answer: generated(answer, subject, MOST)))


def _token_ids(subject: Subject) -> Steps:
    (answer,) = yield (completion(subject, return_token_ids=True),)
    return (*generated(answer, subject, MOST), *token_ids(answer, subject))


def token_ids(exchange: Exchange, subject: Subject) -> Iterator[Fault]:
    """The prompt's as they were sent, and one for each token of the answer."""
    found = completed(exchange)
    if found is None:
        return
    ids, prompt = found.choice.get("token_ids"), found.choice.get("prompt_token_ids")
    if prompt != list(subject.probe_tokens):
        yield Fault(f"prompt_token_ids must be {list(subject.probe_tokens)}, they are {str(prompt)[:200]}")
    if not isinstance(ids, list) or len(ids) != found.tokens or not all(isinstance(each, int) for each in ids):
        yield Fault(f"token_ids must name each of {found.tokens} tokens, they are {str(ids)[:200]}")


def _stream(subject: Subject) -> Steps:
    whole, stream = yield (completion(subject), completion(subject, stream=True))
    found = [*generated(whole, subject, MOST), *has_status(stream, 200)]
    return tuple(found) if found else tuple(stream_ends(whole, stream, subject))


def stream_ends(whole: Exchange, stream: Exchange, subject: Subject) -> Iterator[Fault]:
    """With [DONE] and a reason, of one version, and with as much as the same without a stream."""
    yield from tells_version(stream, subject.version)
    events, known = streamed(stream), completed(whole)
    if events.last != "data: [DONE]" or events.after_done:
        yield Fault(f"a stream must end with data: [DONE], once; it ends with {events.last[:200]!r}")
    if events.finish_reason != "length":
        yield Fault(f"the last event must tell finish_reason 'length', it tells {events.finish_reason!r}")
    if events.spans:
        yield Fault(f"a stream of one version tells spans: {events.spans[0][:200]}")
    text = known.choice.get("text") if known is not None else None
    if bool(text) != bool(events.text):
        yield Fault(f"as a stream it says {events.text[:200]!r}, as a whole {str(text)[:200]!r}")


def _chat(subject: Subject) -> Steps:
    (answer,) = yield (chat(subject),)
    if answer.status == 400 and "chat template" in answer.text:
        return tuple(openai_error(answer, 400))  # a model without one: refused in the form that clients read
    return tuple(generated(answer, subject, MOST))


def _logprobs(subject: Subject) -> Steps:
    most = subject.config.features.max_logprobs
    most = DEFAULT_MAX_LOGPROBS if most is None else most
    wanted = min(most, 2) if most >= 0 else 2
    (answer,) = yield (completion(subject, logprobs=wanted),)
    found = [*generated(answer, subject, MOST), *token_logprobs(answer, below_zero=tells_logprobs(subject))]
    if most >= 0:
        (over,) = yield (completion(subject, logprobs=most + 1),)
        found += openai_error(over, 400)
        if over.status == 400 and str(most) not in over.told:
            found.append(
                Fault(f"the refusal of {most + 1} log-probabilities does not tell the bound {most}", over.told)
            )
    return tuple(found)


def token_logprobs(exchange: Exchange, *, below_zero: bool) -> Iterator[Fault]:
    """One for each token of the answer."""
    found = completed(exchange)
    told = found.choice.get("logprobs") if found is not None else None
    values = told.get("token_logprobs") if isinstance(told, dict) else None
    yield from numbers("logprobs.token_logprobs", values, MOST, below_zero=below_zero)


def _demanded(subject: Subject) -> Steps:
    version = subject.version
    taken = (
        ((REQUIRED_HEADER, str(version)),),
        ((MINIMUM_HEADER, str(version)),),
        ((MINIMUM_HEADER, "0"),),
        ((REQUIRED_HEADER, str(version)), (MINIMUM_HEADER, str(version))),
    )
    others: list[Headers] = [((REQUIRED_HEADER, str(version + 1)),), ((MINIMUM_HEADER, str(version + 1)),)]
    others += [((REQUIRED_HEADER, str(version)), (MINIMUM_HEADER, str(version + 1)))]
    others += [((REQUIRED_HEADER, str(version - 1)),)] if version else []
    malformed = [((REQUIRED_HEADER, text),) for text in NO_VERSIONS]
    answers = yield tuple(request(subject, 1, headers) for headers in taken)
    found = list(each(answers, lambda answer: generated(answer, subject, 1)))
    answers = yield tuple(request(subject, 1, headers) for headers in others)
    found += each(answers, lambda answer: wrong_version(answer, version))
    answers = yield tuple(request(subject, 1, headers) for headers in malformed)
    found += each(answers, lambda answer: refused(answer, 400, RefusalReason.INVALID_REQUEST))
    return tuple(found)


def wrong_version(exchange: Exchange, version: int) -> Iterator[Fault]:
    """409 that tells which one there is."""
    yield from refused(exchange, 409, RefusalReason.WRONG_VERSION)
    yield from tells_version(exchange, version)


def _ranks(subject: Subject) -> Steps:
    last = subject.ranks - 1
    found: list[Fault] = []
    for rank in range(subject.ranks):
        before, answer, after = yield (
            get("/metrics"),
            request(subject, 1, ((RANK_HEADER, str(rank)),)),
            get("/metrics"),
        )
        found += generated(answer, subject, 1)
        if subject.ranks > 1:
            found += counted(before, after, rank)
    answers = yield tuple(request(subject, 1, ((RANK_HEADER, text),)) for text in (str(subject.ranks), *NO_RANKS))
    found += each(answers, lambda answer: no_rank(answer, last))
    return tuple(found)


def counted(before: Exchange, after: Exchange, rank: int) -> Iterator[Fault]:
    """The rank itself says that it has answered; others may ask it meanwhile, so it is one at least."""
    then, now = (sum(series(each.text, FINISHED, f'engine="{rank}"')) for each in (before, after))
    if now < then + 1:
        yield Fault(
            f"a request for rank {rank} was answered, and that rank counts {then:g} before and {now:g} after it"
        )


def no_rank(exchange: Exchange, last: int) -> Iterator[Fault]:
    """400 that tells which ranks there are."""
    yield from refused(exchange, 400, RefusalReason.INVALID_REQUEST)
    if f"0 to {last}" not in exchange.told:
        yield Fault(f"{exchange.call.words}: the refusal does not tell that ranks are 0 to {last}", exchange.told)


def _errors(subject: Subject) -> Steps:
    unknown, too_long, no_json, no_prompt = yield (
        completion(subject, model=NO_MODEL),
        completion(subject, most=1 << 30),
        post("/v1/completions", b"{"),
        post("/v1/completions", {"model": subject.config.model.served_name}),
    )
    found = [*openai_error(unknown, 404), *openai_error(too_long, 400)]
    for answer in (no_json, no_prompt):
        found += openai_error(answer, 400, 422)
    return (
        *found,
        *each((unknown, too_long, no_json, no_prompt), lambda answer: tells_version(answer, subject.version)),
    )


CHECKS = (
    Check(
        "version-on-answers",
        f"an answer tells the version that it is of ({WEIGHT_VERSION_HEADER}), once, whatever the client claims",
        Promise.NEVER_STALE,
        SOME_BODY,
        _completion,
    ),
    Check(
        "demanded-versions",
        f"{REQUIRED_HEADER} and {MINIMUM_HEADER} give that version or 409, and 400 where they name none",
        Promise.NEVER_STALE,
        SOME_BODY,
        _demanded,
    ),
    Check(
        "streams",
        "a stream ends with [DONE] and a reason, and tells its version",
        Promise.NEVER_STALE,
        SOME_BODY,
        _stream,
        without_text,
    ),
    Check(
        "errors",
        "the engine's refusals have OpenAI's form and tell the version",
        Promise.NOTHING_HIDDEN,
        "the engine's log has the request; compare with vLLM's release notes",
        _errors,
        without_text,
    ),
    Check(
        "ranks",
        f"{RANK_HEADER} reaches every data-parallel rank, and what is no rank is refused",
        Promise.FEATURES,
        "compare spec.parallelism.data with the engine's own ranks in its log",
        _ranks,
    ),
    Check(
        "token-ids",
        "prompts are taken as token ids, and answers tell theirs",
        Promise.FEATURES,
        "vLLM's return_token_ids",
        _token_ids,
        without_text,
    ),
    Check(
        "chat",
        "chat completions are answered, or refused for want of a chat template",
        Promise.FEATURES,
        "the engine's log has the request",
        _chat,
        without_text,
    ),
    Check(
        "logprobs",
        "each token of an answer has its log-probability, at most spec.features.logprobs.max of them",
        Promise.FEATURES,
        "spec.features.logprobs",
        _logprobs,
        without_text,
    ),
)
