"""What outlives a pass in the fleet's status, apart from what is derived anew each time."""

from dataclasses import dataclass

from rollfleet_operator.api.members import Member
from rollfleet_operator.api.rolloutengine import Committed, LastFinished, RolloutEngine


@dataclass(frozen=True)
class Record:
    """The fleet's memory. A pass that changes it gives no commands: the write is the fence.

    Members, the proven template and a probe kept later are no part of that: their pass goes on, since the
    write comes first.
    """

    epoch: int
    committed: Committed | None
    last_finished: LastFinished | None
    members: tuple[Member, ...] = ()  # who may be open
    proven_template: str = ""

    @classmethod
    def of(cls, fleet: RolloutEngine) -> "Record":
        """As the status carries it."""
        status = fleet.status
        return cls(status.epoch, status.committed, status.last_finished, status.members, status.proven_template)
