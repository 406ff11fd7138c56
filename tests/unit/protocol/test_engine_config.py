"""What is wrong with an engine's configuration is said in one sentence that names the field."""

import pytest

from rollfleet_engine.simulator import __main__ as simulator
from rollfleet_protocol.engine_config import (
    ENGINE_CONFIG_ENV,
    PLACE_ENV,
    POD_UID_ENV,
    EngineConfigError,
    NodesConfig,
    config_of,
)
from tests.support.guards import make_config

WRONG = {
    "absent": (None, "ROLLFLEET_ENGINE_CONFIG is not set"),
    "empty": ("", "ROLLFLEET_ENGINE_CONFIG is not set"),
    "no JSON": ("{", "ROLLFLEET_ENGINE_CONFIG: Invalid JSON"),
    "a field is missing": ("{}", "ROLLFLEET_ENGINE_CONFIG at fleet: Field required"),
    "a field of a field": ('{"fleet": {"namespace": "rl", "uid": "1"}}', "ROLLFLEET_ENGINE_CONFIG at fleet.name: "),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    value, words = WRONG[case]
    environ = {} if value is None else {ENGINE_CONFIG_ENV: value}
    with pytest.raises(EngineConfigError, match=words):
        config_of(environ)
    monkeypatch.delenv(ENGINE_CONFIG_ENV, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    options = ("--model", "base", "--served-model-name", "policy", "--host", "::", "--port", "1")
    monkeypatch.setattr("sys.argv", ["simulator", *options])
    assert simulator.main() == 1
    assert words in capsys.readouterr().err


def test_each_pod_has_an_audience_of_its_own() -> None:
    environ = {ENGINE_CONFIG_ENV: make_config().model_dump_json(by_alias=True)}
    assert config_of(environ).audience == "rollfleet.io/rl/qwen/fleet-uid"  # by hand, outside of a pod
    assert config_of({**environ, POD_UID_ENV: "p-1"}).audience == "rollfleet.io/rl/qwen/fleet-uid/p-1"


PLACE = '{"node": %d, "leader": "qwen-0-0-a", "leaderHost": "qwen-0-0.qwen-engines.rl.svc"}'


def test_a_pod_of_several_knows_which_one_it_is() -> None:
    several = make_config().model_copy(update={"nodes": NodesConfig(count=2)}).model_dump_json(by_alias=True)
    led = config_of({ENGINE_CONFIG_ENV: several, PLACE_ENV: PLACE % 1, POD_UID_ENV: "p-1"})
    assert (led.leads, led.node_count, led.pod_uid) == (False, 2, "p-1")
    assert config_of({ENGINE_CONFIG_ENV: several, PLACE_ENV: PLACE % 0}).leads
    alone = config_of({ENGINE_CONFIG_ENV: make_config().model_dump_json(by_alias=True)})
    assert (alone.leads, alone.node_count) == (True, 1)


@pytest.mark.parametrize(
    ("count", "place", "words"),
    [
        (2, None, "ROLLFLEET_PLACE is not set: an engine of several pods has both"),
        (None, PLACE % 0, "ROLLFLEET_ENGINE_CONFIG at nodes is not set"),
        (2, PLACE % 2, "ROLLFLEET_PLACE at node: 2 is no node of 2"),
        (2, "{}", "ROLLFLEET_PLACE at node: Field required"),
    ],
)
def test_a_place_that_does_not_fit_is_named(count: int | None, place: str | None, words: str) -> None:
    nodes = None if count is None else NodesConfig(count=count)
    config = make_config().model_copy(update={"nodes": nodes})
    environ = {ENGINE_CONFIG_ENV: config.model_dump_json(by_alias=True)} | ({PLACE_ENV: place} if place else {})
    with pytest.raises(EngineConfigError, match=words):
        config_of(environ)
