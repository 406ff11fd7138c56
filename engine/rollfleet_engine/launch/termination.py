"""Makes the termination message fit the kubelet's limit and writes it."""

from pathlib import Path

from rollfleet_protocol.termination import (
    EXIT_CONFIGURATION,
    EXIT_TEMPORARY,
    TERMINATION_MESSAGE_BYTES,
    Problem,
    TerminationMessage,
)

LOG_VARIABLE = "ROLLFLEET_TERMINATION_LOG"
DEFAULT_LOG = "/dev/termination-log"  # Kubernetes' default terminationMessagePath
_SHORTEST_TEXT = 80


def exit_code_of(problems: tuple[Problem, ...]) -> int:
    """78 as soon as one problem needs a changed configuration."""
    return EXIT_TEMPORARY if all(problem.retry_may_cure for problem in problems) else EXIT_CONFIGURATION


def encode(message: TerminationMessage, limit: int = TERMINATION_MESSAGE_BYTES) -> bytes:
    """JSON of at most `limit` bytes: the log's oldest lines go first, then long texts are cut, then problems go."""
    while len(encoded := _json(message)) > limit:
        message = _smaller(message)
    return encoded


def _smaller(message: TerminationMessage) -> TerminationMessage:
    if message.log_tail:
        return message.model_copy(update={"log_tail": message.log_tail[1:]})
    longest = max((len(text) for text in _texts(message)), default=0)
    if longest > _SHORTEST_TEXT:
        return _cut(message, max(_SHORTEST_TEXT, longest * 3 // 4))
    return message.model_copy(update={"problems": message.problems[:-1]})


def _texts(message: TerminationMessage) -> list[str]:
    return [message.error, *(text for problem in message.problems for text in (problem.cause, problem.remedy))]


def _cut(message: TerminationMessage, length: int) -> TerminationMessage:
    problems = tuple(
        problem.model_copy(
            update={"cause": _shorten(problem.cause, length), "remedy": _shorten(problem.remedy, length)}
        )
        for problem in message.problems
    )
    return message.model_copy(update={"error": _shorten(message.error, length), "problems": problems})


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _json(message: TerminationMessage) -> bytes:
    return message.model_dump_json(by_alias=True, exclude_defaults=True).encode()


def write(message: TerminationMessage, path: Path) -> str:
    """Write it; the answer is why it could not be written, which is no reason to end otherwise than planned."""
    try:
        path.write_bytes(encode(message))
    except OSError as error:
        return f"termination message could not be written to {path}: {error}"
    return ""
