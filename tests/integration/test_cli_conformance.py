"""`rollfleet conformance` of a fleet that serves, from outside of the cluster: it passes, and is left as it was."""

import json
from pathlib import Path

from rollfleet_operator.ports import ROLLOUT_ENGINES
from tests.support.fleet import World
from tests.support.rollfleet import Command

OF_UPDATES = ("update-active", "update-atomic", "update-caches", "update-answers")


async def test_a_fleet_of_ours_conforms_and_is_left_as_it_was(world: World, tmp_path: Path) -> None:
    rollfleet = Command(world.namespace, world.operator.kubeconfig)
    await world.operator.start()
    await world.create_fleet(2, engine={"args": ["--enable-prompt-tokens-details"]})
    await world.serving(2)
    before, page = await world.read_fleet(), tmp_path / "report.md"
    one = ("conformance", "--fleet", "qwen", "--via", "direct", "-o", "json", "--engine")
    looked = await rollfleet(*one, "qwen-0", "--report", str(page))
    assert looked.code == 0, looked.stderr + looked.stdout
    assert await world.read_fleet() == before, "nothing was written, no epoch was taken"
    told = looked.document
    assert (told["counts"]["Failed"], told["complete"], told["engines_present"]) == (0, True, 2)
    skipped = {row["check"]: row["skipped"] for row in told["checks"] if row["result"] == "Skipped"}
    assert "spec.features.traceReplay is Disabled" in skipped["trace-replay"]
    assert "--disruptive" in skipped["update-active"]
    (engine,) = told["engines"]
    assert engine["facts"]["host"]["platform"] == "CPU"
    text = page.read_text()
    assert all(words in text for words in (told["spec_sha256"], engine["pod"], engine["image_id"]))

    await world.bump(1)
    await world.active(1)
    await world.serving(2)
    moved = await rollfleet("conformance", "--fleet", "qwen", "--disruptive", "--report", str(tmp_path / "r.json"))
    assert moved.code == 0, moved.stderr + moved.stdout
    assert "version 2 of the same checkpoint (step-1)" in moved.stderr
    rows = {row["check"]: row for row in json.loads((tmp_path / "r.json").read_text())["checks"]}
    assert {name: rows[name]["result"] for name in OF_UPDATES} == dict.fromkeys(OF_UPDATES, "Passed")
    assert (await world.read_fleet())["status"]["committed"]["version"] == 2

    await world.operator.stop()
    fleet = await world.read_fleet()
    fleet["status"]["committed"]["digest"] = "sha256:of-something-else"
    await world.cluster.replace_status(ROLLOUT_ENGINES, fleet)
    wrong = await rollfleet(*one, "qwen-1")
    assert wrong.code == 1
    assert [row["check"] for row in wrong.document["checks"] if row["result"] == "Failed"] == ["same-weights"]
    assert "same-weights" in wrong.stderr
    nobody = await rollfleet("conformance", "--fleet", "nobody")
    assert (nobody.code, nobody.stdout) == (2, "")
