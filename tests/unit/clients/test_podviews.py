"""What decisions see of a pod."""

from rollfleet_operator.api.meta import NO_ORDINAL
from rollfleet_operator.clients.podviews import pod_view
from rollfleet_operator.core.observed import ContainerState
from tests.support.pods import make_pod


def test_a_running_engine() -> None:
    view = pod_view(make_pod(labels={"rollfleet.io/serving": "true", "rollfleet.io/engine": "3"}))
    assert (view.ordinal, view.serving_label, view.template_hash, view.ip) == (3, True, "t-1", "198.18.64.7")
    assert (view.ready, view.container, view.restarts, view.exit_code) == (True, ContainerState.RUNNING, 0, None)
    assert view.message == ""


def test_ids_that_differ_in_each_try_are_no_news() -> None:
    views = []
    for digit in "ab":
        text = f'failed to generate container "{digit * 64}" spec: no command specified'
        waiting = {"waiting": {"reason": "CreateContainerError", "message": text}}
        views.append(pod_view(make_pod(container={"state": waiting})))
    assert views[0] == views[1]
    assert views[0].message == 'CreateContainerError: failed to generate container "…" spec: no command specified'


def test_times_of_the_kubelet() -> None:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-29T12:02:00Z"}
    last = {"terminated": {"exitCode": 1, "startedAt": "2026-11-29T12:00:30Z", "finishedAt": "2026-11-29T12:00:40Z"}}
    running = {"state": {"running": {"startedAt": "2026-11-29T12:01:00Z"}}, "lastState": last}
    pod = make_pod(container=running, conditions=[ready])
    pod["spec"]["terminationGracePeriodSeconds"] = 90
    pod["metadata"]["deletionTimestamp"] = "2026-11-29T12:03:00Z"
    pod["metadata"]["annotations"]["rollfleet.io/stopped"] = "CannotStart: no model"
    view = pod_view(pod)
    times = (view.failed_from, view.running_since, view.ready_since, view.deleted_by)
    assert [f"{time:%M:%S}" for time in times if time] == ["00:30", "01:00", "02:00", "03:00"]
    assert (view.grace_s, view.stopped) == (90, "CannotStart: no model")
    not_ready = pod_view(make_pod(conditions=[ready | {"status": "False"}]))
    assert (not_ready.ready_since, not_ready.failed_from) == (None, None)


def test_a_pod_just_made() -> None:
    pod = make_pod()
    pod["status"] = {}
    view = pod_view(pod)
    assert (view.phase, view.ip, view.ready, view.container) == ("Unknown", "", False, ContainerState.UNKNOWN)


def test_the_schedulers_words() -> None:
    scheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/1 nodes are available",
    }
    view = pod_view(make_pod(phase="Pending", podIP="", conditions=[scheduled], containerStatuses=[]))
    assert view.unschedulable
    assert view.message == "0/1 nodes are available", "status says Unschedulable once"
    gated = scheduled | {"reason": "SchedulingGated", "message": "waits for a quota"}
    assert pod_view(make_pod(phase="Pending", conditions=[gated])).message == "SchedulingGated: waits for a quota"


def test_a_restarted_engine_keeps_its_last_words() -> None:
    last = {"terminated": {"exitCode": 78, "reason": "Error", "message": "no such model"}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    view = pod_view(make_pod(container={"state": waiting, "lastState": last, "restartCount": 4}))
    assert (view.container, view.restarts, view.exit_code) == (ContainerState.WAITING, 4, 78)
    assert view.started
    assert not pod_view(make_pod(container={"started": False})).started
    assert "CrashLoopBackOff" in view.message
    running = pod_view(make_pod(container={"lastState": last, "restartCount": 1}))
    assert (running.container, running.message) == (ContainerState.RUNNING, "Error: no such model")


def test_a_terminated_engine_and_a_pod_that_goes() -> None:
    ended = {"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    pod = make_pod(container=ended)
    pod["metadata"]["deletionTimestamp"] = "2026-11-29T12:01:00Z"
    view = pod_view(pod)
    assert (view.container, view.exit_code, view.deleting) == (ContainerState.TERMINATED, 0, True)


def test_other_containers_and_tampered_labels() -> None:
    sidecar = {"name": "istio-proxy", "state": {"running": {}}}
    view = pod_view(make_pod(labels={"rollfleet.io/engine": "x"}, containerStatuses=[sidecar]))
    assert (view.ordinal, view.container) == (NO_ORDINAL, ContainerState.UNKNOWN)


def test_an_ordinal_that_no_status_could_hold_is_a_label_tampered_with() -> None:
    assert pod_view(make_pod(labels={"rollfleet.io/engine": "9" * 20})).ordinal == NO_ORDINAL


def test_the_launchers_message_is_told_in_words_beside_what_the_kubelet_waits_for() -> None:
    message = '{"exitCode":1,"error":"ValueError: no memory","logTail":["..."]}'
    last = {"terminated": {"exitCode": 1, "reason": "Error", "message": message}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    view = pod_view(make_pod(container={"state": waiting, "lastState": last, "restartCount": 2}))
    assert view.message == "CrashLoopBackOff: back-off 10s; Error: ValueError: no memory"


def test_a_pod_that_follows_is_known_by_its_name_whatever_its_labels_say() -> None:
    led_by = {"rollfleet.io/leader": "qwen-3-0-abcde"}
    view = pod_view(make_pod(name="qwen-3-2-fghij", annotations=led_by))
    assert (view.node_index, view.leads, view.leader) == (2, False, "qwen-3-0-abcde")
    assert pod_view(make_pod(name="qwen-3-0-abcde", labels={"rollfleet.io/node": "2"})).leads
    assert pod_view(make_pod(name="a-1-1-b-3-0-abcde")).leads, "a fleet may be called so"
