"""What a client saw of an update, from the answers that it got: pure.

Times are in seconds of one clock. By which weights an answer was made its log-probability says: each policy has its own
for the same prompt, on whichever engine.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SAME = 1e-4  # of log-probabilities in float32 by the same weights; two policies of the bench are 1e-2 apart or more


@dataclass(frozen=True)
class Answer:
    """A whole answer of one engine. What was refused, or cut short, is none."""

    engine: str
    asked: float
    answered: float
    logprob: float

    def by(self, weights: float) -> bool:
        """Whether it was made by the weights that answer this log-probability."""
        return math.isclose(self.logprob, weights, rel_tol=0, abs_tol=SAME)


@dataclass(frozen=True)
class Seen:
    """An update from outside."""

    worst: float  # seconds out of service of the engine that was it for longest
    lost: float  # engine seconds: of all engines together
    nobody: float  # seconds in which no engine of all answered
    both: float  # from the first answer by the new weights until the last question that the old ones answered
    strange: int  # answers by neither


def usual_gap(times: Sequence[float]) -> float:
    """Between one answer and the next. ValueError where there are fewer than two."""
    if len(times) < 2:
        raise ValueError(f"{len(times)} answers have no gap between them")
    return statistics.median(later - sooner for sooner, later in itertools.pairwise(times))


def out_of_service(times: Sequence[float], begin: float, end: float) -> float:
    """The longest gap between answers that touches the update, less the usual one before it; of one service.

    `times` are ordered, and begin before the update and end after it: else nobody can tell, and ValueError.
    """
    if not times or times[0] > begin or times[-1] < end:
        raise ValueError(f"answers must come from before {begin} until after {end}")
    touching = [later - sooner for sooner, later in itertools.pairwise(times) if later > begin and sooner < end]
    return max(0.0, max(touching) - usual_gap([each for each in times if each <= begin]))


def both_at_once(answers: Sequence[Answer], old: float, new: float) -> float:
    """Seconds for which the old weights were still answered by after somebody had an answer by the new ones."""
    first = min((each.answered for each in answers if each.by(new)), default=math.inf)
    last = max((each.asked for each in answers if each.by(old)), default=-math.inf)
    return max(0.0, last - first)


def seen(answers: Sequence[Answer], begin: float, end: float, old: float, new: float) -> Seen:
    """All of it, of an update that was called at `begin` and returned at `end`."""
    engines = sorted({each.engine for each in answers})
    outages = [out_of_service(_times([a for a in answers if a.engine == one]), begin, end) for one in engines]
    return Seen(
        worst=max(outages),
        lost=sum(outages),
        nobody=out_of_service(_times(answers), begin, end),
        both=both_at_once(answers, old, new),
        strange=sum(not each.by(old) and not each.by(new) for each in answers),
    )


def _times(answers: Sequence[Answer]) -> list[float]:
    return sorted(each.answered for each in answers)
