"""What people ask for: the spec of a WeightVersion, decoded from a number, so that a small one is a plain spec."""

from dataclasses import dataclass

from rollfleet_operator.api.weightversion import (
    Checkpoint,
    Deadlines,
    FailureType,
    OnFailure,
    Pause,
    PauseMode,
    Recovery,
    Rolling,
    Source,
    SourceType,
    Strategy,
    StrategyType,
)

DEADLINES = Deadlines(prepare_seconds=30, quiesce_seconds=20, transfer_seconds=20, verify_seconds=10)
# A lost trainer must be noticed long before its transfer's deadline.
PUSH_DEADLINES = Deadlines(prepare_seconds=30, quiesce_seconds=20, transfer_seconds=60, verify_seconds=10)
PUSHED = Source(type=SourceType.TRAINER)
ATOMIC = Strategy()
RETRY = OnFailure()
ON_FAILURE = (
    RETRY,
    OnFailure(type=FailureType.RETRY, max_attempts=1),
    OnFailure(type=FailureType.ROLLBACK),
    OnFailure(type=FailureType.HOLD),
    OnFailure(type=FailureType.HOLD),
)
PAUSES = (
    Pause(),
    Pause(mode=PauseMode.WAIT, drain_timeout_seconds=4),
    Pause(mode=PauseMode.KEEP),
)
MIN_SERVING = (1, 1, 2, 3)


@dataclass(frozen=True)
class Ask:
    """Everything of a spec but the version and its step."""

    on_failure: OnFailure = RETRY
    pause: Pause = PAUSES[0]
    min_serving: int = 1
    strategy: Strategy = ATOMIC
    pushed: bool = False  # a trainer sends it
    copy: str = ""  # where it is stored as well, or will be

    def fields(self) -> dict[str, object]:
        """As a spec takes them."""
        found: dict[str, object] = {
            "deadlines": PUSH_DEADLINES if self.pushed else DEADLINES,
            "on_failure": self.on_failure,
            "pause": self.pause,
            "min_serving": self.min_serving,
            "strategy": self.strategy,
        }
        if self.pushed:
            found["source"] = PUSHED
        if self.copy:
            found["recovery"] = Recovery(checkpoint=Checkpoint(path=self.copy))
        return found


PLAIN = Ask()


def ask_of(luck: int, replicas: int, *, rolls: bool = False) -> Ask:
    """Each digit decides one field."""
    luck, on_failure = divmod(luck, len(ON_FAILURE))
    luck, pause = divmod(luck, len(PAUSES))
    luck, least = divmod(luck, len(MIN_SERVING))
    rolling = Strategy(type=StrategyType.ROLLING, rolling=Rolling(max_unavailable=1 + luck % 2))
    return Ask(
        ON_FAILURE[on_failure],
        PAUSES[pause],
        min(MIN_SERVING[least], max(1, replicas)),
        rolling if rolls else ATOMIC,
    )
