"""A real cluster, up and down: what a pod can count on, and that nothing is left of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from devcluster.network import AddressPlan
from devcluster.paths import from_environment
from tests.devcluster.host import State, added, look

ROOT = Path(__file__).resolve().parents[2]
NPU = "huawei.com/Ascend910"
DEADLINE_S = 90.0
HOME = from_environment(os.environ).home


def devcluster(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "devcluster", *arguments]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=280, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until the condition gives something; the last answer is in the failure."""
    deadline = time.monotonic() + DEADLINE_S
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not after {DEADLINE_S} s: {what}"
        time.sleep(0.2)
    return answer


class Cluster:
    """kubectl with the environment that `devcluster env` prints."""

    def __init__(self) -> None:
        lines = devcluster("env").stdout.splitlines()
        self.environment = {**os.environ, **dict(line.removeprefix("export ").split("=", 1) for line in lines)}
        self.base = self.environment["DEVCLUSTER_BASE_IMAGE"]

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        done = subprocess.run(
            ["kubectl", *arguments],
            env=self.environment,
            input=stdin,
            text=True,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout + ("" if check else done.stderr)

    def apply(self, *objects: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))

    def get(self, *arguments: str) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return parsed

    def pod(self, name: str, *, npus: int = 0, command: str = "exec sleep 600", **spec: Any) -> dict[str, Any]:
        limits = {"limits": {NPU: str(npus)}} if npus else {}
        container = {"name": "c", "image": self.base, "imagePullPolicy": "Never", "command": ["sh", "-c", command]}
        containers = [{**container, "resources": limits, **spec.pop("container", {})}]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {"containers": containers, "terminationGracePeriodSeconds": 0, **spec},
        }

    def phase(self, name: str) -> str:
        phase: str = self.get("pod", name)["status"].get("phase", "")
        return phase

    def running(self, *names: str) -> None:
        for name in names:
            until(
                lambda name=name: self.phase(name) == "Running", f"{name} runs: {self.kubectl('describe', 'pod', name)}"
            )

    def python(self, pod: str, code: str) -> str:
        return self.kubectl("exec", pod, "--", "python3", "-c", textwrap.dedent(code))

    def delete(self, *names: str) -> None:
        self.kubectl("delete", "pod", *names, "--now", "--wait", "--timeout=50s")


@pytest.fixture(scope="module")
def before() -> State:
    """The machine without a cluster."""
    devcluster("down")
    return look(HOME)


@pytest.fixture(scope="module")
def cluster(before: State) -> Iterator[Cluster]:
    devcluster("up")
    yield Cluster()
    devcluster("down")


def test_the_cluster_is_up_and_says_so(cluster: Cluster) -> None:
    status = json.loads(devcluster("status", "-o", "json").stdout)
    assert status["state"] == "Up"
    assert status["node"] == {"name": "node-0", "ready": True, "version": "v1.36.3", "npus": 16}
    assert all(component["pid"] for component in status["components"])
    assert json.loads(cluster.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"] == "v1.36.3"


def test_a_second_up_changes_nothing(cluster: Cluster) -> None:
    uid = cluster.get("namespace", "default")["metadata"]["uid"]
    assert "already up" in devcluster("up").stderr
    assert cluster.get("namespace", "default")["metadata"]["uid"] == uid


def test_npus_are_given_out_and_run_out(cluster: Cluster) -> None:
    cluster.apply(*(cluster.pod(f"npu-{i}", npus=8) for i in range(3)))
    until(lambda: sum(cluster.phase(f"npu-{i}") == "Running" for i in range(3)) == 2, "two of three pods run")
    names = {f"npu-{i}": cluster.phase(f"npu-{i}") for i in range(3)}
    (waiting,) = [name for name, phase in names.items() if phase == "Pending"]
    lucky = [name for name in names if name != waiting]

    def refused() -> str:
        conditions = cluster.get("pod", waiting)["status"].get("conditions", [])
        return next((c["message"] for c in conditions if c.get("reason") == "Unschedulable"), "")

    assert f"Insufficient {NPU}" in until(refused, "the scheduler's reason")
    visible = [
        cluster.kubectl("exec", name, "--", "sh", "-c", "echo $ASCEND_VISIBLE_DEVICES").strip() for name in lucky
    ]
    ids = [int(word) for line in visible for word in line.split(",")]
    assert sorted(ids) == list(range(16))
    cluster.delete(lucky[0])
    cluster.running(waiting)
    cluster.delete(waiting, lucky[1])


def test_more_npus_than_the_node_has_are_never_given(cluster: Cluster) -> None:
    cluster.apply(cluster.pod("greedy", npus=17))
    until(lambda: "Insufficient" in json.dumps(cluster.get("pod", "greedy")["status"]), "the scheduler's reason")
    cluster.delete("greedy")


def test_names_resolve_in_a_pod_even_of_pods_that_are_not_ready(cluster: Cluster) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "peers"},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "member"}},
    }
    probe = {"readinessProbe": {"exec": {"command": ["false"]}}}
    member = cluster.pod("member", hostname="first", subdomain="peers", container=probe)
    cluster.apply(service, member, cluster.pod("asker"))
    cluster.running("member", "asker")
    address = cluster.get("pod", "member")["status"]["podIP"]
    ask = "import socket; print(socket.getaddrinfo('{}', 1, socket.AF_INET)[0][4][0])"
    assert cluster.python("asker", ask.format("kubernetes.default.svc")).strip() == "198.19.0.1"
    for name in ("first.peers", "first.peers.default.svc.cluster.local", "peers"):
        command = ("exec", "asker", "--", "python3", "-c", ask.format(name))
        until(lambda command=command: cluster.kubectl(*command, check=False).strip() == address, f"{name} is {address}")
    cluster.delete("member", "asker")


