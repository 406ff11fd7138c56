"""plan and diagnose against the API server and the engines, from outside of the cluster, the operator there or not."""

import json
from pathlib import Path

from rollfleet_operator.ports import PODS, ROLE_BINDINGS, ROLES, ROLLOUT_ENGINES, SERVICE_ACCOUNTS
from tests.support.fleet import World
from tests.support.kubectl import kubectl
from tests.support.rollfleet import Command
from tests.support.waiting import until

READ = [
    {"apiGroups": ["rollfleet.io"], "resources": ["rolloutengines", "weightversions"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["get", "list"]},
]
SETTLE_S = 60.0


async def make_world(world: World, replicas: int = 2) -> Command:
    """Operator and a fleet that serves."""
    await world.operator.start()
    await world.create_fleet(replicas)
    await world.serving(replicas)
    return Command(world.namespace, world.operator.kubeconfig)


async def test_what_the_operator_would_do_is_shown_and_not_done(world: World) -> None:
    rollfleet = await make_world(world)
    idle = await rollfleet("plan", "qwen", "-o", "json")
    assert idle.code == 0, idle.stderr
    assert (idle.document["actions"], idle.document["status_changes"]) == ([], [])
    assert any("Available=True (Serving)" in line for line in idle.document["why"])

    await world.operator.stop()
    await world.bump(1)
    before = await world.revisions()
    for via in ("port-forward", "direct"):
        planned = await rollfleet("plan", "qwen", "-o", "json", "--via", via)
        assert planned.code == 0, planned.stderr
        changes = {(each["object"], each["field"]): each["new"] for each in planned.document["status_changes"]}
        assert changes["WeightVersion/qwen-policy", "phase"] == "Preparing"
        assert changes["RolloutEngine/qwen", "epoch"] == 2
        assert planned.document["unreachable"] == []
    words = (await rollfleet("plan", "qwen")).stdout
    assert "RolloutEngine/qwen epoch: 1 -> 2" in words
    assert "look again at once" in words
    assert await world.revisions() == before, "nothing was written"

    await world.operator.start()
    await world.active(1)


async def test_a_fault_is_named_with_its_cause_and_remedy(world: World) -> None:
    rollfleet = await make_world(world)
    well = await rollfleet("diagnose", "qwen", "-o", "json")
    assert well.code == 0, well.stderr
    assert well.document["findings"] == []
    assert [each["state"]["gate"] for each in well.document["guards"]] == ["Open", "Open"]
    assert any(event["reason"] == "Serving" for event in well.document["events"])

    await world.bump(1, "no-such-step", deadlines={"prepareSeconds": 10})
    await world.finished(1)
    failed = await rollfleet("diagnose", "qwen")
    assert failed.code == 0, failed.stderr
    assert "WeightVersion/qwen-policy: CheckpointNotFound: " in failed.stdout
    assert "no-such-step" in failed.stdout
    assert "remedy: correct the path, or put it there" in failed.stdout

    await world.operator.stop()
    await world.bump(2)
    gone = (await rollfleet("diagnose", "qwen", "-o", "json")).document
    reasons = [finding["reason"] for finding in gone["findings"]]
    assert reasons[:2] == ["OperatorNotReady", "NotObserved"]


async def test_an_engine_that_cannot_start_is_told_in_its_launchers_words(world: World) -> None:
    rollfleet = Command(world.namespace, world.operator.kubeconfig)
    await world.operator.start()
    await world.create_fleet(1, model={"path": "no-such-model", "servedName": "policy"})
    found: list[dict[str, str]] = []

    async def ended() -> bool:
        told = await rollfleet("diagnose", "qwen", "-o", "json")
        found[:] = [each for each in told.document["findings"] if each["reason"] == "ExitCode78"]
        return bool(found)

    await until(ended, SETTLE_S, world.operator.log)
    assert "no-such-model" in found[0]["words"]
    assert "change it: a model path" in found[0]["remedy"]


async def test_engines_are_compared_with_the_record_and_each_other(world: World) -> None:
    rollfleet = await make_world(world)
    at_start = await rollfleet("verify", "qwen")
    assert at_start.code == 0, at_start.stderr
    assert "all 2 engines hold version 0, as loaded at start, probes within 0 of 0.001" in at_start.stdout
    await world.bump(1)
    await world.active(1)
    for via in ("port-forward", "direct"):
        well = await rollfleet("verify", "qwen", "-o", "json", "--via", via)
        assert well.code == 0, well.stderr
        told = well.document
        assert (told["holds"], told["committed"], told["max_abs_logprob_diff"]) == (True, 1, "0")
        assert [each["digest"] for each in told["engines"]] == [told["digest"]] * 2

    await world.operator.stop()
    fleet = await world.read_fleet()
    fleet["status"]["committed"]["digest"] = "sha256:of-something-else"
    await world.cluster.replace_status(ROLLOUT_ENGINES, fleet)
    wrong = await rollfleet("verify", "qwen")
    assert wrong.code == 1
    names = [pod["metadata"]["name"] for pod in await world.pods()]
    for name in names:
        assert f"{name}: holds digest {told['digest']}, and sha256:of-something-else is committed" in wrong.stderr

    await world.cluster.delete(PODS, world.namespace, names[0])
    missing = await rollfleet("verify", "qwen", "-o", "json")
    assert missing.code == 1
    assert "1 of 2 engines have no pod" in missing.stderr
    assert [each["engine"] for each in missing.document["engines"]] == names[1:]


async def test_who_may_only_read_is_told_what_is_missing(world: World, tmp_path: Path) -> None:
    await make_world(world, 1)
    reader = Command(world.namespace, await _reader(world, tmp_path))
    planned = await reader("plan", "qwen")
    assert planned.code == 1
    for words in ("serviceaccounts", "token", "cannot create", "docs/security.md"):
        assert words in planned.stderr
    told = await reader("diagnose", "qwen", "-o", "json")
    assert told.code == 0, told.stderr
    assert told.document["state"]["serving"] == 1
    assert told.document["findings"] == [], "that somebody may not ask is no fault of the fleet"
    assert any("Guards answer the operator's ServiceAccount only" in each for each in told.document["not_known"])
    token = {"apiGroups": [""], "resources": ["serviceaccounts/token"], "verbs": ["create"]}
    await world.cluster.merge_patch(ROLES, world.namespace, "reader", {"rules": [*READ, token]})
    halfway = await reader("verify", "qwen")
    assert halfway.code == 1
    for words in ("pods/portforward", "forbidden", "docs/security.md"):
        assert words in halfway.stderr
    assert (await reader("verify", "qwen", "--via", "direct")).code == 0
    moved = await reader("bump", "qwen", "--checkpoint", "step-1")
    assert moved.code == 1
    assert "cannot create resource" in moved.stderr


async def _reader(world: World, folder: Path) -> Path:
    """The kubeconfig of an account that may read, and nothing else."""
    name, place = "reader", world.namespace
    await world.cluster.create(SERVICE_ACCOUNTS, place, {"metadata": {"name": name}})
    await world.cluster.create(ROLES, place, {"metadata": {"name": name}, "rules": READ})
    binding = {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": place}],
    }
    await world.cluster.create(ROLE_BINDINGS, place, binding)
    config = json.loads(kubectl("config", "view", "--raw", "--minify", "--flatten", "--output", "json"))
    token = kubectl("create", "token", name, "--namespace", place).strip()
    config["users"] = [{"name": each["name"], "user": {"token": token}} for each in config["users"]]
    file = folder / "reader.kubeconfig"
    file.write_text(json.dumps(config))
    return file
