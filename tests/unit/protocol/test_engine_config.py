"""What is wrong with an engine's configuration is said in one sentence that names the field."""

import pytest

from rollfleet_engine.simulator import __main__ as simulator
from rollfleet_protocol.engine_config import ENGINE_CONFIG_ENV, POD_UID_ENV, EngineConfigError, config_of
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