def test_a_service_reaches_its_pod_from_elsewhere_and_from_itself(cluster: Cluster) -> None:
    ports = [{"port": 80, "targetPort": 8080}]
    metadata = {"name": "web"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"selector": {"app": "server"}, "ports": ports},
    }
    server = cluster.pod("server", command="exec python3 -m http.server 8080")
    cluster.apply(service, server, cluster.pod("client"))
    cluster.running("server", "client")
    fetch = "import urllib.request; print(urllib.request.urlopen('http://web', timeout=5).status)"
    for pod in ("client", "server"):
        until(
            lambda pod=pod: cluster.kubectl("exec", pod, "--", "python3", "-c", fetch, check=False).strip() == "200",
            f"the service answers {pod}",
        )
    cluster.delete("server", "client")


def test_a_pod_trusts_the_api_server_and_gets_no_more_than_its_rights(cluster: Cluster) -> None:
    cluster.apply(cluster.pod("guest"))
    cluster.running("guest")
    answers = cluster.python(
        "guest",
        """
        import ssl, urllib.error, urllib.request
        folder = "/var/run/secrets/kubernetes.io/serviceaccount"
        token = open(f"{folder}/token").read()
        trust = ssl.create_default_context(cafile=f"{folder}/ca.crt")
        def ask(url, headers, context):
            try:
                request = urllib.request.Request(url, headers=headers)
                return urllib.request.urlopen(request, context=context, timeout=10).status
            except urllib.error.HTTPError as error:
                return error.code
        mine = {"Authorization": f"Bearer {token}"}
        blind = ssl._create_unverified_context()
        print(ask("https://kubernetes.default.svc/openid/v1/jwks", mine, trust))
        print(ask("https://kubernetes.default.svc/api/v1/namespaces/default/secrets", mine, trust))
        print(ask("https://198.18.0.1:10250/pods", {}, blind))
        print(ask("https://198.18.0.1:10250/pods", mine, blind))
        """,
    )
    assert answers.split() == ["200", "403", "401", "403"]
    cluster.delete("guest")


def test_logs_are_read_and_a_container_that_ends_is_started_again(cluster: Cluster) -> None:
    cluster.apply(cluster.pod("mortal", command="echo hello from a pod; sleep 1; exit 7"))

    def restarted() -> bool:
        statuses = cluster.get("pod", "mortal")["status"].get("containerStatuses", [])
        return any(
            s["restartCount"] >= 1 and s["lastState"].get("terminated", {}).get("exitCode") == 7 for s in statuses
        )

    until(restarted, "a restart after exit 7")
    assert "hello from a pod" in cluster.kubectl("logs", "mortal", "--previous")
    cluster.delete("mortal")


def test_a_killed_device_plugin_comes_back_and_serves(cluster: Cluster) -> None:
    def plugin() -> dict[str, Any]:
        components = json.loads(devcluster("status", "-o", "json", check=False).stdout)["components"]
        return next(c for c in components if c["name"] == "device-plugin")

    first = plugin()
    os.kill(first["pid"], signal.SIGKILL)
    back = until(lambda: (p := plugin())["pid"] not in (None, first["pid"]) and p, "the device plugin is back")
    assert back["restarts"] == first["restarts"] + 1
    assert back["exits"][-1].endswith("SIGKILL")
    until(lambda: cluster.get("node", "node-0")["status"]["allocatable"][NPU] == "16", "16 NPUs again")
    after = cluster.pod("after", npus=16)
    cluster.apply(after)

    def runs() -> bool:  # the node may have told of the devices that it had, and its kubelet has none to give yet
        if cluster.phase("after") == "Failed":
            cluster.delete("after")
            cluster.apply(after)
        return cluster.phase("after") == "Running"

    until(runs, "a pod with all NPUs runs")
    cluster.delete("after")


