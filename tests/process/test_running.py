"""The supervisor over real processes, and the reading of the machine."""

import json
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from devcluster import cli, machine, status, supervisor
from devcluster.components import Component
from devcluster.errors import CommandFailedError, NotReadyError
from devcluster.paths import Paths
from devcluster.shell import run, tail_of, wait_until

TIMEOUT_S = 15.0


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    made = Paths(home=tmp_path / "home", cache=tmp_path / "cache")
    made.logs.mkdir(parents=True)
    return made


class Watched:
    """A supervisor that is driven pass by pass, and its record."""

    def __init__(self, paths: Paths, *components: Component) -> None:
        self.paths = paths
        self.supervisor = supervisor.Supervisor(paths, components)
        self._trust = ssl.create_default_context()

    def seen(self, name: str) -> dict[str, object]:
        record = json.loads(self.paths.status.read_text())
        return next(value for value in record["components"] if value["name"] == name)

    def until(self, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            self.supervisor.look(self._trust)
            return condition()

        wait_until(look, "the condition of the test", TIMEOUT_S, self.paths.status.read_text)


@pytest.fixture
def watch(paths: Paths) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(*components: Component) -> Watched:
        made.append(Watched(paths, *components))
        return made[-1]

    yield make
    for watched in made:
        watched.supervisor.stop()


def test_a_component_starts_when_those_before_it_answer(watch: Callable[..., Watched], paths: Paths) -> None:
    address = paths.home / "s"
    server = socket.socket(socket.AF_UNIX)
    watched = watch(
        Component("first", ("sleep", "60"), ready=f"unix:{address}"),
        Component("second", ("sleep", "60"), after=("first",)),
    )
    watched.until(lambda: watched.seen("first")["pid"] is not None)
    assert watched.seen("second")["pid"] is None
    with server:
        server.bind(str(address))
        server.listen()
        watched.until(lambda: watched.seen("second")["ready_after_s"] is not None)


def test_a_death_is_recorded_and_not_hidden_by_a_restart(watch: Callable[..., Watched]) -> None:
    watched = watch(Component("short", ("sh", "-c", "echo the cause; exit 3")))
    watched.until(lambda: bool(watched.seen("short")["exits"]))
    (end,) = watched.seen("short")["exits"]  # type: ignore[misc]
    assert end.endswith(" exit 3")
    assert watched.seen("short")["restarts"] == 0
    assert tail_of(watched.paths.logs / "short.log") == "the cause"


def test_a_component_that_may_be_restarted_is(watch: Callable[..., Watched]) -> None:
    watched = watch(Component("plugin", ("sleep", "60"), restart=True))
    watched.until(lambda: watched.seen("plugin")["ready_after_s"] is not None)
    first = watched.seen("plugin")["pid"]
    assert isinstance(first, int)
    os.kill(first, signal.SIGKILL)
    watched.until(lambda: watched.seen("plugin")["pid"] not in (None, first))
    assert watched.seen("plugin")["restarts"] == 1
    (end,) = watched.seen("plugin")["exits"]  # type: ignore[misc]
    assert end.endswith(" signal SIGKILL")


def test_a_program_that_is_not_there_is_a_recorded_end(watch: Callable[..., Watched]) -> None:
    watched = watch(Component("absent", ("/no/such/program",)))
    watched.until(lambda: bool(watched.seen("absent")["exits"]))
    assert "cannot start" in watched.seen("absent")["exits"][0]  # type: ignore[index]


def test_what_a_supervisor_starts_is_found_by_its_mark(watch: Callable[..., Watched], paths: Paths) -> None:
    watched = watch(Component("marked", ("sleep", "60")))
    watched.until(lambda: watched.seen("marked")["pid"] is not None)
    assert machine.marked_pids(paths.home) == [watched.seen("marked")["pid"]]
    assert machine.marked_pids(paths.home / "other") == []
    machine.kill_all(lambda: [p for p in machine.marked_pids(paths.home) if watched.seen("marked")["pid"]], "sleepers")
    assert machine.marked_pids(paths.home) == []


def test_a_log_that_grew_too_long_is_cut(watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOG_LIMIT_BYTES", 1000)
    watched = watch(Component("wordy", ("sleep", "60")))
    log = watched.paths.logs / "wordy.log"
    log.write_text("x" * 2000)
    watched.until(lambda: watched.seen("wordy")["pid"] is not None)
    assert log.stat().st_size == 0
    assert log.with_suffix(".log.1").stat().st_size == 2000


def test_nobody_answering_is_not_ready(paths: Paths) -> None:
    assert not supervisor.probe(f"unix:{paths.home}/none", None)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert not supervisor.probe(f"http://127.0.0.1:{port}/", None)


@pytest.mark.parametrize(("answer", "ready"), [(b"200 OK", True), (b"500 Internal", False)])
def test_a_probe_believes_only_200(answer: bytes, ready: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 " + answer + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        assert supervisor.probe(f"http://127.0.0.1:{server.getsockname()[1]}/", None) is ready
        thread.join(TIMEOUT_S)


def test_the_clusters_traffic_never_leaves_by_a_proxy(paths: Paths) -> None:
    own = {"no_proxy": "intra.example", "PYTHONPATH": "/x", "HTTPS_PROXY": "http://proxy.example", "PATH": "/bin"}
    child = supervisor.child_environment(own, paths)
    assert child["NO_PROXY"].startswith("intra.example,")
    assert "198.18.0.0/15" in child["NO_PROXY"]
    assert child["HTTPS_PROXY"] == "http://proxy.example"
    assert child[supervisor.MARK] == str(paths.home)
    assert "PYTHONPATH" not in child


def test_env_puts_the_clusters_programs_first_and_once(paths: Paths) -> None:
    first = cli.environment_lines(paths, {"PATH": "/usr/bin:/bin"})
    folder = status.binaries_folder(paths)
    assert f"export PATH={folder}:/usr/bin:/bin" in first
    assert f"export PATH={folder}:/bin" in cli.environment_lines(paths, {"PATH": f"{folder}:/bin"})
    assert not any("NO_PROXY" in line for line in first)
    assert any("NO_PROXY" in line for line in cli.environment_lines(paths, {"https_proxy": "http://proxy.example"}))


def test_mounts_are_read_with_their_escapes_and_optional_fields() -> None:
    text = (
        "22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n"
        "43 27 0:40 / /home/a\\040b rw,relatime shared:1 master:2 - overlay overlay rw\n"
        "44 27 0:41 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    )
    expected = [("/", "ext4"), ("/home/a b", "overlay"), ("/sys/fs/cgroup/cpu", "cgroup")]
    assert machine.mount_points(text) == expected


def test_a_node_without_conditions_is_not_ready() -> None:
    node = {"metadata": {"name": "n"}, "status": {"nodeInfo": {"kubeletVersion": "v1"}, "conditions": []}}
    assert status.node_summary(node) == {"name": "n", "ready": False, "version": "v1", "npus": 0}
    assert status.node_summary(None) == {"ready": False}


def test_a_cluster_that_never_was_has_no_components(paths: Paths) -> None:
    assert status.read_components(paths) == (None, ())


def test_a_pid_that_is_somebody_elses_now_counts_as_none(paths: Paths) -> None:
    seen = {"name": "etcd", "pid": os.getpid(), "ready_after_s": 0.1, "restarts": 0, "exits": []}
    paths.status.write_text(json.dumps({"supervisor": os.getpid(), "components": [seen]}))
    running, (etcd,) = status.read_components(paths)
    assert running is None
    assert etcd.pid is None
    assert not etcd.is_well


def test_a_failed_command_is_told_in_its_own_words() -> None:
    with pytest.raises(CommandFailedError, match=r"exit 4 from sh -c .*\nno such thing"):
        run(["sh", "-c", "echo no such thing >&2; exit 4"], timeout_s=10)
    with pytest.raises(CommandFailedError, match="no end after 0 s: sleep 60"):
        run(["sleep", "60"], timeout_s=0.05)
    with pytest.raises(CommandFailedError, match="cannot run /no/such"):
        run(["/no/such"], timeout_s=1)


def test_a_wait_ends_at_its_deadline_and_says_why() -> None:
    start = time.monotonic()
    with pytest.raises(NotReadyError, match="not after 0 s: the moon\n  it is day"):
        wait_until(lambda: False, "the moon", 0.1, lambda: "it is day")
    assert time.monotonic() - start < 5
