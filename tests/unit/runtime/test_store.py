"""The stores: newer wins, deletions stay deleted, lists repair."""

from typing import Any

import pytest

from rollfleet_operator.api.meta import LABEL_SERVING
from rollfleet_operator.runtime.store import ChildStore, PodStore, says
from tests.support.pods import make_pod

KEY = "rl/qwen"


def test_a_newer_version_wins_whatever_the_order_of_arrival() -> None:
    store = PodStore()
    assert store.upsert(make_pod(revision=9, podIP="198.18.64.9")) == KEY
    assert store.upsert(make_pod(revision=8, podIP="198.18.64.8")) is None
    assert [pod.ip for pod in store.pods(KEY, "f-1")] == ["198.18.64.9"]
    assert store.upsert(make_pod(revision=10, podIP="198.18.64.10")) == KEY


def test_revisions_compare_as_numbers() -> None:
    store = PodStore()
    store.upsert(make_pod(revision=9))
    assert store.upsert(make_pod(revision=10, podIP="198.18.64.10")) == KEY


def test_a_change_that_decisions_do_not_see_is_no_news() -> None:
    store = PodStore()
    store.upsert(make_pod(revision=1))
    assert store.upsert(make_pod(revision=2, annotations={"example.com/note": "hello"})) is None
    assert store.upsert(make_pod(revision=3, labels={LABEL_SERVING: "true"})) == KEY


def test_a_late_answer_does_not_bring_a_deleted_pod_back() -> None:
    store = PodStore()
    store.upsert(make_pod(revision=1))
    assert store.remove("p-1") == KEY
    assert store.upsert(make_pod(revision=2)) is None
    assert store.pods(KEY, "f-1") == ()
    assert store.keys() == set()


def test_last_words_that_come_after_the_end_count() -> None:
    """A request may meet 404 before the watch tells of the deletion, with what the kubelet said last."""
    store = PodStore()
    store.upsert(make_pod(revision=1, container=RUNS))
    store.remove("p-1")
    assert store.upsert(make_pod(revision=2, container=RUNS)) is None
    assert store.terminated(["p-1"]) == frozenset()
    assert store.upsert(make_pod(revision=3, container=ENDED)) == KEY
    assert store.terminated(["p-1"]) == {"p-1"}
    assert store.upsert(make_pod(revision=3, container=ENDED)) is None
    assert store.pods(KEY, "f-1") == ()


RUNS = {"state": {"running": {}}, "started": True}
ENDED = {"state": {"terminated": {"exitCode": 0}}}
BACKS_OFF = {
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"exitCode": 1}},
    "started": False,
}
STARTS = {"state": {"running": {}}, "started": False}


@pytest.mark.parametrize(
    ("status", "ended"),
    [
        ({"container": RUNS}, False),
        ({"container": RUNS, "phase": "Failed"}, False),
        ({"container": ENDED}, True),
        ({"container": BACKS_OFF}, True),
        ({"phase": "Pending", "containerStatuses": []}, False),
        ({"container": STARTS}, False),
    ],
    ids=["runs", "runs, called failed by the control plane", "ended", "backs off", "never began", "had not started"],
)
def test_of_a_pod_that_is_gone_it_is_known_whether_its_containers_had_ended(
    status: dict[str, Any], ended: bool
) -> None:
    """That it had not begun is no word that it ended: what was heard last may be older than what others saw of it."""
    store = PodStore()
    store.upsert(make_pod(revision=1, **status))
    assert store.terminated(["p-1"]) == frozenset()
    store.remove("p-1")
    store.remove("p-1")
    assert store.terminated(["p-1", "p-2"]) == (frozenset({"p-1"}) if ended else frozenset())


def test_a_pod_that_a_watch_lost_sight_of_stays_until_it_was_looked_at() -> None:
    store = PodStore()
    store.upsert(make_pod(revision=1))
    assert store.doubt("p-1") == KEY
    assert [pod.uid for pod in store.pods(KEY, "f-1")] == [pod.uid for pod in store.doubtful(KEY)] == ["p-1"]
    store.upsert(make_pod(revision=1))
    assert store.doubtful(KEY) == ()


