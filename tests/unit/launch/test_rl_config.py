"""rl_config: one spec, brought about on every vLLM-Ascend; contradictions name both fields (C13)."""

import dataclasses
import json

import pytest

from rollfleet_engine.launch.plan import Plan, Refused, plan
from tests.unit.launch.conftest import NEW_ASCEND, OLD_ASCEND, PLACES, on_npu

WITHOUT = ("0.23 on NPUs", "0.27.1 on NPUs without rl_config")
NPUS = [name for name in PLACES if "NPUs" in name]
npus = pytest.mark.parametrize("place", NPUS)
without = pytest.mark.parametrize("place", WITHOUT)
INVARIANT = {"rlConfig": {"enableBatchInvariant": True}}
ON_A2 = {"accelerator": {"resourceName": "huawei.com/Ascend910", "perPod": 2, "profile": "A2"}}
CONSISTENT = {"rlConfig": {"enableTrainingConsistency": True}}


def _plan(make_config, make_facts, place, config, **facts) -> Plan:
    found = plan(make_config(**config), make_facts(installation=PLACES[place], **facts))
    assert isinstance(found, Plan), found
    return found


def _causes(make_config, make_facts, installation, config, **facts) -> list[str]:
    found = plan(make_config(**config), make_facts(installation=installation, **facts))
    assert isinstance(found, Refused), found
    assert all(problem.remedy for problem in found.problems)
    return [problem.cause for problem in found.problems]


def _json(argv: tuple[str, ...], option: str) -> dict:
    return json.loads(argv[argv.index(option) + 1]) if option in argv else {}


def _additional(found: Plan) -> dict:
    return _json(found.argv, "--additional-config")


