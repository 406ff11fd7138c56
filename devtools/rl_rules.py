"""What vLLM-Ascend makes of additional_config.rl_config, rule by rule, as its main branch of 2026-08-22 does.

Source of all: vllm_ascend/ascend_config.py (RlConfig, AscendConfig.__init__) and vllm_ascend/platform.py
(_disable_expandable_segments) of github:vllm-project/vllm-ascend, commit 182b75ea84. devtools/check_rlconfig.py runs
that code of a checkout on each case and compares; tests/unit/launch/test_rl_rules.py compares the launcher with the
same cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ON = {"enabled": True}


@dataclass(frozen=True)
class Case:
    """A configuration with what becomes of it."""

    rule: str
    additional: Mapping[str, Any]
    environ: Mapping[str, str] = field(default_factory=dict)  # before
    error: str = ""  # part of the words with which it is refused
    nz: int | None = None  # effective weight_nz_mode; None: the rule says nothing of it
    after: Mapping[str, str | None] = field(default_factory=dict)  # variables; None: absent
    flags: Mapping[str, bool] = field(default_factory=dict)  # of rl_config, as kept


CASES = (
    Case(
        "all keys are false by default",
        {},
        flags={
            "enabled": False,
            "sleep_mode_extra_cleanup": False,
            "enable_training_consistency": False,
            "enable_batch_invariant": False,
        },
        after={"VLLM_SERVER_DEV_MODE": None, "VLLM_BATCH_INVARIANT": None},
    ),
    Case(
        "enabled switches FRACTAL_NZ off and the control routes on",
        {"rl_config": ON},
        nz=0,
        after={"VLLM_ASCEND_ENABLE_NZ": "0", "VLLM_SERVER_DEV_MODE": "1", "VLLM_BATCH_INVARIANT": None},
    ),
    Case("enabled overrides weight_nz_mode 1", {"rl_config": ON, "weight_nz_mode": 1}, nz=0),
    Case("enabled overrides weight_nz_mode 2", {"rl_config": ON, "weight_nz_mode": 2}, nz=0),
    Case(
        "enabled overrides VLLM_ASCEND_ENABLE_NZ",
        {"rl_config": ON},
        environ={"VLLM_ASCEND_ENABLE_NZ": "2"},
        nz=0,
        after={"VLLM_ASCEND_ENABLE_NZ": "0"},
    ),
    Case(
        "without enabled nothing is applied",
        {"rl_config": {"enabled": False, "enable_batch_invariant": True}, "weight_nz_mode": 2},
        environ={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
        nz=2,
        after={
            "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
            "VLLM_SERVER_DEV_MODE": None,
            "VLLM_BATCH_INVARIANT": None,
        },
    ),
    Case(
        "only expandable_segments leaves the allocator's settings",
        {"rl_config": ON},
        environ={"PYTORCH_NPU_ALLOC_CONF": "page_size:1g, expandable_segments:True,max_split_size_mb:512"},
        after={"PYTORCH_NPU_ALLOC_CONF": "page_size:1g,max_split_size_mb:512"},
    ),
    Case(
        "expandable_segments:False leaves too",
        {"rl_config": ON},
        environ={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"},
        after={"PYTORCH_NPU_ALLOC_CONF": ""},
    ),
    Case(
        "settings without it stay",
        {"rl_config": ON},
        environ={"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:512"},
        after={"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:512"},
    ),
    Case(
        "batch invariance sets its variable",
        {"rl_config": {**ON, "enable_batch_invariant": True}},
        environ={"VLLM_BATCH_INVARIANT": "0"},
        nz=0,
        after={"VLLM_BATCH_INVARIANT": "1"},
    ),
    Case(
        "a variable that asks for batch invariance is kept",
        {"rl_config": {**ON, "enable_batch_invariant": False}},
        environ={"VLLM_BATCH_INVARIANT": "1"},
        after={"VLLM_BATCH_INVARIANT": "1"},
    ),
    Case(
        "training consistency and extra cleanup are kept as they are",
        {"rl_config": {**ON, "enable_training_consistency": True, "sleep_mode_extra_cleanup": True}},
        flags={"enable_training_consistency": True, "sleep_mode_extra_cleanup": True, "enable_batch_invariant": False},
    ),
    Case("rl_config must be an object", {"rl_config": "on"}, error="must be a dict"),
    Case("unknown keys are refused", {"rl_config": {**ON, "refresh": False}}, error="refresh"),
    Case("numbers are no booleans", {"rl_config": {"enabled": 1}}, error="enabled must be a bool"),
    Case("words are no booleans", {"rl_config": {**ON, "enable_batch_invariant": "yes"}}, error="must be a bool"),
    Case("nothing is no boolean", {"rl_config": {"sleep_mode_extra_cleanup": None}}, error="must be a bool"),
    Case(
        "the key of before is refused with its replacement",
        {"enable_sleep_mode_extra_cleanup": True},
        error="rl_config.sleep_mode_extra_cleanup",
    ),
)
