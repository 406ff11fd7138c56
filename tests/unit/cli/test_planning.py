"""`rollfleet plan`: the operator's own decision on what is seen from a laptop."""

import json
from typing import Any

from rollfleet_cli.asking import Answer, engine_config
from rollfleet_cli.planning import MEMORY, Change, Planned, Seen, differences, foresee, observe
from rollfleet_operator.api.members import Member
from rollfleet_operator.api.rolloutengine import RolloutEngine, RolloutEngineStatus
from rollfleet_operator.core.actions import ApplyObject
from rollfleet_operator.core.objects.pod import build_pod
from rollfleet_operator.core.observed import NodeView
from rollfleet_operator.core.plan import plan
from rollfleet_operator.core.plan_children import plan_children
from rollfleet_protocol.engine_config import ENGINE_CONFIG_ENV
from rollfleet_protocol.state import EngineState
from tests.support.builders import NOW, make_committed, make_observed, make_settings, make_state, make_weight_version
from tests.support.builders import make_fleet as build_fleet

STATUS = RolloutEngineStatus(epoch=1, committed=make_committed(0), ca_bundle="Q0E=")


def pod_of(fleet: RolloutEngine, ordinal: int) -> dict[str, Any]:
    """The pod that the operator makes, as the API server has it once it runs."""
    manifest = json.loads(json.dumps(build_pod(fleet, make_settings(), ordinal, f"qwen-{ordinal}-0-abc")))
    manifest["metadata"] |= {"uid": f"pod-{ordinal}", "creationTimestamp": NOW.isoformat(), "resourceVersion": "1"}
    manifest["metadata"]["labels"]["rollfleet.io/serving"] = "true"
    return manifest | {
        "status": {
            "phase": "Running",
            "podIP": f"198.51.100.{ordinal + 1}",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [
                {"name": "engine", "state": {"running": {}}, "containerID": "c", "restartCount": 0, "started": True}
            ],
        }
    }


def live_children(fleet: RolloutEngine, **settings: Any) -> dict[str, dict[str, Any]]:
    """Children as applied, with what the API server adds."""
    applied = plan_children(make_observed(fleet, settings=make_settings(**settings)))
    manifests = [json.loads(json.dumps(one.manifest)) for one in applied if isinstance(one, ApplyObject)]
    return {
        f"{each['kind']}/{each['metadata']['name']}": each | {"status": {}, "immutable": False} for each in manifests
    }


def seen(fleet: RolloutEngine | None = None, **changes: Any) -> Seen:
    """Two engines that serve version 0, and all their children."""
    fleet = fleet or build_fleet(status=STATUS)
    pods = tuple(pod_of(fleet, ordinal) for ordinal in range(2))
    given: dict[str, Any] = {
        "versions": (),
        "pods": pods,
        "answers": tuple(answer_of(pod) for pod in pods),
        "children": live_children(fleet),
        "closed_kinds": (),
        "now": NOW,
    }
    return Seen(fleet=fleet, **(given | changes))


def answer_of(pod: dict[str, Any], **state: Any) -> Answer[EngineState]:
    uid = pod["metadata"]["uid"]
    return Answer(pod["metadata"]["name"], uid, make_state(0, **{"incarnation": f"inc-{uid}", **state}))


def settled(fleet: RolloutEngine) -> RolloutEngine:
    """The fleet once its status says all that there is to say."""
    written = plan(observe(seen(fleet))[0], NOW).fleet_status
    assert written is not None
    return fleet.model_copy(update={"status": written.status})


def test_the_operator_of_the_pods_is_read_from_the_pods() -> None:
    config = engine_config(pod_of(build_fleet(), 0))
    assert config is not None
    assert config.operator.subject == make_settings().operator_subject


def test_a_pod_of_another_release_still_tells_its_operator() -> None:
    pod = pod_of(build_fleet(), 0)
    for variable in pod["spec"]["containers"][0]["env"]:
        if variable["name"] == ENGINE_CONFIG_ENV:
            variable["value"] = json.dumps(json.loads(variable["value"]) | {"fromTheFuture": 1})
    config = engine_config(pod)
    assert config is not None
    assert config.operator.uid == make_settings().operator_uid
    assert engine_config({"spec": {"containers": [{"env": [{"name": ENGINE_CONFIG_ENV, "value": "{"}]}]}}) is None


def test_a_fleet_that_is_well_needs_nothing() -> None:
    planned = foresee(seen(settled(build_fleet(status=STATUS))))
    assert (planned.actions, planned.changes, planned.events) == ((), (), ())
    assert any("Available=True (Serving)" in line for line in planned.why)
    assert MEMORY in planned.assumed


def test_the_labels_of_the_operator_are_read_from_the_network_policy() -> None:
    """Else a fleet that is well would seem to lose its policy."""
    fleet = settled(build_fleet(status=STATUS))
    labelled = {"operator_namespace": "rollfleet-system", "operator_pods": (("app", "rollfleet"),)}
    children = live_children(fleet, **labelled)
    assert "NetworkPolicy/qwen-engines" in children
    assert foresee(seen(fleet, children=children)).actions == ()
    del children["NetworkPolicy/qwen-engines"]["spec"]["ingress"][1]
    assert foresee(seen(fleet, children=children)).actions == ("delete NetworkPolicy qwen-engines",)


