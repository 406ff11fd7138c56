"""spec.env: what every release's launcher refuses the operator refuses before there is a pod, and nothing else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfleet_engine.launch.plan import Plan, Refused, plan
from rollfleet_protocol.launch_variables import (
    DETERMINISTIC_VARIABLES,
    NZ_OFF,
    PYTHON_VARIABLES,
    RESERVED_VARIABLES,
    RUNNER_V2,
    SPAWN,
    VLLM_VARIABLES,
    variable_faults,
)
from tests.unit.launch.conftest import PLACES, build_config, build_facts

NPUS = [installation for place, installation in PLACES.items() if "NPUs" in place]
ON_NPUS = {"accelerator": {"resourceName": "huawei.com/Ascend910", "perPod": 8}}
INVARIANT = {"rlConfig": {"enableBatchInvariant": True}}
TRACES = {"features": {"tokenEndpoint": "Enabled", "traceReplay": True}}


def _said(config: dict[str, Any], environ: dict[str, str]) -> list[str]:
    return [f"{fault.field} {fault.text}" for fault in variable_faults(build_config(**ON_NPUS | config), environ)]


@pytest.mark.parametrize(
    ("config", "environ", "words"),
    [
        ({}, {"VLLM_DP_SIZE": "2"}, "spec.env[VLLM_DP_SIZE] may not be set: the number of data-parallel ranks"),
        ({}, {"VLLM_LOGGING_LEVEL": "critical"}, "spec.env[VLLM_LOGGING_LEVEL] may not be set"),
        ({}, {"HF_HUB_OFFLINE": "0"}, "spec.env[HF_HUB_OFFLINE] is '0', but the launcher needs '1'"),
        ({}, {"VLLM_ASCEND_ENABLE_NZ": "1"}, "but spec.rlConfig.enabled needs '0'"),
        ({"sleepMode": True}, {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, "but spec.sleepMode needs 'spawn'"),
        (TRACES, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "but spec.features.traceReplay needs '1'"),
        (INVARIANT, {"HCCL_DETERMINISTIC": "false"}, "but spec.rlConfig.enableBatchInvariant needs 'strict'"),
        (INVARIANT, {"LCCL_DETERMINISTIC": "0"}, "but spec.rlConfig.enableBatchInvariant needs '1'"),
        (
            {},
            {"VLLM_BATCH_INVARIANT": "1", "HCCL_DETERMINISTIC": "true"},
            "spec.env[HCCL_DETERMINISTIC] is 'true', but spec.env[VLLM_BATCH_INVARIANT] needs 'strict'",
        ),
        (
            {"compilationConfig": {"cudagraph_mode": "FULL"}},
            {"VLLM_BATCH_INVARIANT": "1"},
            'spec.engine.compilationConfig.cudagraph_mode is "FULL", but spec.env[VLLM_BATCH_INVARIANT]',
        ),
        (
            {"accelerator": {"resourceName": "huawei.com/npu", "perPod": 8}},
            {"VLLM_BATCH_INVARIANT": "1"},
            "spec.env[VLLM_BATCH_INVARIANT] works on Atlas A2 and A3 only",
        ),
    ],
)
def test_a_variable_against_the_spec_is_named_with_what_it_contradicts(
    config: dict[str, Any], environ: dict[str, str], words: str
) -> None:
    (said,) = _said(config, environ)
    assert words in said


@pytest.mark.parametrize(
    ("config", "environ"),
    [
        ({}, {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_USE_RUST_FRONTEND": "0", "VLLM_DP_SIZE": ""}),
        ({}, {"HF_HUB_OFFLINE": "1", "VLLM_BATCH_INVARIANT": "1", "HCCL_DETERMINISTIC": "strict"}),
        ({}, {"VLLM_BATCH_INVARIANT": "0", "HCCL_DETERMINISTIC": "false"}),
        ({}, {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "VLLM_USE_V2_MODEL_RUNNER": "0", "A": "1"}),
        ({"rlConfig": {"enabled": False, "enableBatchInvariant": True}}, {"VLLM_ASCEND_ENABLE_NZ": "1"}),
        ({"accelerator": None}, {"VLLM_ASCEND_ENABLE_NZ": "1"}),
    ],
)
def test_a_variable_that_contradicts_nothing_passes(config: dict[str, Any], environ: dict[str, str]) -> None:
    assert _said(config, environ) == []


_KNOWN = sorted(
    {rule.name.replace("*", "SIZE") for rule in RESERVED_VARIABLES}
    | PYTHON_VARIABLES.keys()
    | VLLM_VARIABLES.keys()
    | DETERMINISTIC_VARIABLES.keys()
    | NZ_OFF.keys()
    | SPAWN.keys()
    | RUNNER_V2.keys()
)
_VALUES = st.sampled_from(["", "0", "1", "strict", "spawn", "critical", "true"])
_SPECS = st.fixed_dictionaries(
    {
        "rlConfig": st.fixed_dictionaries({"enabled": st.booleans(), "enableBatchInvariant": st.booleans()}),
        "sleepMode": st.booleans(),
    }
)


@given(spec=_SPECS, name=st.sampled_from(_KNOWN), value=_VALUES)
def test_the_operator_refuses_what_the_launcher_of_every_release_does(
    spec: dict[str, Any], name: str, value: str
) -> None:
    config = build_config(**ON_NPUS | spec)
    refused = []
    for installation in NPUS:
        found = plan(config, build_facts(installation=installation, environ={name: value}))
        problems = found.problems if isinstance(found, Refused) else ()
        refused.append(any(f"environment variable {name} " in problem.cause for problem in problems))
        assert isinstance(found, Plan) or any(refused), found
    if (name, value) != ("LCCL_DETERMINISTIC", "0"):  # in an image of CANN nobody's wish, in spec.env a contradiction
        assert bool(list(variable_faults(config, {name: value}))) is all(refused)
