"""A schedule: everything that a search varies, as plain data made from a seed."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from rollfleet_protocol.state import OperationName
from tests.model.api_server import ApiFaults
from tests.model.network import NetFaults
from tests.model.operators import Pace

HORIZON_S = 120.0
MAX_HAPPENINGS = 14
STEPS = (OperationName.PREPARE, OperationName.CLOSE, OperationName.TRANSFER, OperationName.VERIFY, OperationName.REOPEN)

# What happens, and how often compared with the rest. The words are methods of `Chaos`.
KINDS = {
    "bump": 10,
    "roll": 4,
    "bump_to_broken": 3,
    "bump_into_loss": 1,
    "kill_operator": 5,
    "kill_all_operators": 2,
    "replace_operator": 1,
    "deafen_operator": 3,
    "crash": 5,
    "core_dies": 2,
    "delete_pod": 3,
    "evict": 2,
    "force_delete": 4,
    "power_off": 2,
    "collect_garbage": 2,
    "collect_unnoticed": 1,
    "garbage_fails": 1,
    "volume_away": 2,
    "delete_fleet": 2,
    "freeze_operator": 3,
    "fail_step": 4,
    "wrong_digest": 3,
    "damage_silently": 2,
    "hang": 3,
    "cut": 5,
    "cut_answers": 4,
    "cut_from_all": 4,
    "cut_at_commit": 2,
    "kill_at_commit": 1,
    "vanish_at_commit": 1,
    "lose_node": 2,
    "cut_node": 3,
    "delete_on_silent_node": 2,
    "api_down": 3,
    "lose_status": 1,
    "retry": 2,
    "delete_version": 1,
    "create_version_again": 2,
    "scale": 2,
    "change_template": 1,
    "break_checkpoint": 2,
    "change_checkpoint": 2,
    "long_request": 4,
    "push": 8,
    "name_copy": 2,
    "kill_trainer": 2,
    "kill_trainer_in_phase": 2,
    "freeze_trainer": 2,
    "stall_trainer": 2,
    "second_trainer": 2,
    "rude_trainer": 1,
    "lie": 2,
    "flip": 2,
    "misfit": 2,
    "old_step": 1,
    "offer_another": 1,
    "give_up": 1,
    "release_lease": 1,
    "cut_trainer": 2,
    "cut_trainer_from_api": 1,
    "trainers_off": 1,
    "account_anew": 1,
}
# What belongs together, and falls together more often than by chance; every other schedule has one of these.
THEMES: tuple[tuple[str, ...], ...] = (
    ("bump", "wrong_digest", "fail_step", "retry", "hang"),
    ("bump", "roll", "damage_silently", "crash", "core_dies"),
    ("bump", "bump_into_loss", "change_checkpoint", "break_checkpoint", "bump_to_broken"),
    ("bump", "long_request", "fail_step", "kill_operator"),
    ("freeze_operator", "api_down", "bump", "kill_operator", "replace_operator"),
    ("collect_garbage", "garbage_fails", "collect_unnoticed", "volume_away", "bump"),
    ("delete_fleet", "create_version_again", "delete_version", "lose_status", "bump"),
    ("push", "kill_trainer", "kill_trainer_in_phase", "second_trainer", "rude_trainer", "freeze_trainer"),
    ("push", "stall_trainer", "lie", "flip", "misfit", "old_step", "fail_step", "crash"),
    ("push", "name_copy", "give_up", "offer_another", "release_lease", "kill_operator", "delete_pod"),
    ("push", "cut_trainer", "cut_trainer_from_api", "api_down", "trainers_off", "account_anew", "retry"),
)
OFTEN = 15  # weight of what belongs to the theme
SECONDS = (0.5, 2.0, 8.0, 20.0, 45.0, 90.0, 180.0)
LUCK = 1000
GAPS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0, 3.0, 10.0, 25.0)


@dataclass(frozen=True)
class Happening:
    """Something at a time. `who`, `seconds` and `luck` mean what they can for its kind."""

    at: float
    kind: str
    who: int
    seconds: float
    luck: int = 0


@dataclass(frozen=True)
class Schedule:
    """One life of a fleet."""

    seed: int
    replicas: int
    operators: int
    lease: bool  # one of them acts, told by a Lease; else all do
    drift: float  # of the second operator's clock, against the first one's
    load_s: float
    step_s: tuple[float, ...]  # how long each of STEPS takes
    net: NetFaults
    api: ApiFaults
    pace: Pace
    happenings: tuple[Happening, ...]
    trainers: int = 1  # processes that there are from the beginning; there may be a second one later
    trainer_drift: float = 1.0  # of the second trainer's clock


def schedule_of(seed: int, kinds: Mapping[str, int] = KINDS) -> Schedule:
    """The schedule of a seed: always the same. `kinds`: what happens in it, by weight."""
    rng = random.Random(seed)
    first = "bump"
    if kinds is KINDS and seed % 2:
        theme = THEMES[seed // 2 % len(THEMES)]
        first, kinds = theme[0] if theme[0] == "push" else first, KINDS | dict.fromkeys(theme, OFTEN)
    harsh = rng.choice((0.0, 0.3, 1.0))  # how bad the weather is between the blows

    def chance(most: float) -> float:
        return harsh * rng.choice((0.0, most / 4, most))

    return Schedule(
        seed=seed,
        replicas=rng.choice((1, 2, 2, 3, 3, 4)),
        operators=rng.choice((1, 2, 2)),
        lease=rng.random() < 0.5,
        drift=rng.choice((1.0, 0.9, 1.1)),
        load_s=rng.choice((0.2, 1.0, 8.0)),
        step_s=tuple(rng.choice((0.01, 0.1, 1.0, 6.0)) for _ in STEPS),
        net=NetFaults(lose_request=chance(0.1), lose_answer=chance(0.2), delay=chance(0.2)),
        api=ApiFaults(conflict=chance(0.1), lose_request=chance(0.1), lose_answer=chance(0.1)),
        pace=Pace(stall=chance(0.02), watch_lag_s=rng.choice((0.05, 0.05, 2.0))),
        happenings=_happenings(rng, kinds, first),
        trainers=rng.choice((1, 1, 2)),
        trainer_drift=rng.choice((1.0, 0.9, 1.1)),
    )


def _happenings(rng: random.Random, given: Mapping[str, int], first: str) -> tuple[Happening, ...]:
    """Close together, so that one falls into what the other began."""
    found: list[Happening] = []
    at = 0.0
    kinds, weights = tuple(given), tuple(given.values())
    for number in range(rng.randint(2, MAX_HAPPENINGS)):
        kind = first if number == 0 else rng.choices(kinds, weights)[0]
        found.append(Happening(at, kind, rng.randrange(12), rng.choice(SECONDS), rng.randrange(LUCK)))
        at += rng.choice(GAPS) * rng.uniform(0.5, 1.5)
        if at > HORIZON_S:
            break
    return tuple(found)
