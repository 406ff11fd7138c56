"""Deliberate faults in the core, the guard and the runtime, each with the promise that finds it.

They show that the model bites: `test_mutations.py` lives schedules with one of them until a promise breaks, and it
must be one of those named here. Where the core and the guard both stand for something, both are spoilt.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.model import spoils, spoils_of_updates
from tests.model.api_server import ApiFaults
from tests.model.network import NetFaults
from tests.model.schedule import KINDS, Happening, Schedule, schedule_of
from tests.model.spoils import Patch

Bias = Callable[[Schedule], Schedule]


@dataclass(frozen=True)
class Mutation:
    """A fault. `promises`: any of these may be the first to break.

    `focus`: what happens more often than all else in the schedules that look for it, where it takes a rare occasion.
    `bias`: what else is made of them, where that does not do.
    """

    name: str
    spoil: Callable[[Patch], None]
    promises: tuple[str, ...]
    focus: tuple[str, ...] = ()
    bias: Bias = lambda schedule: schedule

    def schedule(self, seed: int) -> Schedule:
        """The schedule of a seed, as this fault needs it."""
        return self.bias(schedule_of(seed, KINDS | dict.fromkeys(self.focus, 40)))


def lossy_writes(schedule: Schedule) -> Schedule:
    """The API server is overloaded."""
    return replace(schedule, api=ApiFaults(conflict=0.2, lose_request=0.2))


def slow_network(schedule: Schedule) -> Schedule:
    """Half of all commands come late."""
    return replace(schedule, net=NetFaults(delay=0.4))


def in_mode_keep(schedule: Schedule) -> Schedule:
    """All updates pause in mode keep, and fail to Retry."""
    return replace(schedule, happenings=tuple(replace(each, luck=10) for each in schedule.happenings))


def two_operators(schedule: Schedule) -> Schedule:
    """With a Lease."""
    return replace(schedule, operators=2, lease=True)


def script(*lines: tuple[float, str, float]) -> Bias:
    """These things at these times, to whom the seed says; in good weather, by one operator."""

    def bias(schedule: Schedule) -> Schedule:
        whom = [each.who for each in schedule.happenings]
        happenings = tuple(
            Happening(at, kind, whom[place % len(whom)], seconds, luck=0)
            for place, (at, kind, seconds) in enumerate(lines)
        )
        calm = {"net": NetFaults(), "api": ApiFaults(), "operators": 1, "lease": False, "replicas": 3}
        return replace(schedule, happenings=happenings, **calm)  # type: ignore[arg-type]

    return bias


def _bumps(first: float, count: int, every: float) -> tuple[tuple[float, str, float], ...]:
    return tuple((first + number * every, "bump", 0.0) for number in range(count))


# The control plane forgets the pods of a node that is away for three minutes, while an operator cannot reach one of
# them. Its kubelet comes back, and does not know for up to 105 s that they are gone.
FORGOTTEN = script((0, "bump", 0), (84.5, "cut_from_all", 900), (85, "collect_garbage", 90), *_bumps(301, 8, 11))
UNNOTICED = script((0, "bump", 0), (85, "collect_unnoticed", 180), *_bumps(298, 8, 11))
SILENT_OPENING = script(
    (0, "bump", 0), (20, "bump", 0), (20.4, "cut_from_all", 600), (21.5, "cut_from_all", 600), (300, "bump", 0)
)

STALE, ATOMIC, FENCE, COMMIT, EPOCH, ENDS = "never stale", "atomic", "fence", "commit", "epoch", "always ends"
TOLD, COUNT, HOLD, RETRY, ODD, RESTARTS = "told", "minServing", "hold", "retry", "excluded", "restarts"
ups = spoils_of_updates

MUTATIONS = (
    Mutation("no arming", spoils.no_arming, (FENCE, STALE)),
    Mutation("label instead of fence", spoils.label_instead_of_fence, (FENCE, STALE)),
    Mutation("who does not answer counts as closed", spoils.silence_is_a_fence, (FENCE, STALE)),
    Mutation("who is not Ready counts as closed", spoils.readiness_is_a_fence, (FENCE, STALE), ("bump", "lose_node")),
    Mutation(
        "a pod that is being deleted counts as closed",
        spoils.deletion_is_a_fence,
        (FENCE, STALE),
        ("bump", "delete_on_silent_node"),
    ),
    Mutation(
        "vanished pods are forgotten", spoils.vanished_pods_are_forgotten, (FENCE, STALE), ("bump", "collect_garbage")
    ),
    Mutation("transfer before all are closed", spoils.transfer_before_all_are_closed, (FENCE, STALE)),
    Mutation("commit before probe", spoils.commit_before_probe, (COMMIT,)),
    Mutation("probes are not compared", spoils.probes_are_not_compared, ("agree",)),
    Mutation("open before the commit", spoils.open_before_the_commit, (STALE,)),
    Mutation("open without verified", spoils.open_without_verified, (STALE, COMMIT)),
    Mutation("late joiner opened without catch-up", spoils.joiners_are_opened_as_they_are, (STALE, ATOMIC, ENDS)),
    Mutation("late joiners go on while weights change", spoils.joiners_go_on_in_an_update, (STALE, FENCE, ENDS)),
    Mutation("epoch not compared", spoils.epochs_are_not_compared, (EPOCH, STALE, FENCE)),
    Mutation("digest not compared", spoils.the_digest_is_not_compared, (STALE,)),
    Mutation(
        "a transfer that broke touched nothing",
        spoils.failed_transfers_touch_nothing,
        (STALE,),
        ("bump", "wrong_digest", "fail_step"),
    ),
    Mutation("status write without resourceVersion", spoils.writes_without_resource_version, (EPOCH, COMMIT, STALE)),
    Mutation("deadlines ignored", spoils.deadlines_are_ignored, (ENDS,)),
    Mutation(
        "the committed version may fall", spoils.the_committed_version_may_fall, (COMMIT,), ("create_version_again",)
    ),
    Mutation(
        "a lost record counts as a new fleet",
        spoils.a_lost_record_is_a_new_fleet,
        (STALE, ATOMIC, COMMIT, ENDS),  # guards that follow a later epoch refuse the first one
        ("bump", "lose_status"),
    ),
    Mutation(
        "silence reopens nothing",
        spoils.silence_reopens_nothing,
        ("owner",),
        ("bump", "kill_all_operators", "cut_from_all"),
    ),
    Mutation("minServing not counted", ups.min_serving_is_not_counted, (COUNT,), ("bump", "wrong_digest", "crash")),
    Mutation("a roll closes all", ups.a_roll_closes_all, (COUNT,), ("roll",)),
    Mutation("Hold restores", ups.hold_restores, (HOLD,), ("bump", "wrong_digest", "fail_step")),
    Mutation(
        "the next attempt keeps its epoch", ups.the_next_attempt_keeps_its_epoch, (EPOCH,), ("bump", "wrong_digest")
    ),
    Mutation(
        "a retryRequest is followed again and again",
        ups.a_retry_request_is_followed_again_and_again,
        (RETRY, ENDS),
        ("bump_to_broken", "retry"),
    ),
)
