"""The command line, and the log's lines."""

import json
import logging
import sys
from pathlib import Path

import pytest

from rollfleet_operator.runtime.logs import JsonFormatter
from rollfleet_operator.runtime.options import parse

GIVEN = ["--operator-namespace", "rollfleet", "--service-account", "operator", "--router-image", "router:1"]


def test_namespaces_or_all() -> None:
    assert parse([*GIVEN, "--all-namespaces"]).namespaces == ()
    assert parse([*GIVEN, "--namespace", "a", "--namespace", "b", "--namespace", "a"]).namespaces == ("a", "b")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], "one of the arguments --namespace --all-namespaces is required"),
        (["--namespace", "a", "--all-namespaces"], "not allowed with"),
        (["--all-namespaces", "--listen", "8080"], "expected HOST:PORT"),
        (["--all-namespaces", "--operator-namespace", ""], "--operator-namespace is missing"),
        (["--all-namespaces", "--resync-seconds", "0"], "at least 1"),
    ],
)
def test_what_is_wrong_is_named(wrong: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*GIVEN, *wrong])
    assert words in capsys.readouterr().err


def test_the_pods_environment_gives_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAMESPACE", "here")
    monkeypatch.setenv("SERVICE_ACCOUNT_NAME", "me")
    options = parse(["--all-namespaces", "--router-image", "r", "--listen", "[::]:9090", "--kubeconfig", "k"])
    assert (options.operator_namespace, options.service_account) == ("here", "me")
    assert (options.listen_host, options.listen_port, options.kubeconfig) == ("::", 9090, Path("k"))
    assert not options.allow_host_path


def test_a_log_line_is_one_json_object() -> None:
    record = logging.LogRecord("a", logging.INFO, "f", 1, "decision on %s", ("qwen",), None)
    record.fields = {"key": "rl/qwen", "actions": ["Open qwen-0-0-a"]}
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["key"], line["level"]) == ("decision on qwen", "rl/qwen", "info")
    assert line["actions"] == ["Open qwen-0-0-a"]


def test_a_trace_stays_on_its_line() -> None:
    try:
        int("a\nb")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "crashed", (), sys.exc_info())
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert "ValueError: invalid literal" in json.loads(text)["exception"]
