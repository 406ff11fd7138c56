"""What must hold of a load over updates: pure functions of the samples, the guards' logs and the known outputs."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from examples.demo.load import Sample

KnownOutputs = Mapping[int, Mapping[str, Sequence[int]]]  # version -> prompt -> greedy tokens


@dataclass(frozen=True)
class GateChange:
    """A guard's log line about its gate. `time` is time.time() seconds of the guard's clock."""

    engine: str
    time: float
    opened: bool
    version: int | None
    last_admission: float | None = None  # on closing: when the newest request was let in


def wrong_answers(samples: Iterable[Sample], known: KnownOutputs) -> list[str]:
    """Answers that are not what the version they name gives: whole ones equal, aborted ones a strict prefix."""
    problems = []
    for sample in samples:
        if sample.status != 200:
            continue
        if sample.version is None or sample.version not in known:
            problems.append(f"answer without a known version: {sample.version!r} for {sample.prompt!r}")
            continue
        expected = tuple(known[sample.version][sample.prompt])
        got = sample.tokens
        if got != expected[: len(got)]:
            problems.append(
                f"version {sample.version}, prompt {sample.prompt!r}: {got[:8]}... is not {expected[:8]}..."
            )
        elif sample.finish_reason == "abort":
            if len(got) >= sample.asked:
                problems.append(f"aborted answer of version {sample.version} is not a strict prefix: {len(got)} tokens")
        elif len(got) != sample.asked:
            reason = f"finish_reason {sample.finish_reason!r}"
            problems.append(f"version {sample.version}: {len(got)} of {sample.asked} tokens, with {reason}")
    return problems


def stale_answers(samples: Iterable[Sample]) -> list[str]:
    """Requests begun after a newer version had answered, and answered by an older one."""
    answered = [sample for sample in samples if sample.status == 200 and sample.version is not None]
    ends = deque(sorted(answered, key=lambda sample: sample.ended))
    newest, problems = -1, []
    for sample in sorted(answered, key=lambda sample: sample.started):
        while ends and ends[0].ended < sample.started:
            newest = max(newest, ends.popleft().version or 0)
        if (sample.version or 0) < newest:
            problems.append(f"version {sample.version} answered {sample.prompt!r} after {newest} had answered")
    return problems


def bad_refusals(samples: Iterable[Sample]) -> Counter[str]:
    """What clients saw besides 200 and 503 with Retry-After."""
    return Counter(
        f"{sample.status} {sample.error[:120]}"
        for sample in samples
        if sample.status != 200 and not (sample.status == 503 and sample.retry_after)
    )


def overlapping_versions(changes: Iterable[GateChange]) -> list[str]:
    """Admissions of an older version after the first opening of a newer one, by the guards' own logs."""
    ordered = sorted(changes, key=lambda change: change.time)
    first_open: dict[int, float] = {}
    for change in ordered:
        if change.opened and change.version is not None:
            first_open.setdefault(change.version, change.time)
    problems = []
    last = {change.engine: change for change in ordered}
    for change in ordered:
        if change.version is None:
            continue
        newer = [time for version, time in first_open.items() if version > change.version]
        if not newer:
            continue
        if change.opened and change.time > min(newer):
            problems.append(f"{change.engine} opened at version {change.version} after a newer one was open")
        elif change.opened and change is last[change.engine]:
            problems.append(f"{change.engine} never closed at version {change.version}, and a newer one was opened")
        if not change.opened and change.last_admission is not None and change.last_admission > min(newer):
            problems.append(f"{change.engine} admitted version {change.version} after a newer one was open")
    return problems


def first_answer_s(samples: Iterable[Sample], version: int, moment: float) -> float:
    """Seconds from a moment to the first answer of `version`, as clients see it."""
    times = [s.ended for s in samples if s.status == 200 and s.version == version and s.finish_reason != "abort"]
    if not times:
        raise ValueError(f"no whole answer of version {version}")
    return min(times) - moment