def test_a_bump_is_foreseen() -> None:
    planned = foresee(seen(settled(build_fleet(status=STATUS)), versions=(make_weight_version(1),)))
    raised = [change for change in planned.changes if change.field == "epoch"]
    assert [(change.old, change.new) for change in raised if change.object == "RolloutEngine/qwen"] == [(1, 2)]
    assert any(change.field == "phase" and change.new == "Preparing" for change in planned.changes)
    assert planned.wake_at == NOW, "the epoch is written first; the commands follow at once"
    assert not [action for action in planned.actions if action.startswith("command")]


def test_commands_are_told_with_what_they_say() -> None:
    fleet = settled(build_fleet(status=STATUS))
    first = plan(observe(seen(fleet, versions=(make_weight_version(1),)))[0], NOW)
    assert first.fleet_status is not None
    version = make_weight_version(1, status=first.weight_version_statuses[0].status)
    began = fleet.model_copy(update={"status": first.fleet_status.status})
    planned = foresee(seen(began, versions=(version,)))
    assert [action for action in planned.actions if action.startswith("command")] == [
        f"command Prepare epoch=2 version=1 source=step-1 deadline_seconds=600.0 to {pod['metadata']['name']}"
        for pod in seen(began).pods
    ]


def test_a_child_that_was_changed_is_applied_again() -> None:
    fleet = settled(build_fleet(status=STATUS))
    children = live_children(fleet)
    children["Service/qwen"]["spec"]["selector"] = {"app": "somebody-else"}
    assert foresee(seen(fleet, children=children)).actions == ("apply Service qwen",)
    del children["Service/qwen"]
    assert foresee(seen(fleet, children=children)).actions == ("apply Service qwen",)


def test_what_may_not_be_read_is_assumed_to_be_well_and_said() -> None:
    fleet = settled(build_fleet(status=STATUS))
    closed = ("Service", "ServiceAccount", "Role", "RoleBinding", "Deployment")
    planned = foresee(seen(fleet, children={}, closed_kinds=closed))
    assert planned.actions == ()
    assert any("you may not list them" in line for line in planned.assumed)


def test_a_missing_pod_is_made() -> None:
    fleet = settled(build_fleet(status=STATUS))
    whole = seen(fleet)
    planned = foresee(seen(fleet, pods=whole.pods[:1], answers=whole.answers[:1]))
    assert [action.rsplit("-", 1)[0] for action in planned.actions] == ["create pod qwen-1-0"]


def test_engines_that_do_not_answer_are_named() -> None:
    whole = seen(settled(build_fleet(status=STATUS)))
    silent = Answer[EngineState](whole.answers[0].pod, whole.answers[0].uid, error="connection refused")
    planned = foresee(seen(whole.fleet, answers=(silent, whole.answers[1])))
    assert planned.unreachable == (f"{silent.pod}: connection refused",)


def test_an_engine_that_vanished_and_a_node_that_may_not_be_read_are_named() -> None:
    fleet = settled(build_fleet(status=STATUS))
    lost = Member(name="qwen-7-0-lost", uid="gone", ordinal=7, ip="198.51.100.99", node="node-9", vanished_since=NOW)
    status = fleet.status.model_copy(update={"members": (*fleet.status.members, lost)})
    fleet = fleet.model_copy(update={"status": status})
    asked: list[str] = []

    def read(name: str) -> NodeView | None:
        asked.append(name)
        return None

    planned = foresee(seen(fleet, read_node=read))
    assert asked == ["node-9"]
    assert "nothing is known of nodes node-9: you may not read them" in planned.assumed
    assert any(line.endswith("qwen-7-0-lost") for line in planned.assumed)
    known = foresee(seen(fleet, read_node=lambda name: NodeView(name, exists=False)))
    assert not any("nothing is known of nodes" in line for line in known.assumed)


def test_differences_are_told_leaf_by_leaf() -> None:
    old = {"a": 1, "same": {"x": 1}, "conditions": [{"type": "A", "status": "True"}], "list": [1, 2], "gone": "x"}
    new = {"a": 2, "same": {"x": 1}, "conditions": [{"type": "B"}, {"type": "A", "status": "False"}], "list": [1, 3]}
    assert list(differences("K/n", old, new)) == [
        Change("K/n", "a", 1, 2),
        Change("K/n", "conditions.A.status", "True", "False"),
        Change("K/n", "conditions.B", None, {"type": "B"}),
        Change("K/n", "list.1", 2, 3),
        Change("K/n", "gone", "x", None),
    ]
    assert list(differences("K/n", [], [{"name": "p"}])) == [Change("K/n", "p", None, {"name": "p"})]


def test_json_holds_everything() -> None:
    planned = foresee(seen(settled(build_fleet(status=STATUS)), versions=(make_weight_version(1),)))
    document = json.loads(json.dumps(planned.to_json(), default=str))
    assert set(document) == {
        "actions", "status_changes", "events", "notes", "wake_at", "why", "assumed", "unreachable",
    }  # fmt: skip
    assert isinstance(planned, Planned)
