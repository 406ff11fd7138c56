"""The launcher's last word: JSON in the container's termination message, which the kubelet copies to the pod."""

from rollfleet_protocol.base import Answer
from rollfleet_protocol.words import Words

# The kubelet keeps this many bytes of a termination message (kubelet's MaxContainerTerminationMessageLength).
TERMINATION_MESSAGE_BYTES = 4096

EXIT_CONFIGURATION = 78  # sysexits EX_CONFIG: only a changed spec, image or volume cures it
EXIT_TEMPORARY = 75  # sysexits EX_TEMPFAIL: a restart may find it cured


class Problem(Answer):
    """One thing that keeps an engine from starting."""

    cause: Words  # may name files and variables, whose bytes need not be text
    remedy: Words
    retry_may_cure: bool = False


class TerminationMessage(Answer):
    """Why the launcher ended."""

    exit_code: int
    error: str = ""  # first causal error of the engine's own log
    problems: tuple[Problem, ...] = ()  # of the plan and the preflight
    log_tail: tuple[str, ...] = ()  # last lines of the engine, newest last


def summary(text: str) -> str:
    """One sentence out of a termination message, whoever wrote it."""
    try:
        message = TerminationMessage.model_validate_json(text)
    except ValueError:
        return text.strip()
    causes = [f"{problem.cause}: {problem.remedy}" for problem in message.problems]
    return message.error or "; ".join(causes) or f"exit code {message.exit_code}"
