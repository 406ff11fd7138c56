"""Deliberate faults in the core, the guard and the runtime, each with the promise that finds it.

They show that the model bites: `test_mutations.py` lives schedules with one of them until a promise breaks, and it
must be one of those named here. Where the core and the guard both stand for something, both are spoilt.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.model import spoils, spoils_of_pods, spoils_of_pushes, spoils_of_updates
from tests.model.api_server import ApiFaults
from tests.model.network import NetFaults
from tests.model.operators import Pace
from tests.model.schedule import KINDS, STEPS, Happening, Schedule, schedule_of
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


def cut_for_long(schedule: Schedule) -> Schedule:
    """Who is cut off at a commit stays so past every deadline."""
    happenings = tuple(
        replace(each, seconds=600.0) if each.kind == "cut_at_commit" else each for each in schedule.happenings
    )
    return replace(schedule, happenings=(*happenings, Happening(400.0, "long_request", 0, 0.0)))


def both_must_serve(schedule: Schedule) -> Schedule:
    """Two engines, and spec.minServing 2."""
    happenings = tuple(replace(each, luck=30) for each in schedule.happenings)
    return replace(schedule, replicas=2, happenings=happenings)


def in_good_weather(schedule: Schedule) -> Schedule:
    """Nothing is slow or lost: what lasts too long has no excuse. All updates go the whole way, and fail to Retry."""
    happenings = tuple(replace(each, luck=each.luck // 15 * 15) for each in schedule.happenings)
    return replace(schedule, net=NetFaults(), api=ApiFaults(), pace=Pace(), happenings=happenings)


def stored_at_once(schedule: Schedule) -> Schedule:
    """A push in peace, its copy, and at once the next version."""
    happenings = (Happening(0.0, "push", 0, 0.0), Happening(60.0, "name_copy", 1, 0.0), *schedule.happenings)
    return in_good_weather(replace(schedule, happenings=happenings))


def dead_in_a_push(schedule: Schedule) -> Schedule:
    """The trainer dies between two calls, and nobody comes for a long time."""
    happenings = (
        Happening(0.0, "push", 0, 0.0),
        Happening(20.0, "stall_trainer", 0, 1000.0, 2),
        Happening(20.1, "push", 0, 0.0),
        Happening(30.0, "kill_trainer", 0, 0.0, 3),
        Happening(130.0, "long_request", 0, 0.0),
    )
    return replace(in_good_weather(schedule), happenings=happenings, operators=1, trainers=1)


def dead_half_way(schedule: Schedule) -> Schedule:
    """A version that is stored nowhere, and a trainer that dies when some engines have tensors of the next one.

    There is one attempt, and the others take their time to open again.
    """
    happenings = (Happening(0.0, "push", 0, 0.0), Happening(40.0, "kill_trainer_in_phase", 0, 0.0, 6))
    calm = in_good_weather(replace(schedule, happenings=happenings))
    steps = (0.1, 0.1, 0.1, 0.1, 6.0)
    return replace(calm, happenings=happenings, replicas=3, operators=1, trainers=1, step_s=steps)


def two_processes(schedule: Schedule) -> Schedule:
    """Of one account, of which one sends without the Lease."""
    happenings = (
        Happening(0.0, "rude_trainer", 0, 90.0, 4),
        *(Happening(1.0 + 20 * number, "push", 0, 0.0) for number in range(4)),
    )
    return replace(schedule, happenings=happenings, trainers=1)


def two_operators(schedule: Schedule) -> Schedule:
    """With a Lease."""
    return replace(schedule, operators=2, lease=True)


def script(*lines: tuple[float, str, float], quick: bool = False) -> Bias:
    """These things at these times, to whom the seed says; in good weather, by one operator."""

    def bias(schedule: Schedule) -> Schedule:
        whom = [each.who for each in schedule.happenings]
        happenings = tuple(
            Happening(at, kind, whom[place % len(whom)], seconds, luck=0)
            for place, (at, kind, seconds) in enumerate(lines)
        )
        calm = {"net": NetFaults(), "api": ApiFaults(), "operators": 1, "lease": False, "replicas": 3}
        step_s = tuple(0.01 for _ in STEPS) if quick else schedule.step_s
        return replace(schedule, happenings=happenings, step_s=step_s, **calm)  # type: ignore[arg-type]

    return bias


def _bumps(first: float, count: int, every: float) -> tuple[tuple[float, str, float], ...]:
    return tuple((first + number * every, "bump", 0.0) for number in range(count))


# The control plane forgets the pods of a node that is away for three minutes, while an operator cannot reach one of
# them. Its kubelet comes back, and does not know for up to 105 s that they are gone.
FORGOTTEN = script((0, "bump", 0), (84.5, "cut_from_all", 900), (85, "collect_garbage", 90), *_bumps(301, 8, 11))
UNNOTICED = script((0, "bump", 0), (85, "collect_unnoticed", 180), *_bumps(298, 8, 11))
DRAINING = script(
    *((8 + place / 10, "long_request", 180.0) for place in range(6)),
    (10, "delete_pod", 0),
    (10.3, "bump", 0),
    quick=True,
)

STALE, ATOMIC, FENCE, COMMIT, EPOCH, ENDS = "never stale", "atomic", "fence", "commit", "epoch", "always ends"
TOLD, COUNT, HOLD, RETRY, ODD, RESTARTS = "told", "minServing", "hold", "retry", "excluded", "restarts"
SENDER, LOST = "sender", "lost"
ups, pods, pushes = spoils_of_updates, spoils_of_pods, spoils_of_pushes

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
    Mutation("open without verified", spoils.open_without_verified, (STALE, COMMIT, ENDS)),
    Mutation("late joiner opened without catch-up", spoils.joiners_are_opened_as_they_are, (STALE, ATOMIC, ENDS)),
    Mutation("late joiners go on while weights change", spoils.joiners_go_on_in_an_update, (STALE, FENCE, ENDS)),
    Mutation("epoch not compared", spoils.epochs_are_not_compared, (EPOCH, STALE, FENCE)),
    Mutation("digest not compared", spoils.the_digest_is_not_compared, (STALE, ENDS), ("bump", "wrong_digest")),
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
    Mutation(
        "minServing not counted",
        ups.min_serving_is_not_counted,
        (COUNT,),
        ("bump", "wrong_digest", "crash"),
        both_must_serve,
    ),
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
    Mutation("objects are known by name", ups.objects_are_known_by_name, (TOLD,), ("create_version_again",)),
    Mutation("another fleet's history counts", ups.another_fleets_history_counts, (ENDS,), ("bump", "delete_fleet")),
    Mutation("odd engines are let in", ups.odd_engines_are_let_in, (ODD, "agree"), ("bump", "damage_silently")),
    Mutation("opening waits for ever", ups.opening_waits_for_ever, (ENDS,), ("bump", "cut_at_commit"), cut_for_long),
    Mutation(
        "acts although its write was lost",
        ups.acts_although_its_write_was_lost,
        (EPOCH, FENCE, STALE),
        (),
        lossy_writes,
    ),
    Mutation("an armed guard reopens on silence", ups.an_armed_guard_reopens_on_silence, (FENCE, STALE)),
    Mutation(
        "a failed verification is forgiven",
        ups.a_failed_verification_is_forgiven,
        (COUNT, STALE),
        ("bump", "fail_step"),
    ),
    Mutation(
        "kept requests compute nothing anew",
        ups.kept_requests_compute_nothing_anew,
        (STALE,),
        ("bump", "long_request"),
        in_mode_keep,
    ),
    Mutation("spans are not told", ups.spans_are_not_told, (TOLD,), ("bump", "long_request"), in_mode_keep),
    Mutation(
        "who demands a version is kept",
        ups.who_demands_a_version_is_kept,
        (TOLD,),
        ("bump", "long_request"),
        in_mode_keep,
    ),
    Mutation(
        "what is kept is heard at once",
        ups.what_is_kept_is_heard_at_once,
        (STALE, TOLD),
        ("bump", "long_request"),
        in_mode_keep,
    ),
    Mutation(
        "vanished pods go under the epoch that they know",
        pods.vanished_pods_go_under_the_epoch_that_they_know,
        (FENCE, STALE),
        ("bump", "vanish_at_commit"),
        slow_network,
    ),
    Mutation(
        "who drains counts as drained",
        pods.who_drains_counts_as_drained,
        (FENCE, STALE),
        (),
        DRAINING,
    ),
    Mutation("a node need not be Ready", pods.a_node_needs_not_be_ready, (FENCE, STALE), (), FORGOTTEN),
    Mutation("a kubelet need not report", pods.a_kubelet_needs_not_report, (FENCE, STALE), (), UNNOTICED),
    Mutation(
        "a node that is not Ready is off",
        pods.a_node_that_is_not_ready_is_off,
        (FENCE, STALE),
        ("bump", "cut_node", "delete_on_silent_node"),
    ),
    Mutation(
        "phase Failed is the end",
        pods.phase_failed_is_the_end,
        (FENCE, STALE, COMMIT, LOST),
        ("bump", "garbage_fails"),
    ),
    Mutation(
        "whoever has the address speaks",
        pods.whoever_has_the_address_speaks,
        (FENCE, STALE, ATOMIC, ENDS),
        ("bump", "collect_garbage"),
    ),
    Mutation("no list is awaited", pods.no_list_is_awaited, (STALE, FENCE, ENDS), ("bump", "kill_operator")),
    Mutation("no template is proven", pods.no_template_is_proven, (RESTARTS,), ("volume_away",)),
    Mutation(
        "a lost Lease ends nothing",
        pods.a_lost_lease_ends_nothing,
        ("one leader",),
        ("freeze_operator", "api_down"),
        two_operators,
    ),
    Mutation(
        "what a trainer offers is not read", pushes.what_is_offered_is_not_read, (SENDER,), ("push", "offer_another")
    ),
    Mutation("a trainer's Lease lasts for ever", pushes.a_lease_lasts_for_ever, (ENDS,), (), dead_in_a_push),
    Mutation(
        "a lost sender is waited for",
        pushes.a_lost_sender_is_waited_for,
        (ENDS,),
        ("push", "kill_trainer_in_phase", "stall_trainer"),
        in_good_weather,
    ),
    Mutation(
        "everybody is a trainer", pushes.everybody_is_a_trainer, (SENDER,), ("push", "trainers_off", "second_trainer")
    ),
    Mutation(
        "any process of the account may call",
        pushes.any_process_of_the_account_may_call,
        (SENDER,),
        (),
        two_processes,
    ),
    Mutation(
        "digests of a push are not compared",
        pushes.digests_are_not_compared,
        (SENDER, STALE, "agree"),
        ("push", "flip", "lie"),
    ),
    Mutation(
        "nothing counts as touched",
        pushes.nothing_counts_as_touched,
        ("told",),
        ("push", "kill_trainer_in_phase", "give_up"),
    ),
    Mutation("who waits makes all lost", pushes.who_waits_makes_all_lost, (LOST,), (), dead_half_way),
    Mutation(
        "the next attempt keeps its sender",
        pushes.the_next_attempt_keeps_its_sender,
        (SENDER,),
        ("push", "fail_step", "lie"),
    ),
    Mutation(
        "copies are read from the newest spec only",
        pushes.copies_are_read_from_the_newest_spec_only,
        ("stored",),
        bias=stored_at_once,
    ),
)
