"""RolloutFleet.publish and retain: a copy becomes the recovery of the version that it is one of, and of no other."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollfleet_trainer import NotPossible, RolloutFleet
from rollfleet_trainer.checkpoints import published
from rollfleet_trainer.copies import in_use
from rollfleet_trainer.errors import ConflictError, PublishError, TrainerError, UnreachableError
from rollfleet_trainer.publishing import publish
from rollfleet_trainer.ranks import Word
from rollfleet_trainer.versions import Wish, plan
from tests.support.memory_api import ENGINES_PATH, POLICY_PATH, MemoryApi, fleet
from tests.support.publishing import Arrays


@pytest.fixture
def api() -> MemoryApi:
    return fleet()


@pytest.fixture
def trainer(api: MemoryApi, root: Path) -> Iterator[RolloutFleet]:
    root.mkdir()
    one = RolloutFleet("rl/qwen", service_account="grpo", checkpoints=root)
    assert one._driver is not None
    one._driver.control._api = api  # type: ignore[assignment]
    yield one
    one.blocking.close()


@pytest.fixture
def digest(weights: Arrays, tmp_path: Path) -> str:
    return publish(tmp_path / "elsewhere", weights, step=0).digest


def serve(api: MemoryApi, digest: str, source: str = "Trainer", phase: str = "Active", **spec: Any) -> None:
    """The fleet holds version 7."""
    told = {"engineRef": {"name": "qwen"}, "version": 7, "source": {"type": source}} | spec
    api.put(POLICY_PATH, {"metadata": {"namespace": "rl", "name": "qwen-policy"}, "spec": told})
    api.put_status(POLICY_PATH, phase=phase, digest=digest)


def files(root: Path) -> list[str]:
    return [path.name for path in root.iterdir()]


def recovery(api: MemoryApi) -> Any:
    return api.objects[POLICY_PATH]["spec"].get("recovery")


async def test_both_faces_write_a_copy_and_name_it_as_the_recovery_of_what_is_served(
    api: MemoryApi, trainer: RolloutFleet, weights: Arrays, root: Path, digest: str
):
    serve(api, digest)
    seen: list[tuple[int, int]] = []
    made = await trainer.publish(weights, step=70, on_progress=lambda count, nbytes: seen.append((count, nbytes)))
    assert (made.root, made.path, made.digest, made.recovers) == (root, "step-70", digest, 7)
    assert recovery(api) == {"checkpoint": {"path": "step-70"}}
    assert seen[-1] == (made.tensors, made.nbytes)
    before = len(api.requests)
    again = trainer.blocking.publish(lambda: iter(weights.items()), step=70)
    assert (again.path, again.recovers) == ("step-70", 7)
    assert not any(method == "PATCH" for method, _ in api.requests[before:]), "it is named already"


def test_the_next_version_leaves_the_copy_s_name_where_an_operator_that_looks_late_finds_it(
    api: MemoryApi, trainer: RolloutFleet, weights: Arrays, digest: str
):
    serve(api, digest)
    assert trainer.blocking.publish(weights, step=70).recovers == 7
    planned = plan(api.objects[ENGINES_PATH + "/qwen"], api.objects[POLICY_PATH], Wish())
    assert planned.body is not None
    api.change(POLICY_PATH, {"spec": planned.body["spec"]})
    spec = api.objects[POLICY_PATH]["spec"]
    assert (spec["version"], spec.get("recovery")) == (8, None)
    assert spec["stored"] == {"version": 7, "checkpoint": {"path": "step-70"}}
    api.change(POLICY_PATH, {"spec": {"version": 9}})  # by somebody who knows nothing of it
    assert api.objects[POLICY_PATH]["spec"]["stored"]["version"] == 7


@pytest.mark.parametrize(
    ("digest_served", "spec", "phase"),
    [
        ("another", {}, "Active"),
        ("same", {"source": "Checkpoint"}, "Active"),
        ("same", {}, "Failed"),
        ("same", {}, "Transferring"),
    ],
    ids=["another-digest", "from-a-checkpoint", "failed", "not-yet-held"],
)
def test_it_is_the_recovery_of_nothing_else(
    api: MemoryApi,
    trainer: RolloutFleet,
    weights: Arrays,
    digest: str,
    digest_served: str,
    spec: dict[str, Any],
    phase: str,
):
    serve(api, digest if digest_served == "same" else "sha256:another", phase=phase, **spec)
    made = trainer.blocking.publish(weights, step=70)
    assert made.folder.is_dir()
    assert made.recovers is None
    assert recovery(api) is None


def test_a_version_that_is_asked_for_meanwhile_keeps_its_own_recovery(
    api: MemoryApi, trainer: RolloutFleet, weights: Arrays, digest: str
):
    serve(api, digest)

    def overtaken(method: str, _path: str) -> None:
        if method == "PATCH":
            api.failing = lambda *_: None
            api.change(POLICY_PATH, {"spec": {"version": 8}})

    api.failing = overtaken
    assert trainer.blocking.publish(weights, step=70).recovers is None
    assert recovery(api) is None


def test_where_every_write_comes_too_late_the_copy_is_there_and_the_same_call_names_it(
    api: MemoryApi, trainer: RolloutFleet, weights: Arrays, root: Path, digest: str
):
    serve(api, digest)
    api.failing = lambda method, _: ConflictError("modified") if method == "PATCH" else None
    with pytest.raises(ConflictError, match="8 writes in a row were too late: modified"):
        trainer.blocking.publish(weights, step=70)
    assert [each.path for each in published(root)] == ["step-70"]
    api.failing = lambda *_: None
    assert trainer.blocking.publish(weights, step=70).recovers == 7


async def test_a_caller_that_is_cancelled_ends_it_and_leaves_nothing(
    trainer: RolloutFleet, weights: Arrays, root: Path
):
    begun, go_on = threading.Event(), threading.Event()

    def pairs() -> Iterator[tuple[str, Any]]:
        for pair in weights.items():
            begun.set()
            assert go_on.wait(20)
            yield pair

    publishing = asyncio.create_task(trainer.publish(pairs, step=1))
    await asyncio.to_thread(begun.wait, 20)
    publishing.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert files(root) == []


def test_where_the_volume_is_must_be_said_and_true(weights: Arrays, tmp_path: Path):
    with RolloutFleet("rl/qwen").blocking as one:
        with pytest.raises(NotPossible, match=r"checkpoints=.*\$ROLLFLEET_CHECKPOINTS"):
            one.publish(weights, step=1)
        with pytest.raises(NotPossible, match=r"is no folder: is the fleet's volumes\.checkpoints mounted"):
            one.retain(2, root=tmp_path / "not-mounted")


def test_the_environment_says_where_the_volume_is_unless_the_program_does(
    api: MemoryApi, weights: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    named, told = tmp_path / "named", tmp_path / "told"
    monkeypatch.setenv("ROLLFLEET_CHECKPOINTS", str(named))
    for place, options in ((named, {}), (told, {"checkpoints": told})):
        place.mkdir()
        with RolloutFleet("rl/qwen", service_account="grpo", **options).blocking as one:
            assert one._fleet._driver is not None
            one._fleet._driver.control._api = api  # type: ignore[assignment]
            assert one.publish(weights, step=1).folder == place / "step-1"


async def test_what_is_closed_does_nothing_more_and_says_so(
    api: MemoryApi, trainer: RolloutFleet, weights: Arrays, root: Path
):
    await trainer.aclose()
    await trainer.aclose()
    trainer.blocking.close()
    for call in (lambda: trainer.publish(weights, step=1), lambda: trainer.retain(1), trainer.spec):
        with pytest.raises(NotPossible, match="was closed"):
            await call()
    with pytest.raises(NotPossible, match="was closed"), trainer.begin():
        pass
    with pytest.raises(NotPossible, match="was closed"):
        async with trainer.rollouts():
            pass
    assert files(root) == []


def fill(root: Path, weights: Arrays, steps: int) -> None:
    for step in range(1, steps + 1):
        publish(root, weights, step=step)


async def test_old_copies_go_but_for_what_any_fleet_uses(
    api: MemoryApi, trainer: RolloutFleet, weights: Arrays, root: Path
):
    fill(root, weights, 6)
    serve(api, "sha256:another", recovery={"checkpoint": {"path": "step-2"}})
    judge = {"metadata": {"namespace": "rl", "name": "judge"}, "status": {"committed": {"checkpoint": "step-1"}}}
    api.put(f"{ENGINES_PATH}/judge", judge)
    done = await trainer.retain(2, also_in_use=lambda: ["step-3"])
    assert [each.path for each in done.deleted] == ["step-4"]
    assert [each.path for each in done.in_use] == ["step-1", "step-2", "step-3"]
    made = trainer.blocking.publish(weights, step=7, keep=1)
    assert [each.path for each in published(root)] == ["step-1", "step-2", made.path]


async def test_what_is_committed_between_two_answers_is_in_use(api: MemoryApi):
    """Named by the version until it is committed, and by the fleet from then on: it was in use all the time."""
    serve(api, "sha256:another", source={"type": "Checkpoint", "checkpoint": {"path": "step-1"}})

    def after_the_first(_method: str, _path: str) -> None:
        api.failing = commits

    def commits(_method: str, _path: str) -> None:
        api.failing = lambda _method, _path: None
        judge = {"metadata": {"namespace": "rl", "name": "qwen"}, "status": {"committed": {"checkpoint": "step-1"}}}
        api.put(f"{ENGINES_PATH}/qwen", judge)
        serve(api, "sha256:another", source={"type": "Checkpoint", "checkpoint": {"path": "step-4"}})

    api.failing = after_the_first
    assert "step-1" in await in_use(api, "rl")  # type: ignore[arg-type]


def test_what_was_just_written_stays_whatever_the_clock_says(
    api: MemoryApi, trainer: RolloutFleet, weights: Arrays, root: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("time.time_ns", lambda: 4 * 10**18)
    fill(root, weights, 2)
    monkeypatch.setattr("time.time_ns", lambda: 10**18)  # the clock was set right
    made = trainer.blocking.publish(weights, step=3, keep=1)
    assert made.folder.is_dir()
    assert [each.path for each in published(root)] == ["step-3", "step-2"]


def test_nothing_is_deleted_where_nobody_can_be_asked(
    api: MemoryApi, trainer: RolloutFleet, weights: Arrays, root: Path
):
    fill(root, weights, 3)
    api.failing = lambda _, path: UnreachableError("the API server is away") if path == ENGINES_PATH else None
    with pytest.raises(UnreachableError, match="is away"):
        trainer.blocking.retain(1)
    assert len(published(root)) == 3


def test_what_a_run_goes_on_from_stays_though_it_is_old(
    api: MemoryApi, trainer: RolloutFleet, weights: Arrays, root: Path, tmp_path: Path
):
    """`--model /checkpoints/step-1`: tokenizer and config come from there with every copy."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    publish(root, weights, step=1, assets=base)
    (tmp_path / "model").symlink_to(root / "step-1")
    for step in range(2, 7):
        assets = root / "step-1" if step % 2 else tmp_path / "model"
        made = trainer.blocking.publish(weights, step=step, assets=assets, keep=2)
        assert (made.folder / "config.json").is_file()
    assert [each.path for each in published(root)] == ["step-1", "step-5", "step-6"]
    assert [each.path for each in trainer.blocking.retain(1).in_use] == ["step-1"]


