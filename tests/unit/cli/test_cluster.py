"""What a person is told when the way to the cluster, or the cluster, is not what it should be."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rollfleet_cli.cluster import TRIES, Access, Cluster, _checked
from rollfleet_cli.errors import ConflictError, NotFoundError, RejectedError, UnreachableError

KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {token: t}}]
contexts:
- {name: dev, context: {cluster: c, user: u}}
- {name: test, context: {cluster: c, user: u, namespace: rl}}
current-context: dev
"""


@pytest.mark.parametrize("text", ["root:x:0:0:root\n", "a: [1\n", "- 1\n"], ids=["words", "broken", "a list"])
def test_a_file_that_is_no_kubeconfig_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(UnreachableError, match=f"no way to a cluster: {file} is not a kubeconfig: ") as told:
        Cluster(Access(file))
    assert "--kubeconfig" in str(told.value)


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "config"
    with pytest.raises(UnreachableError, match=f"{missing}: no such file"):
        Cluster(Access(missing))
    monkeypatch.setenv("KUBECONFIG", f"{missing}:{missing}2")
    with pytest.raises(UnreachableError, match=f"{missing}:{missing}2: no such file"):
        Cluster(Access())


def test_a_context_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(KUBECONFIG)
    with pytest.raises(UnreachableError, match="no context 'prod' in the kubeconfig; there are: dev, test"):
        Cluster(Access(file, context="prod"))
    assert Cluster(Access(file, context="test")).namespace == "rl"
    assert Cluster(Access(file)).namespace == "default"


def test_an_api_server_that_is_away_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(KUBECONFIG)
    with pytest.raises(
        UnreachableError, match=r"API server at https://127.0.0.1:1: Failed to establish .*refused"
    ) as told:
        Cluster(Access(file)).fleets(None)
    assert "HTTPSConnection" not in str(told.value)


def test_a_cluster_without_our_kinds_is_not_taken_for_a_missing_fleet() -> None:
    with pytest.raises(UnreachableError, match=r"does not know rolloutengines .*: install the chart"):
        _checked(404, b"404 page not found\n", "rolloutengines")
    with pytest.raises(NotFoundError, match="no such fleet"):
        _checked(404, b'{"kind": "Status", "message": "no such fleet"}', "RolloutEngine rl/qwen")


def test_what_the_api_server_does_not_take_is_told_apart() -> None:
    for status, error in ((409, ConflictError), (422, RejectedError), (400, RejectedError), (500, UnreachableError)):
        with pytest.raises(error, match="in its own words"):
            _checked(status, b'{"kind": "Status", "message": "in its own words"}', "WeightVersion rl/qwen")


@contextmanager
def api_server(folder: Path, *statuses: int) -> Iterator[tuple[Access, list[str]]]:
    """Answers these statuses, then empty lists; the requests it got."""
    left, asked = list(statuses), list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status = left.pop(0) if left else 200
            body = json.dumps({"kind": "Status", "message": "storage is (re)initializing", "items": []}).encode()
            self.send_response(status)
            if status != 200:
                self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        config = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
            "current-context": "c",
        }
        file = folder / "config"
        file.write_text(json.dumps(config))
        try:
            yield Access(file), asked
        finally:
            server.shutdown()
            thread.join()


def test_an_api_server_that_asks_to_wait_is_asked_again(tmp_path: Path) -> None:
    with api_server(tmp_path, 429, 503) as (access, asked):
        assert Cluster(access).fleets("rl") == []
        assert len(asked) == 3


def test_it_is_not_asked_for_ever(tmp_path: Path) -> None:
    with api_server(tmp_path, *[429] * 100) as (access, asked):
        cluster = Cluster(access)
        with pytest.raises(UnreachableError, match=r"HTTP 429: storage is \(re\)initializing"):
            cluster.fleets("rl")
        assert len(asked) == TRIES