@pytest.mark.parametrize("label", ["rollfleet.io/fleet", "rollfleet.io/component"])
def test_a_pod_whose_labels_were_edited_is_still_its_owners(label: str) -> None:
    store = PodStore()
    store.upsert(make_pod(revision=1))
    assert store.upsert(make_pod(revision=2, labels={label: "other"})) == KEY
    assert [pod.uid for pod in store.doubtful(KEY)] == ["p-1"]
    store.upsert(make_pod(revision=3))
    assert store.doubtful(KEY) == ()


REPLICA_SET = {"kind": "ReplicaSet", "name": "qwen", "uid": "r-1", "controller": True}


@pytest.mark.parametrize(
    ("owners", "name"), [([REPLICA_SET], "qwen-0-0-abcde"), ([], "qwen-shell"), ([], "llama-0-0-abcde")]
)
def test_a_pod_of_another_owner_is_not_ours(owners: list[dict[str, Any]], name: str) -> None:
    store = PodStore()
    pod = make_pod(name=name)
    pod["metadata"]["ownerReferences"] = owners
    assert store.upsert(pod) is None


def test_a_pod_without_owner_is_ours_by_labels_and_name_and_must_be_looked_at() -> None:
    store = PodStore()
    store.upsert(make_pod(revision=1))
    orphan = make_pod(revision=2)
    del orphan["metadata"]["ownerReferences"]
    assert store.upsert(orphan) == KEY
    assert [pod.uid for pod in store.doubtful(KEY)] == ["p-1"]


def test_pods_of_a_deleted_fleet_of_the_same_name_are_not_the_new_ones() -> None:
    store = PodStore()
    store.upsert(make_pod())
    assert store.pods(KEY, "f-2") == ()


def test_a_list_casts_doubt_on_what_is_gone_and_adds_what_no_watch_told() -> None:
    store = PodStore()
    store.upsert(make_pod(uid="gone", name="qwen-0-0-a"))
    store.upsert(make_pod(uid="stays", name="qwen-1-0-b"))
    before = store.snapshot("rl")
    router = make_pod(uid="router", name="qwen-router-7d9f-x2x")  # in the list by its label, and nobody's news
    router["metadata"]["ownerReferences"][0] |= {"kind": "ReplicaSet", "name": "qwen-router-7d9f"}
    stays, new = make_pod(uid="stays", name="qwen-1-0-b"), make_pod(uid="new", name="qwen-2-0-c", revision=5)
    changed, untold = store.reconcile_list(before, [stays, new, router])
    assert changed == {KEY}
    assert [pod["metadata"]["uid"] for pod in untold] == ["new"]
    assert {pod.uid for pod in store.pods(KEY, "f-1")} == {"gone", "stays", "new"}
    assert [pod.uid for pod in store.doubtful(KEY)] == ["gone"]


def test_a_list_does_not_remove_what_came_after_it_was_read() -> None:
    store = PodStore()
    before = store.snapshot(None)
    store.upsert(make_pod(uid="created meanwhile", revision=7))
    changed, _ = store.reconcile_list(before, [])
    assert changed == set()
    assert [pod.uid for pod in store.pods(KEY, "f-1")] == ["created meanwhile"]


def test_a_list_of_one_namespace_leaves_the_others_alone() -> None:
    store = PodStore()
    store.upsert(make_pod(uid="a", namespace="rl"))
    store.upsert(make_pod(uid="b", namespace="other"))
    store.reconcile_list(store.snapshot("rl"), [])
    assert [pod.uid for pod in store.doubtful(KEY)] == ["a"]
    assert store.doubtful("other/qwen") == ()


def child(revision: int, **changes: Any) -> dict[str, Any]:
    spec = {"selector": {"app": "qwen"}, "ports": [{"port": 8000}]} | changes
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "qwen", "namespace": "rl", "resourceVersion": str(revision)},
        "spec": spec,
    }


def applied() -> ChildStore:
    store = ChildStore()
    store.applied(
        KEY, "h-1", {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "qwen"}, **wanted()}, child(5)
    )
    return store


