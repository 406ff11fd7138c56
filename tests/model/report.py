"""What became of a schedule, in numbers."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.model.world import World


@dataclass
class Report:
    """What a schedule was."""

    events: int = 0
    passes: int = 0
    commits: int = 0
    simulated_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)  # situations that were reached, and how often


def report(world: "World") -> Report:
    """Of a world that has lived."""
    counts = dict(world.chaos.counts)
    for more in (world.network.counts, world.api.counts, *(each.counts for each in world.trainers)):
        for what, number in more.items():
            counts[what] = counts.get(what, 0) + number
    seen = world.auditor.ledger.seen
    seen["operator: acted after its term had ended"] += sum(each.late_acts for each in world.operators)
    seen["operator: lost its term"] += sum(each.lost_terms for each in world.operators)
    seen["trainer: sent after it was no sender any more"] += sum(each.late_calls for each in world.trainers)
    seen["trainer: lost the Lease"] += sum(each.lost_leases for each in world.trainers)
    seen["address: of an engine that runs on, given to another"] += world.nodes.reused
    return Report(
        events=world.clock.events,
        passes=sum(operator.passes for operator in world.operators),
        commits=world.auditor.ledger.commits,
        simulated_s=world.clock.time,
        counts=counts,
        outcomes=world.outcomes,
        seen={what: count for what, count in seen.items() if count},
    )
