"""`rollfleet bump` and `rollback`: which version is asked for, and what other writers and lost answers can do to it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rollfleet_cli import bumping
from rollfleet_cli.bumping import ATTEMPTS, Asked, Scene, Wish, ask_again, ask_for, choose_earlier, plan_version
from rollfleet_cli.errors import ConflictError, NotFoundError, NotPossibleError, UnreachableError
from rollfleet_operator.api.rolloutengine import Committed, Outcome, RolloutEngine
from rollfleet_operator.api.weightversion import HistoryEntry, Phase, WeightVersion
from tests.support.cli import CLAIM, NOW, make_fleet, make_version
from tests.support.memory_api import merged


def fleet_at(version: int | None, *, checkpoints: bool = True, **metadata: Any) -> RolloutEngine:
    """A fleet that has committed this version, from step-<version>."""
    committed = None if version is None else Committed(version=version, checkpoint=f"step-{version}", time=NOW)
    fleet = make_fleet(**({} if committed is None else {"committed": committed}))
    document = fleet.dump()
    document["metadata"] |= metadata
    if checkpoints:
        document["spec"]["volumes"]["checkpoints"] = CLAIM
    return RolloutEngine.model_validate(document)


def entry(version: int, outcome: Outcome = Outcome.ACTIVE, checkpoint: str | None = None) -> HistoryEntry:
    path = f"step-{version}" if checkpoint is None else checkpoint
    return HistoryEntry(version=version, step=str(version), checkpoint=path, outcome=outcome, time=NOW)


class Store:
    """A Writer in memory, with resourceVersions. `before` is what others do before each of our writes."""

    namespace = "rl"

    def __init__(self, fleet: RolloutEngine, version: WeightVersion | None = None) -> None:
        self.the_fleet = fleet
        self.found = version
        self.before: list[Callable[[Store], None]] = []
        self.answer_lost = False
        self.writes = 0

    def fleets(self, namespace: str | None) -> list[RolloutEngine]:
        return [self.the_fleet]

    def fleet(self, namespace: str, name: str) -> RolloutEngine:
        return self.the_fleet

    def versions(self, namespace: str | None) -> list[WeightVersion]:
        return [] if self.found is None else [self.found]

    def pods(self, namespace: str | None, fleet: str | None) -> list[dict[str, Any]] | None:
        return []

    def create_version(self, namespace: str, manifest: dict[str, Any]) -> WeightVersion:
        self._others()
        if self.found is not None:
            raise ConflictError("already exists")
        metadata = manifest["metadata"] | {"uid": "u", "resourceVersion": "1", "generation": 1}
        return self._keep(manifest | {"metadata": metadata})

    def patch_version(self, namespace: str, name: str, patch: dict[str, Any]) -> WeightVersion:
        self._others()
        assert self.found is not None
        document = self.found.dump()
        if document["metadata"]["resourceVersion"] != patch["metadata"]["resourceVersion"]:
            raise ConflictError("the object has been modified")
        revision = str(int(document["metadata"]["resourceVersion"]) + 1)
        metadata = document["metadata"] | {"resourceVersion": revision}
        return self._keep(document | {"metadata": metadata, "spec": merged(document["spec"], patch["spec"])})

    def _others(self) -> None:
        self.writes += 1
        if self.before:
            self.before.pop(0)(self)

    def _keep(self, document: dict[str, Any]) -> WeightVersion:
        self.found = WeightVersion.model_validate(document)
        if self.answer_lost:
            raise UnreachableError("timed out")
        return self.found


def stored(version: int, **status: Any) -> WeightVersion:
    document = make_version(version, **status).dump()
    document["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    return WeightVersion.model_validate(document)


def bump(store: Store, **wish: Any) -> Asked:
    return ask_for(store, "rl", "qwen", Wish(**{"checkpoint": "step-9", **wish}))


def test_what_was_of_a_pushed_version_goes_with_it() -> None:
    """The API server refuses a checkpoint with a trainer or a recovery; expected logprobs are of one version."""
    document = stored(5).dump()
    document["spec"] |= {
        "source": {"type": "Trainer", "trainer": {"serviceAccountName": "grpo"}},
        "recovery": {"checkpoint": {"path": "step-5"}},
        "verify": {"probe": {"tokens": [1, 2], "expectedLogprobs": ["-1.5"], "maxAbsLogprobDiff": "0.01"}},
    }
    store = Store(fleet_at(5), WeightVersion.model_validate(document))
    assert bump(store).version == 6
    assert store.found is not None
    spec = store.found.spec
    assert spec.source.dump() == {"type": "Checkpoint", "checkpoint": {"path": "step-9"}}
    assert spec.recovery is None
    probe = spec.verify.probe
    assert (probe.tokens, probe.expected_logprobs, probe.max_abs_logprob_diff) == ((1, 2), (), "0.01")


@pytest.mark.parametrize("phase", [Phase.ACTIVE, Phase.TRANSFERRING])
def test_the_copy_of_the_version_before_is_told_on_unless_nobody_holds_that(phase: Phase) -> None:
    """A trainer may have named it a moment ago. What stored said before was seen by whoever wrote the status."""
    document = stored(5, phase=phase).dump()
    document["spec"] |= {
        "source": {"type": "Trainer"},
        "recovery": {"checkpoint": {"path": "copy-5"}},
        "stored": {"version": 4, "checkpoint": {"path": "copy-4"}},
    }
    store = Store(fleet_at(5), WeightVersion.model_validate(document))
    bump(store)
    assert store.found is not None
    assert store.found.spec.stored is not None
    version = 5 if phase is Phase.ACTIVE else 4
    assert store.found.spec.stored.dump() == {"version": version, "checkpoint": {"path": f"copy-{version}"}}


@pytest.mark.parametrize(
    ("asked", "committed", "following"),
    [(5, 5, 6), (5, 3, 6), (2, 5, 6), (None, 4, 5), (None, None, 1), (None, 0, 1)],
    ids=["active", "failed or under way", "recreated lower", "deleted", "new", "new, version 0 committed"],
)
def test_the_next_version_is_above_what_is_asked_for_and_what_is_committed(
    asked: int | None, committed: int | None, following: int
) -> None:
    store = Store(fleet_at(committed), None if asked is None else stored(asked, phase=Phase.ACTIVE))
    told = bump(store, step="900")
    assert (told.version, told.checkpoint, told.step, told.created) == (following, "step-9", "900", asked is None)
    assert store.found is not None
    assert store.found.spec.version == following
    assert store.found.spec.source.checkpoint is not None
    assert store.found.spec.source.checkpoint.path == "step-9"


def test_a_step_that_is_not_given_does_not_outlive_its_version() -> None:
    store = Store(fleet_at(5), stored(5, phase=Phase.ACTIVE))
    bump(store, step="a")
    assert bump(store).step == ""


def test_who_writes_first_is_not_overwritten() -> None:
    def raised(store: Store) -> None:
        document = stored(8).dump()
        document["metadata"]["resourceVersion"] = "8"
        store.found = WeightVersion.model_validate(document)

    store = Store(fleet_at(5), stored(5, phase=Phase.ACTIVE))
    store.before = [raised]
    assert bump(store).version == 9
    assert store.writes == 2


def test_a_name_that_was_taken_meanwhile_is_looked_at_again() -> None:
    def made(store: Store) -> None:
        store.found = stored(3)

    store = Store(fleet_at(None))
    store.before = [made]
    told = bump(store)
    assert (told.version, told.created, told.supersedes) == (4, False, 3)


def test_a_busy_writer_is_given_up_on_with_longer_pauses_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(bumping, "time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(bumping, "random", SimpleNamespace(uniform=lambda _least, most: most))

    def busy(store: Store) -> None:
        assert store.found is not None
        document = store.found.dump()
        document["metadata"]["resourceVersion"] = str(int(document["metadata"]["resourceVersion"]) + 1)
        store.found = WeightVersion.model_validate(document)

    store = Store(fleet_at(5), stored(5))
    store.before = [busy] * 100
    with pytest.raises(ConflictError, match="8 writes in a row were too late; the last answer: the object has been"):
        bump(store)
    assert store.writes == ATTEMPTS
    assert pauses == [bumping.PAUSE_S * done for done in range(ATTEMPTS)]


@pytest.mark.parametrize("found", [None, stored(5)], ids=["created", "patched"])
def test_a_lost_answer_is_looked_up_and_nothing_is_asked_for_twice(found: WeightVersion | None) -> None:
    store = Store(fleet_at(5), found)
    store.answer_lost = True
    assert bump(store).version == 6
    assert store.writes == 1


def test_a_lost_answer_loses_nothing_of_what_is_told() -> None:
    store = Store(fleet_at(4), stored(5, phase=Phase.VERIFYING))
    store.answer_lost = True
    told = bump(store)
    assert (told.version, told.supersedes) == (6, 5)


def test_a_write_that_did_not_arrive_is_told() -> None:
    def away(store: Store) -> None:
        raise UnreachableError("connection refused")

    store = Store(fleet_at(5), stored(5))
    store.before = [away]
    with pytest.raises(UnreachableError, match="connection refused"):
        bump(store)


@pytest.mark.parametrize(
    ("phase", "under_way"), [(Phase.ACTIVE, None), (Phase.FAILED, None), (Phase.VERIFYING, 5), (Phase.PENDING, 5)]
)
def test_what_is_under_way_is_told(phase: Phase, under_way: int | None) -> None:
    told = bump(Store(fleet_at(4), stored(5, phase=phase)))
    assert told.supersedes == under_way
    assert ("takes over from version 5" in told.words()) is (under_way is not None)


REFUSED = [
    ("lower than asked for", fleet_at(2), stored(5), 5, "version 5 must exceed 5, which is asked for already"),
    ("lower than committed", fleet_at(5), None, 3, "version 3 must exceed 5, which is committed already"),
    ("no checkpoint volume", fleet_at(5, checkpoints=False), None, None, "InvalidSpec: .*set it to the volume"),
    ("going", fleet_at(5, deletionTimestamp=NOW.isoformat()), None, None, "the fleet is being deleted"),
]


@pytest.mark.parametrize(("fleet", "found", "version", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_the_operator_would_refuse_is_not_written(
    fleet: RolloutEngine, found: WeightVersion | None, version: int | None, words: str
) -> None:
    store = Store(fleet, found)
    with pytest.raises(NotPossibleError, match=words):
        bump(store, version=version)
    assert store.writes == 0


def test_what_was_said_about_the_update_before_stays() -> None:
    before = stored(5)
    document = before.dump()
    document["spec"]["deadlines"]["prepareSeconds"] = 7
    wanted = plan_version(Scene(fleet_at(5), WeightVersion.model_validate(document)), Wish("step-6"))
    assert wanted.spec.deadlines.prepare_seconds == 7


def earlier(committed: int | None, *history: HistoryEntry, to: int | None = None) -> HistoryEntry:
    return choose_earlier(Scene(fleet_at(committed), stored(9, history=history)), to)


def test_rollback_goes_to_the_last_active_one_before_the_committed() -> None:
    history = (entry(1), entry(2), entry(3, Outcome.FAILED), entry(4, Outcome.SUPERSEDED), entry(5))
    assert earlier(5, *history).version == 2
    assert earlier(2, *history[:3]).version == 1


def test_a_version_of_the_same_checkpoint_is_no_way_back() -> None:
    assert earlier(5, entry(1), entry(2, checkpoint="step-5"), entry(5)).version == 1


def test_rollback_to_a_named_version() -> None:
    history = (entry(1), entry(2), entry(3, Outcome.FAILED), entry(5))
    assert earlier(5, *history, to=1).checkpoint == "step-1"
    assert earlier(5, *history, to=5).checkpoint == "step-5"


NO_WAY = [
    ("failed", 3, "version 3 ended Failed; one can go back to: 1, 5"),
    ("unknown", 4, "version 4 is not in the history, which keeps the last ten; one can go back to: 1, 5"),
    ("model.path", 0, "version 0 is model.path"),
]


@pytest.mark.parametrize(("to", "words"), [case[1:] for case in NO_WAY], ids=[case[0] for case in NO_WAY])
def test_why_one_cannot_go_back_there(to: int, words: str) -> None:
    with pytest.raises(NotFoundError, match=words):
        earlier(5, entry(1), entry(3, Outcome.FAILED), entry(5), to=to)


def test_where_there_is_nothing_to_go_back_to() -> None:
    with pytest.raises(NotFoundError, match="no version that was Active before 5"):
        earlier(5, entry(3, Outcome.FAILED), entry(5))
    with pytest.raises(NotFoundError, match="nothing is committed"):
        earlier(None, entry(3, Outcome.FAILED))
    with pytest.raises(NotFoundError, match="no WeightVersion names this fleet"):
        choose_earlier(Scene(fleet_at(5), None), None)


def test_a_version_that_failed_is_asked_for_again() -> None:
    store = Store(fleet_at(4), stored(5, phase=Phase.FAILED))
    told = ask_again(store, "rl", "qwen", "now")
    assert (told.version, told.checkpoint) == (5, "step-5")
    assert store.found is not None
    assert (store.found.spec.retry_request, store.found.spec.version) == ("now", 5)


def test_a_retry_whose_answer_was_lost_is_looked_up() -> None:
    store = Store(fleet_at(4), stored(5, phase=Phase.FAILED))
    store.answer_lost = True
    assert ask_again(store, "rl", "qwen", "now").version == 5
    assert store.writes == 1


NOTHING_TO_RETRY = [
    ("active", stored(5, phase=Phase.ACTIVE), "version 5 is Active; only one that failed is retried"),
    ("under way", stored(5, phase=Phase.VERIFYING), "version 5 is Verifying"),
    ("not looked at", stored(6, phase=Phase.FAILED, observed_generation=0), "has not looked at version 6 yet"),
]


@pytest.mark.parametrize(
    ("found", "words"), [case[1:] for case in NOTHING_TO_RETRY], ids=[case[0] for case in NOTHING_TO_RETRY]
)
def test_what_did_not_fail_is_not_retried(found: WeightVersion, words: str) -> None:
    store = Store(fleet_at(4), found)
    with pytest.raises(NotPossibleError, match=words):
        ask_again(store, "rl", "qwen", "now")
    assert store.writes == 0


def test_without_a_weight_version_there_is_nothing_to_retry() -> None:
    with pytest.raises(NotFoundError, match="no WeightVersion names this fleet"):
        ask_again(Store(fleet_at(4)), "rl", "qwen", "now")
