"""What outlives a pass in the fleet's status, apart from what is derived anew each time."""

from dataclasses import dataclass

from rollfleet_operator.api.members import Member
from rollfleet_operator.api.rolloutengine import Committed, LastFinished, RolloutEngine


@dataclass(frozen=True)
class Record:
    """The fleet's memory. A pass that changes it gives no commands: the write is the fence.

    Members are no part of that: they are written by the very pass that opens them, before it does.
    """

    epoch: int
    committed: Committed | None
    last_finished: LastFinished | None
    members: tuple[Member, ...] = ()  # who may be open

    @classmethod
    def of(cls, fleet: RolloutEngine) -> "Record":
        """As the status carries it."""
        return cls(fleet.status.epoch, fleet.status.committed, fleet.status.last_finished, fleet.status.members)
