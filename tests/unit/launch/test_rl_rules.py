"""The launcher brings about what vLLM-Ascend's rl_config does, on releases with it and without it, or refuses."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from devtools import check_rlconfig
from devtools.rl_rules import CASES, Case
from rollfleet_engine.launch.plan import Plan, Refused, plan
from rollfleet_protocol.launch_rules import RL_KEYS
from tests.unit.launch.conftest import PLACES, build_config, build_facts

# vLLM-Ascend overrides what a user says; the launcher refuses it, naming both.
OVERRIDDEN = {
    "enabled overrides weight_nz_mode 1",
    "enabled overrides weight_nz_mode 2",
    "enabled overrides VLLM_ASCEND_ENABLE_NZ",
    "batch invariance sets its variable",
}


def planned(case: Case, place: str) -> Plan | Refused:
    written = case.additional.get("rl_config")
    flags = {RL_KEYS[key]: value for key, value in written.items() if key in RL_KEYS} if _is_sound(written) else {}
    config = build_config(
        additionalConfig=dict(case.additional),
        rlConfig={"enabled": False} | flags,
        sleepMode=bool(flags.get("sleepModeExtraCleanup")),
    )
    return plan(config, build_facts(installation=PLACES[place], environ=dict(case.environ)))


def _is_sound(written: Any) -> bool:
    return isinstance(written, Mapping) and all(isinstance(value, bool) for value in written.values())


# A build without rl_config takes FA3 under batch invariance only, and the launcher says so (test_rl_config.py).
BEFORE = tuple(case for case in CASES if not case.flags.get("enable_training_consistency"))
WITHOUT = ("0.23 on NPUs", "0.27.1 on NPUs without rl_config")
PAIRS = [("0.27.1 on NPUs", case) for case in CASES] + [(place, case) for place in WITHOUT for case in BEFORE]


@pytest.mark.parametrize(("place", "case"), PAIRS, ids=lambda each: each if isinstance(each, str) else each.rule)
def test_the_launcher_does_what_rl_config_does(place: str, case: Case):
    found = planned(case, place)
    if case.error or case.rule in OVERRIDDEN:
        assert isinstance(found, Refused), found
        return
    assert isinstance(found, Plan), found
    environ = {name: value for name, value in case.environ.items() if name not in found.unset} | dict(found.env)
    for name, value in case.after.items():
        if name == "PYTORCH_NPU_ALLOC_CONF":
            assert environ.get(name) == (value or None)  # without an entry the launcher takes it away
        elif name != "VLLM_SERVER_DEV_MODE":  # the guard's control routes need it in every engine
            assert environ.get(name) == value
    additional = additional_of(found)
    if case.nz is not None:
        assert _nz(additional, environ) == case.nz
    flags = _flags(found, additional, environ)
    assert {key: flags[key] for key in case.flags} == case.flags


def additional_of(found: Plan) -> dict[str, Any]:
    option = "--additional-config"
    return json.loads(found.argv[found.argv.index(option) + 1]) if option in found.argv else {}


def _nz(additional: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    """In effect: what rl_config makes of it, else the setting, else the variable (AscendConfig._get_config_value)."""
    if additional.get("rl_config", {}).get("enabled"):
        return 0
    return int(additional.get("weight_nz_mode", environ.get("VLLM_ASCEND_ENABLE_NZ", "1")))


def _flags(found: Plan, additional: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, bool]:
    """Each key as vLLM-Ascend gets it: by rl_config, or by what a build without it reads instead."""
    if "rl_config" in additional:
        return dict.fromkeys(RL_KEYS, False) | additional["rl_config"]
    return {
        "enabled": additional.get("weight_nz_mode") == 0,
        "sleep_mode_extra_cleanup": bool(additional.get("enable_sleep_mode_extra_cleanup")),
        "enable_training_consistency": "FLASH_ATTN" in found.argv,
        "enable_batch_invariant": environ.get("VLLM_BATCH_INVARIANT") == "1",
    }


def _checkout(folder: Path, *, strict: bool = True, cleans: bool = True) -> Path:
    """Sources with the same names as vLLM-Ascend's, and less in them."""
    package = folder / "vllm_ascend"
    package.mkdir(parents=True)
    (package / "ascend_config.py").write_text(
        f"""
class AscendConfig:
    def __init__(self, vllm_config):
        if "enable_sleep_mode_extra_cleanup" in additional_config:
            raise ValueError("use rl_config.sleep_mode_extra_cleanup")

class RlConfig:
    _KEYS = ("enabled", "sleep_mode_extra_cleanup", "enable_training_consistency", "enable_batch_invariant")
    def __init__(self, config: dict[str, Any] | None = None):
        if not isinstance(config, dict):
            raise ValueError("must be a dict")
        if {strict} and set(config) - set(self._KEYS):
            raise ValueError(f"unknown {{sorted(config)}}")
        for key in self._KEYS:
            setattr(self, key, config.get(key, False))
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"{{key}} must be a bool")
    def apply(self, ascend_config):
        if not self.enabled:
            return
        ascend_config.weight_nz_mode = 0
        os.environ["VLLM_ASCEND_ENABLE_NZ"] = "0"
        os.environ["VLLM_SERVER_DEV_MODE"] = "1"
        from vllm_ascend.platform import _disable_expandable_segments
        _disable_expandable_segments()
        if self.enable_batch_invariant:
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
"""
    )
    (package / "platform.py").write_text(
        f"""
def _disable_expandable_segments() -> None:
    entries = [entry.strip() for entry in os.environ.get("PYTORCH_NPU_ALLOC_CONF", "").split(",")]
    if {cleans} and "PYTORCH_NPU_ALLOC_CONF" in os.environ:
        os.environ["PYTORCH_NPU_ALLOC_CONF"] = ",".join(e for e in entries if not e.startswith("expandable_segments:"))
"""
    )
    return folder


def test_a_checkout_that_does_the_same_holds(tmp_path: Path):
    assert check_rlconfig.main([str(_checkout(tmp_path))]) == 0


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"strict": False}, "DIFFERS unknown keys are refused"),
        ({"cleans": False}, "DIFFERS only expandable_segments leaves the allocator's settings"),
    ],
)
def test_a_checkout_that_does_otherwise_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, bool], rule: str
):
    assert check_rlconfig.main([str(_checkout(tmp_path, **changes))]) == 1
    assert rule in capsys.readouterr().out


def test_a_checkout_of_something_else_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert check_rlconfig.main([str(tmp_path)]) == 2
    assert "is this a checkout of vllm-ascend?" in capsys.readouterr().err
    folder = _checkout(tmp_path / "other")
    (folder / "vllm_ascend" / "platform.py").write_text("")
    assert check_rlconfig.main([str(folder)]) == 2
    assert "has no _disable_expandable_segments" in capsys.readouterr().err
    (folder / "vllm_ascend" / "ascend_config.py").write_text(
        "# of before: weight_nz_mode enable_sleep_mode_extra_cleanup"
    )
    assert check_rlconfig.main([str(folder)]) == 2
    assert "worker.py: No such file or directory: is this a checkout" in capsys.readouterr().err