def wanted() -> dict[str, Any]:
    return {"spec": {"selector": {"app": "qwen"}, "ports": [{"port": 8000}]}}


def listed(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("apiVersion", "kind")}


def test_a_child_that_others_added_to_has_not_drifted() -> None:
    store = applied()
    grown = child(6, clusterIP="198.19.0.1", ports=[{"port": 8000, "protocol": "TCP"}])
    assert store.reconcile_list("rl", "Service", [listed(grown)]) == set()
    assert store.hashes(KEY) == {"Service/qwen": "h-1"}


def test_a_child_that_was_edited_is_applied_again() -> None:
    store = applied()
    assert store.reconcile_list(None, "Service", [listed(child(6, selector={"app": "evil"}))]) == {KEY}
    assert store.hashes(KEY) == {}


def test_a_child_that_is_missing_is_applied_again() -> None:
    store = applied()
    assert store.reconcile_list("other", "Service", []) == set()
    assert store.reconcile_list("rl", "Deployment", []) == set()
    assert store.reconcile_list("rl", "Service", []) == {KEY}
    assert store.hashes(KEY) == {}


def test_a_child_of_an_operator_before_us_is_known_by_name() -> None:
    store = ChildStore()
    owned = child(4)
    owned["metadata"]["ownerReferences"] = [{"kind": "RolloutEngine", "name": "qwen", "uid": "f-1"}]
    assert store.reconcile_list("rl", "Service", [listed(owned), listed(child(5) | {"metadata": foreign()})]) == set()
    assert store.hashes(KEY) == {"Service/qwen": ""}
    store.applied(KEY, "h-1", {"kind": "Service", "metadata": {"name": "qwen"}}, child(4))
    assert store.reconcile_list("rl", "Service", [listed(owned)]) == set()
    assert store.hashes(KEY) == {"Service/qwen": "h-1"}


def told(revision: int, **changes: Any) -> dict[str, Any]:
    item = child(revision, **changes)
    item["metadata"]["labels"] = {"rollfleet.io/fleet": "qwen"}
    return item


def test_a_watch_tells_of_a_child_that_drifted_or_went() -> None:
    for deleted, item in ((False, told(6, selector={"app": "evil"})), (True, told(6))):
        store = applied()
        assert store.told("Service", item, deleted=deleted) == KEY
        assert store.hashes(KEY) == {}
        assert store.told("Service", item, deleted=deleted) is None, "once"


def test_a_watch_that_tells_of_a_child_what_we_know_is_no_news() -> None:
    store = applied()
    grown = told(7, clusterIP="198.19.0.1")
    late = told(4, selector={"app": "before our own write"})
    for item in (told(5), grown, late, told(6) | {"metadata": foreign()}):
        assert store.told("Service", item, deleted=False) is None
    assert store.told("Deployment", told(9, selector={}), deleted=False) is None
    assert store.hashes(KEY) == {"Service/qwen": "h-1"}


def test_a_child_whose_label_was_changed_is_found_by_its_owner() -> None:
    store = applied()
    item = told(6, selector={"app": "evil"})
    item["metadata"] |= {
        "labels": {"rollfleet.io/fleet": "llama"},
        "ownerReferences": [{"kind": "RolloutEngine", "name": "qwen", "uid": "f-1"}],
    }
    assert store.told("Service", item, deleted=False) == KEY


def foreign() -> dict[str, Any]:
    return {"name": "somebody-elses", "namespace": "rl", "resourceVersion": "5"}


def test_says_compares_what_was_wanted_only() -> None:
    assert says({"a": 1, "b": 2}, {"a": 1})
    assert not says({"b": 2}, {"a": 1})
    assert not says({"a": [1, 2]}, {"a": [1]})
    assert says({"a": [{"x": 1, "y": 2}]}, {"a": [{"x": 1}]})


def test_a_pod_that_follows_is_ours_by_its_name_too() -> None:
    store = PodStore()
    orphan = make_pod(uid="p-2", name="qwen-0-1-fghij")
    orphan["metadata"]["ownerReferences"] = []
    assert store.upsert(orphan) == KEY
    assert [pod.name for pod in store.doubtful(KEY)] == ["qwen-0-1-fghij"]