@npus
def test_enabled_switches_nz_off_and_the_control_routes_on(make_config, make_facts, place):
    found = _plan(make_config, make_facts, place, {})
    expected = {"weight_nz_mode": 0} if (place in WITHOUT) else {"rl_config": {"enabled": True}}
    assert _additional(found) == expected
    assert found.env["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert found.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_TARGET_DEVICE" not in found.env
    assert "PYTORCH_NPU_ALLOC_CONF" not in found.env


@npus
def test_only_expandable_segments_leaves_the_allocator_s_settings(make_config, make_facts, place):
    environ = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:512"}
    found = _plan(make_config, make_facts, place, {}, environ=environ)
    assert found.env["PYTORCH_NPU_ALLOC_CONF"] == "max_split_size_mb:512"
    off = _plan(make_config, make_facts, place, {"rlConfig": {"enabled": False}}, environ=environ)
    assert "PYTORCH_NPU_ALLOC_CONF" not in off.env


@npus
def test_optional_flags_without_enabled_are_ignored_with_a_warning(make_config, make_facts, place):
    flags = {
        "enabled": False,
        "sleepModeExtraCleanup": True,
        "enableTrainingConsistency": True,
        "enableBatchInvariant": True,
    }
    found = _plan(make_config, make_facts, place, {"rlConfig": flags})
    assert _additional(found) == {}
    assert "VLLM_BATCH_INVARIANT" not in found.env
    assert "VLLM_ASCEND_ENABLE_NZ" not in found.env
    (warning,) = (each for each in found.warnings if "without effect" in each)
    for name in ("sleepModeExtraCleanup", "enableTrainingConsistency", "enableBatchInvariant"):
        assert name in warning


@npus
def test_c13_batch_invariance_switches_off_what_it_does_not_go_with(make_config, make_facts, place):
    found = _plan(make_config, make_facts, place, INVARIANT)
    assert found.argv.count("--no-enable-chunked-prefill") == 1
    assert found.argv.count("--no-enable-prefix-caching") == 1
    assert found.argv[found.argv.index("--block-size") + 1] == "128"
    assert _json(found.argv, "--compilation-config") == {"cudagraph_mode": "PIECEWISE"}
    wanted = {"VLLM_BATCH_INVARIANT": "1", "HCCL_DETERMINISTIC": "strict", "LCCL_DETERMINISTIC": "1"}
    assert wanted.items() <= found.env.items()
    rl_config = _additional(found).get("rl_config")
    expected = None if (place in WITHOUT) else {"enabled": True, "enable_batch_invariant": True}
    assert rl_config == expected


@npus
@pytest.mark.parametrize(
    "arguments",
    [
        ["--enable-chunked-prefill"],
        ["--enable_prefix_caching"],
        ["--enable-chunked"],  # an unambiguous beginning
        ["--block-size", "64"],
        ["--block-size=256"],
        ["--block_size=16"],
    ],
)
def test_c13_arguments_that_undo_batch_invariance_are_refused_naming_both(make_config, make_facts, place, arguments):
    (cause,) = _causes(make_config, make_facts, PLACES[place], INVARIANT | {"engineArgs": arguments})
    assert arguments[0].split("=")[0].replace("_", "-")[:16] in cause.replace("_", "-")
    assert "spec.engine.args" in cause
    assert "spec.rlConfig.enableBatchInvariant" in cause


@npus
def test_c13_arguments_that_say_the_same_are_not_said_twice(make_config, make_facts, place):
    arguments = ["--block-size", "128", "--no-enable-prefix-caching"]
    found = _plan(make_config, make_facts, place, INVARIANT | {"engineArgs": arguments})
    for option in ("--block-size", "--no-enable-prefix-caching", "--no-enable-chunked-prefill"):
        assert found.argv.count(option) == 1


@npus
@pytest.mark.parametrize(
    ("given", "merged"),
    [
        ({"cudagraph_mode": "PIECEWISE", "mode": 3}, {"cudagraph_mode": "PIECEWISE", "mode": 3}),
        ({"cudagraph_mode": "NONE"}, {"cudagraph_mode": "NONE"}),
        ({"pass_config": {"fuse": True}}, {"cudagraph_mode": "PIECEWISE", "pass_config": {"fuse": True}}),
    ],
)
def test_graphs_are_merged_into_what_the_user_says(make_config, make_facts, place, given, merged):
    found = _plan(make_config, make_facts, place, INVARIANT | {"compilationConfig": given})
    assert _json(found.argv, "--compilation-config") == merged


@npus
@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", 2, None])
def test_graphs_that_hold_attention_are_refused(make_config, make_facts, place, mode):
    config = INVARIANT | {"compilationConfig": {"cudagraph_mode": mode}}
    (cause,) = _causes(make_config, make_facts, PLACES[place], config)
    assert "spec.engine.compilationConfig.cudagraph_mode" in cause
    assert "spec.rlConfig.enableBatchInvariant" in cause


@without
def test_training_consistency_takes_fa3(make_config, make_facts, place):
    found = _plan(make_config, make_facts, "0.27.1 on NPUs", CONSISTENT)
    assert _additional(found)["rl_config"] == {"enabled": True, "enable_training_consistency": True}
    assert _json(found.argv, "--compilation-config") == {"cudagraph_mode": "PIECEWISE"}
    both = {"rlConfig": {"enableTrainingConsistency": True, "enableBatchInvariant": True}}
    old = _plan(make_config, make_facts, place, both)
    assert old.argv[old.argv.index("--attention-backend") + 1] == "FLASH_ATTN"


@without
def test_training_consistency_alone_would_be_ignored_without_rl_config(make_config, make_facts, place):
    (cause,) = _causes(make_config, make_facts, PLACES[place], CONSISTENT)
    assert "spec.rlConfig.enableTrainingConsistency has no effect" in cause
    assert "spec.rlConfig.enableBatchInvariant" in cause


@pytest.mark.parametrize("plugin", [OLD_ASCEND, NEW_ASCEND])
def test_training_consistency_without_its_package_stops(make_config, make_facts, plugin):
    error = "ModuleNotFoundError: No module named 'flash_attn_npu_v3'"
    both = {"rlConfig": {"enableTrainingConsistency": True, "enableBatchInvariant": True}}
    (cause,) = _causes(make_config, make_facts, on_npu(plugin, "0.27.1", flash_attention_error=error), both)
    assert "flash_attn_with_kvcache" in cause
    assert "No module named" in cause


@pytest.mark.parametrize(
    ("changes", "config", "words"),
    [
        ({"device": "A5"}, INVARIANT, ["A2 and A3", "A5"]),
        ({"device": "_310P"}, INVARIANT, ["A2 and A3", "310P"]),
        ({"device": "A5"}, CONSISTENT, ["enableTrainingConsistency works on Atlas A2 and A3", "A5"]),
        ({"device": "A3"}, ON_A2, ["this image is built for A3", "spec.accelerator.profile is A2"]),
        ({"device": "_310P"}, ON_A2, ["this image is built for 310P"]),
        ({"custom_kernels": False}, INVARIANT, ["vllm_ascend_C", "enableBatchInvariant"]),
        ({"batch_invariant_kernels": False}, INVARIANT, ["batch_invariant_ops", "Triton"]),
        ({"custom_kernels": False}, {"sleepMode": True}, ["vllm_ascend_C", "spec.sleepMode"]),
    ],
)
def test_what_the_image_lacks_stops_the_launch(make_config, make_facts, changes, config, words):
    installation = on_npu(dataclasses.replace(NEW_ASCEND, **changes), "0.27.1")
    (cause,) = _causes(make_config, make_facts, installation, config)
    assert all(word in cause for word in words)


@npus
def test_a_variable_of_the_image_asks_for_batch_invariance_too(make_config, make_facts, place):
    """vLLM-Ascend keeps one that is set, whatever rl_config says."""
    found = _plan(make_config, make_facts, place, {}, environ={"VLLM_BATCH_INVARIANT": "1"})
    assert "--no-enable-prefix-caching" in found.argv
    assert any("VLLM_BATCH_INVARIANT" in warning for warning in found.warnings)
    assert _json(found.argv, "--compilation-config") == {"cudagraph_mode": "PIECEWISE"}


VARIABLE = {"VLLM_BATCH_INVARIANT": "1"}


@npus
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", None])
def test_a_variable_that_asks_for_batch_invariance_is_judged_as_the_flag(make_config, make_facts, place, mode):
    config = {"compilationConfig": {"cudagraph_mode": mode}}
    (cause,) = _causes(make_config, make_facts, PLACES[place], config, environ=VARIABLE)
    assert "spec.engine.compilationConfig.cudagraph_mode" in cause
    assert "VLLM_BATCH_INVARIANT=1 (spec.env or the image)" in cause
    assert "spec.rlConfig" not in cause
    none = _plan(make_config, make_facts, place, {"compilationConfig": {"cudagraph_mode": "NONE"}}, environ=VARIABLE)
    assert _json(none.argv, "--compilation-config") == {"cudagraph_mode": "NONE"}
    for arguments in (["--enable-prefix-caching"], ["--block-size=64"]):
        (cause,) = _causes(make_config, make_facts, PLACES[place], {"engineArgs": arguments}, environ=VARIABLE)
        assert "VLLM_BATCH_INVARIANT=1" in cause
        assert "spec.rlConfig" not in cause


@pytest.mark.parametrize(
    ("installation", "words"),
    [
        (PLACES["0.27.1 on CPUs"], ["VLLM_BATCH_INVARIANT=1", "CPU"]),
        (on_npu(dataclasses.replace(NEW_ASCEND, device="A5"), "0.27.1"), ["VLLM_BATCH_INVARIANT=1", "A5"]),
    ],
)
def test_the_remedy_for_a_variable_is_to_remove_it(make_config, make_facts, installation, words):
    found = plan(make_config(), make_facts(installation=installation, environ=VARIABLE))
    assert isinstance(found, Refused), found
    (problem,) = found.problems
    assert all(word in problem.cause for word in words)
    assert "remove VLLM_BATCH_INVARIANT=1" in problem.remedy
    assert "false" not in problem.remedy


@npus
@pytest.mark.parametrize("settings", ["expandable_segments:True", " expandable_segments:False ,"])
def test_settings_of_which_nothing_is_left_are_unset(make_config, make_facts, place, settings):
    found = _plan(make_config, make_facts, place, {}, environ={"PYTORCH_NPU_ALLOC_CONF": settings})
    assert found.unset == ("PYTORCH_NPU_ALLOC_CONF",)
    assert "PYTORCH_NPU_ALLOC_CONF" not in found.env
    assert json.loads(found.to_json())["unset"] == ["PYTORCH_NPU_ALLOC_CONF"]
    off = _plan(make_config, make_facts, place, {"rlConfig": {"enabled": False}}, environ=VARIABLE)
    assert off.unset == ()


@npus
@pytest.mark.parametrize(
    ("name", "value", "field", "config"),
    [
        ("VLLM_ASCEND_ENABLE_NZ", "1", "spec.rlConfig.enabled", {}),
        ("VLLM_ASCEND_ENABLE_NZ", "2", "spec.rlConfig.enabled", {}),
        ("HCCL_DETERMINISTIC", "false", "spec.rlConfig.enableBatchInvariant", INVARIANT),
        ("VLLM_WORKER_MULTIPROC_METHOD", "fork", "spec.sleepMode", {"sleepMode": True}),
    ],
)
def test_variables_that_contradict_a_field_name_both(make_config, make_facts, place, name, value, field, config):
    (cause,) = _causes(make_config, make_facts, PLACES[place], config, environ={name: value})
    assert name in cause
    assert field in cause


@npus
@pytest.mark.parametrize(
    ("additional", "words"),
    [
        ({"weight_nz_mode": 1}, ["additionalConfig.weight_nz_mode is 1", "spec.rlConfig.enabled"]),
        ({"weight_nz_mode": 2}, ["additionalConfig.weight_nz_mode is 2", "spec.rlConfig.enabled"]),
        ({"weight_nz_mode": False}, ["additionalConfig.weight_nz_mode is false"]),
        ({"enable_sleep_mode_extra_cleanup": True}, ["was removed", "spec.rlConfig.sleepModeExtraCleanup"]),
        ({"rl_config": {"refresh": True}}, ["rl_config.refresh", "sleep_mode_extra_cleanup"]),
        ({"rl_config": {"enabled": 1}}, ["rl_config.enabled is 1", "true or false"]),
        ({"rl_config": {"enabled": "yes"}}, ["rl_config.enabled", "yes"]),
        ({"rl_config": "on"}, ["rl_config", "object"]),
        ({"rl_config": {"enabled": False}}, ["rl_config.enabled is false", "spec.rlConfig.enabled is true"]),
        ({"rl_config": {"enable_batch_invariant": True}}, ["spec.rlConfig.enableBatchInvariant is false"]),
    ],
)
def test_vllm_ascend_s_own_settings_may_not_contradict_the_spec(make_config, make_facts, place, additional, words):
    (cause,) = _causes(make_config, make_facts, PLACES[place], {"additionalConfig": additional})
    assert all(word in cause for word in words)


@npus
def test_vllm_ascend_s_other_settings_are_merged(make_config, make_facts, place):
    additional = {"eplb_config": {"dynamic_eplb": True}, "rl_config": {"enabled": True}, "weight_nz_mode": 0}
    found = _additional(_plan(make_config, make_facts, place, {"additionalConfig": additional}))
    assert found["eplb_config"] == {"dynamic_eplb": True}
    assert found["weight_nz_mode"] == 0
    assert ("rl_config" in found) is not (place in WITHOUT)


@npus
def test_extra_cleanup_goes_with_sleep_mode(make_config, make_facts, place):
    config = {"rlConfig": {"sleepModeExtraCleanup": True}, "sleepMode": True}
    found = _plan(make_config, make_facts, place, config)
    assert "--enable-sleep-mode" in found.argv
    assert found.env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    additional = _additional(found)
    told = additional if (place in WITHOUT) else additional["rl_config"]
    assert told["enable_sleep_mode_extra_cleanup" if (place in WITHOUT) else "sleep_mode_extra_cleanup"] is True
    (cause,) = _causes(make_config, make_facts, PLACES[place], config | {"sleepMode": False})
    assert "sleepModeExtraCleanup" in cause
    assert "spec.sleepMode" in cause


@pytest.mark.parametrize("flag", ["sleepModeExtraCleanup", "enableTrainingConsistency", "enableBatchInvariant"])
def test_on_cpus_what_only_npus_have_is_refused(make_config, make_facts, flag):
    config = {"rlConfig": {flag: True}, "sleepMode": True}
    (cause,) = _causes(make_config, make_facts, PLACES["0.27.1 on CPUs"], config)
    assert f"spec.rlConfig.{flag}" in cause
    assert "CPU" in cause


def test_on_cpus_rl_mode_changes_nothing(make_config, make_facts):
    found = _plan(make_config, make_facts, "0.27.1 on CPUs", {})
    assert _additional(found) == {}
    assert found.env["VLLM_TARGET_DEVICE"] == "cpu"
    asleep = _plan(make_config, make_facts, "0.27.1 on CPUs", {"sleepMode": True})
    assert "--enable-sleep-mode" not in asleep.argv
    given = _plan(make_config, make_facts, "0.27.1 on CPUs", {"additionalConfig": {"a": {"b": 1}}})
    assert _additional(given) == {"a": {"b": 1}}