def test_an_image_is_built_loaded_and_not_built_twice(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        "ARG BASE\nFROM ${BASE}\nARG WORD\nRUN cat /given/word > /word && echo ${WORD} >> /word\nCOPY more /more\n"
    )
    (tmp_path / "more").write_text("copied\n")
    given = tmp_path / "given"
    given.mkdir()
    (given / "word").write_text("mounted\n")
    build = [
        "image",
        "--file",
        str(tmp_path / "Dockerfile"),
        "--tag",
        "devcluster-test:1",
        "--volume",
        f"{given}:/given:ro",
    ]
    build += ["--build-arg", f"BASE={cluster.base}", "--build-arg", "WORD=argued"]
    assert "loading" in devcluster(*build).stderr
    assert "loading" not in devcluster(*build).stderr
    image = {"image": "devcluster-test:1"}
    show = "cat /word /more; test ! -s /etc/pip.conf && ls /given | wc -l"
    cluster.apply(cluster.pod("shown", command=show, restartPolicy="Never", container=image))
    until(lambda: cluster.phase("shown") == "Succeeded", "the image's pod ends")
    assert cluster.kubectl("logs", "shown").split() == ["mounted", "argued", "copied", "0"]
    cluster.delete("shown")
    assert "docker.io/library/devcluster-test:1" in devcluster("images").stdout


def test_a_dead_component_is_reported_and_up_makes_it_well(cluster: Cluster) -> None:
    components = json.loads(devcluster("status", "-o", "json").stdout)["components"]
    os.kill(next(c["pid"] for c in components if c["name"] == "kube-scheduler"), signal.SIGKILL)

    def seen() -> Any:
        status = json.loads(devcluster("status", "-o", "json", check=False).stdout)
        scheduler = next(c for c in status["components"] if c["name"] == "kube-scheduler")
        return scheduler["exits"] and (status["state"], scheduler["pid"])

    assert until(seen, "the death is recorded") == ("Degraded", None)
    devcluster("up")
    assert json.loads(devcluster("status", "-o", "json").stdout)["state"] == "Up"


def with_pods(cluster: Cluster) -> None:
    shared = [{"name": "m", "emptyDir": {"medium": "Memory"}}, {"name": "h", "hostPath": {"path": "/usr"}}]
    mounts = [{"name": "m", "mountPath": "/dev/shm"}, {"name": "h", "mountPath": "/host", "subPath": "share"}]
    pods = [cluster.pod(f"left-{i}", npus=2, volumes=shared, container={"volumeMounts": mounts}) for i in range(3)]
    until(lambda: cluster.kubectl("get", "serviceaccount", "default", check=False), "the namespace is ready")
    cluster.apply(*pods)
    cluster.running("left-0", "left-1", "left-2")


def test_down_leaves_nothing(cluster: Cluster, before: State) -> None:
    with_pods(cluster)
    assert added(before, look(HOME)).keys() >= {
        "processes",
        "mounts",
        "interfaces",
        "tables",
        "cgroups",
        "files",
        "sysctls",
    }
    devcluster("down")
    assert added(before, look(HOME)) == {}
    assert devcluster("status", check=False).stdout.startswith("Down")
    devcluster("down")
    assert Path("/usr/share").is_dir()


def test_down_leaves_nothing_after_everything_was_killed(before: State) -> None:
    devcluster("up")
    with_pods(Cluster())
    for line in added(before, look(HOME))["processes"]:
        pid, name = line.split()
        if name != "pause":  # pods live on when their runtime dies: the hardest case
            os.kill(int(pid), signal.SIGKILL)

    def only_pods() -> bool:
        return all(line.endswith(" pause") for line in added(before, look(HOME)).get("processes", ()))

    until(only_pods, "all but the pods are dead")
    assert devcluster("status", check=False).stdout.startswith("Degraded")
    devcluster("down")
    assert added(before, look(HOME)) == {}


@pytest.mark.parametrize("reached", ["containerd", "kube-apiserver"])
def test_down_leaves_nothing_of_a_half_finished_up(before: State, reached: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "devcluster", "up"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as up:
        assert up.stderr is not None
        for line in up.stderr:
            if line.startswith(f"  {reached}: ready"):
                break
        up.kill()
    assert "processes" in added(before, look(HOME))
    devcluster("down")
    assert added(before, look(HOME)) == {}


def test_up_after_a_crash_starts_afresh(before: State) -> None:
    devcluster("up")
    for line in added(before, look(HOME))["processes"]:
        os.kill(int(line.split()[0]), signal.SIGKILL)
    devcluster("up")
    assert json.loads(devcluster("status", "-o", "json").stdout)["state"] == "Up"
    devcluster("down")
    assert added(before, look(HOME)) == {}


def test_up_says_why_a_component_did_not_start(before: State) -> None:
    with socket.create_server(("127.0.0.1", AddressPlan().etcd_port)):
        failed = devcluster("up", check=False)
    assert failed.returncode == 1
    assert "etcd ended: " in failed.stderr
    assert "address already in use" in failed.stderr
    devcluster("down")
    assert added(before, look(HOME)) == {}


def test_another_homes_cluster_is_not_touched(before: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devcluster("up")
    with monkeypatch.context() as other:
        other.setenv("DEVCLUSTER_HOME", str(tmp_path))
        for command in ("up", "down"):
            refused = devcluster(command, check=False)
            assert refused.returncode == 1
            assert "is on this machine" in refused.stderr
    assert json.loads(devcluster("status", "-o", "json").stdout)["state"] == "Up"
    devcluster("down")