def test_a_model_that_checkpoints_lie_below_keeps_none_of_them(trainer: RolloutFleet, weights: Arrays, root: Path):
    (root / "config.json").write_text("{}")
    for step in range(1, 4):
        trainer.blocking.publish(weights, step=step, assets=root, keep=1)
    assert [each.path for each in published(root)] == ["step-3"]


def test_assets_that_are_not_there_are_named_before_anything_is_written(
    trainer: RolloutFleet, weights: Arrays, root: Path
):
    with pytest.raises(PublishError, match=r"assets=.*step-4: is no folder: nothing was published"):
        trainer.blocking.publish(weights, step=5, assets=root / "step-4")
    assert files(root) == []


@pytest.mark.parametrize(
    ("path", "words"),
    [("nope-999", r"recovery='nope-999': is no folder below .*, where"), ("../elsewhere", "must be relative")],
)
def test_a_recovery_that_is_not_there_is_refused_before_anybody_is_asked(
    api: MemoryApi, trainer: RolloutFleet, path: str, words: str
):
    with pytest.raises(NotPossible, match=words), trainer.blocking.begin(recovery=path):
        pass
    assert not any(method in ("POST", "PATCH") for method, _ in api.requests)


class TwoRanks:
    """What rank 0 tells the other one."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.told: list[tuple[Word, Any]] = []

    def tell(self, word: Word, what: Any = None) -> None:
        self.told.append((word, what))

    def hear(self) -> tuple[Word, Any]:
        raise AssertionError("rank 0 hears of nobody")


def test_other_ranks_are_told_before_they_gather_what_cannot_be(trainer: RolloutFleet, weights: Arrays):
    ranks = TwoRanks()
    assert trainer._store is not None
    trainer._store._ranks = ranks
    with pytest.raises(ValueError, match="must be relative"):
        trainer.blocking.publish(weights, step=1, within="../other")
    [(word, error)] = ranks.told
    assert word is Word.FAILED
    assert isinstance(error, TrainerError)
    assert "rank 0: ValueError: within" in str(error)


def test_closing_twice_is_harmless(trainer: RolloutFleet):
    trainer.blocking.close()
    trainer.blocking.close()


def test_what_the_caller_s_progress_raises_ends_it(trainer: RolloutFleet, weights: Arrays, root: Path):
    def full(_tensors: int, _nbytes: int) -> None:
        raise PublishError("enough")

    with pytest.raises(PublishError, match="enough"):
        trainer.blocking.publish(weights, step=1, on_progress=full)
    assert files(root) == []


def test_only_the_last_assets_are_kept(trainer: RolloutFleet, weights: Arrays, root: Path, tmp_path: Path):
    """A loop that takes them from its newest copy each time must not keep all copies for ever."""
    assets = tmp_path / "base"
    assets.mkdir()
    (assets / "config.json").write_text("{}")
    for step in range(1, 6):
        assets = trainer.blocking.publish(weights, step=step, assets=assets, keep=2).folder
    assert [each.path for each in published(root)] == ["step-4", "step-5"]
