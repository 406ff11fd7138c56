"""bump, history, rollback against the API server, with an operator and engines that do what is asked."""

import asyncio
import shutil
from pathlib import Path

from rollfleet_operator.ports import WEIGHT_VERSIONS
from tests.support.fleet import World
from tests.support.rollfleet import Command
from tests.support.waiting import until

IMPATIENT = {"deadlines": {"prepareSeconds": 5}}
SEEN_S = 30.0


async def make_world(world: World) -> Command:
    """Operator and a fleet of two that serves."""
    await world.operator.start()
    await world.create_fleet(2)
    await world.serving(2)
    return Command(world.namespace, world.operator.kubeconfig)


async def test_a_fleet_is_moved_and_moved_back_from_the_command_line(world: World) -> None:
    rollfleet = await make_world(world)
    made = await rollfleet("bump", "qwen", "--checkpoint", "step-1", "--step", "100", "--wait", "--timeout", "60")
    assert made.code == 0, made.stderr
    assert "qwen-policy created, asks for version 1 (step 100) from step-1" in made.stdout
    assert "qwen serves version 1, paused " in made.stdout
    assert "version 1 Active" in made.stderr, "the progress"
    for way in ("\x1b", "Traceback"):
        assert way not in made.stdout + made.stderr

    moved = await rollfleet("bump", "qwen", "--checkpoint", "step-2", "--wait", "--timeout", "60", "-o", "json")
    assert moved.code == 0, moved.stderr
    assert (moved.document["version"], moved.document["outcome"], moved.document["created"]) == (2, "Active", False)

    back = await rollfleet("rollback", "qwen", "--wait", "--timeout", "60", "-o", "json")
    assert back.code == 0, back.stderr
    assert (back.document["version"], back.document["checkpoint"], back.document["step"]) == (3, "step-1", "100")
    assert (await world.read_fleet())["status"]["committed"]["checkpoint"] == "step-1"

    told = (await rollfleet("history", "qwen", "-o", "json")).document
    assert [(each["version"], each["outcome"], each["checkpoint"]) for each in told] == [
        (1, "Active", "step-1"),
        (2, "Active", "step-2"),
        (3, "Active", "step-1"),
    ]
    assert told[0]["digest"] == told[2]["digest"] != told[1]["digest"]
    table = (await rollfleet("history", "qwen")).stdout.splitlines()
    assert table[2].split()[:4] == ["2", "-", "step-2", "Active"]
    nowhere = await rollfleet("rollback", "qwen", "--to", "7")
    assert nowhere.code == 3
    assert "version 7 is not in the history" in nowhere.stderr


async def test_the_exit_code_tells_how_it_ended(world: World) -> None:
    rollfleet = await make_world(world)
    await world.bump(1, **IMPATIENT)
    await world.active(1)
    failed = await rollfleet("bump", "qwen", "--checkpoint", "no-such", "--wait", "--timeout", "60", "-o", "json")
    assert failed.code == 4
    assert failed.document["outcome"] == "Failed"
    assert "no such folder" in failed.document["message"]
    again = await rollfleet("retry", "qwen", "--wait", "--timeout", "60", "-o", "json")
    assert (again.code, again.document["version"], again.document["outcome"]) == (4, 2, "Failed")
    ends = (await rollfleet("history", "qwen", "-o", "json")).document
    assert [each["version"] for each in ends] == [1, 2, 2], "it was tried again, and failed again"
    nothing = await rollfleet("rollback", "qwen")
    assert nothing.code == 3
    assert "no version that was Active before 1" in nothing.stderr

    patient = {"spec": {"deadlines": {"prepareSeconds": 60}}}  # else it fails before it is overtaken
    await world.cluster.merge_patch(WEIGHT_VERSIONS, world.namespace, "qwen-policy", patient)
    overtaken = await rollfleet.start("bump", "qwen", "--checkpoint", "no-such-either", "--wait", "-o", "json")

    async def asked() -> bool:
        return bool((await world.read_version())["spec"]["version"] == 3)

    await until(asked, SEEN_S, world.operator.log)
    winner = await rollfleet("bump", "qwen", "--checkpoint", "step-2", "--wait", "--timeout", "60")
    assert winner.code == 0, winner.stderr
    loser = await overtaken()
    assert (loser.code, loser.document["outcome"]) == (6, "Superseded")
    assert "version 3 was superseded" in loser.stderr

    late = await rollfleet("bump", "qwen", "--checkpoint", "no-such", "--wait", "--timeout", "1", "-o", "json")
    assert (late.code, late.document["outcome"]) == (5, "TimedOut")
    low = await rollfleet("bump", "qwen", "--checkpoint", "step-1", "--version", "4")
    assert low.code == 1
    assert "version 4 must exceed 5" in low.stderr
    odd = await rollfleet("bump", "qwen", "--checkpoint", "step-1", "--version", str(2**63))
    assert odd.code == 1
    assert "Traceback" not in odd.stderr


async def test_a_version_is_retried_once_its_checkpoint_is_there(world: World, tmp_path: Path) -> None:
    rollfleet = await make_world(world)
    idle = await rollfleet("retry", "qwen")
    assert idle.code == 3
    await world.bump(1, f"{tmp_path.name}/step-9", **IMPATIENT)
    await world.finished(1)
    shutil.copytree(world.kind.models / "step-1", world.kind.models / tmp_path.name / "step-9")
    cured = await rollfleet("retry", "qwen", "--wait", "--timeout", "60")
    assert cured.code == 0, cured.stderr
    assert "qwen serves version 1" in cured.stdout
    well = await rollfleet("retry", "qwen")
    assert well.code == 1
    assert "version 1 is Active; only one that failed is retried" in well.stderr


async def test_writers_at_once_get_numbers_of_their_own(world: World) -> None:
    rollfleet = await make_world(world)
    ends = await asyncio.gather(*(rollfleet("bump", "qwen", "--checkpoint", "step-1", "-o", "json") for _ in range(4)))
    assert [end.code for end in ends] == [0] * 4, [end.stderr for end in ends]
    assert sorted(end.document["version"] for end in ends) == [1, 2, 3, 4]
    assert len((await world.cluster.list(WEIGHT_VERSIONS, world.namespace)).items) == 1
    await world.active(4)


async def test_a_watch_on_a_version_that_is_not_accepted_ends(world: World) -> None:
    """Without --timeout it used to wait for ever."""
    await world.operator.start()
    await world.create_fleet(0, volumes={"model": {"hostPath": {"path": str(world.kind.models)}}})
    rollfleet = Command(world.namespace, world.operator.kubeconfig)
    refused = await rollfleet("bump", "qwen", "--checkpoint", "step-1")
    assert refused.code == 1
    assert "spec.volumes.checkpoints" in refused.stderr, "the command itself asks for nothing that is in vain"
    await world.bump(1)
    ended = await rollfleet("watch", "qwen", "--until-active", "1")
    assert ended.code == 4
    assert "version 1 is not accepted: InvalidSpec: " in ended.stderr
