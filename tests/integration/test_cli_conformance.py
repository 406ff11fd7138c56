"""`rollfleet conformance` of fleets that serve, from outside of the cluster: all passes, and nothing is left behind."""

import json
from pathlib import Path

from tests.support.fleet import World
from tests.support.rollfleet import Command

SIMULATED = {"engine": {"args": ["--enable-prompt-tokens-details"]}}


async def make_world(world: World, replicas: int) -> Command:
    await world.operator.start()
    await world.create_fleet(replicas, **SIMULATED)
    await world.serving(replicas)
    return Command(world.namespace, world.operator.kubeconfig)


async def test_a_fleet_of_ours_conforms_and_is_left_as_it_was(world: World, tmp_path: Path) -> None:
    rollfleet = await make_world(world, 2)
    before = await world.read_fleet()
    at_start = await rollfleet("conformance", "--fleet", "qwen", "-o", "json", "--report", str(tmp_path / "r.md"))
    assert at_start.code == 0, at_start.stderr + at_start.stdout
    assert await world.read_fleet() == before, "nothing was written, no epoch was taken"
    told = at_start.document
    assert (told["counts"]["Failed"], told["complete"], told["engines_present"]) == (0, True, 2)
    skipped = {row["check"]: row["skipped"] for row in told["checks"] if row["result"] == "Skipped"}
    assert "spec.features.traceReplay is Disabled" in skipped["trace-replay"]
    assert "--disruptive" in skipped["update-active"]
    assert {each["facts"]["host"]["platform"] for each in told["engines"]} == {"CPU"}
    page = (tmp_path / "r.md").read_text()
    assert told["spec_sha256"] in page
    assert all(each["pod"] in page for each in told["engines"])

    await world.bump(1)
    await world.active(1)
    await world.serving(2)
    moved = await rollfleet("conformance", "--fleet", "qwen", "--disruptive", "--report", str(tmp_path / "r.json"))
    assert moved.code == 0, moved.stderr + moved.stdout
    assert "version 2 of the same checkpoint (step-1)" in moved.stderr
    rows = {row["check"]: row for row in json.loads((tmp_path / "r.json").read_text())["checks"]}
    ours = ("update-active", "update-atomic", "update-caches", "update-answers")
    assert {name: rows[name]["result"] for name in ours} == dict.fromkeys(ours, "Passed")
    assert (await world.read_fleet())["status"]["committed"]["version"] == 2
