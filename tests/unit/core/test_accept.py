"""What is accepted, and which WeightVersion is in charge. Messages name the field."""

import re
from datetime import timedelta
from typing import Any

import pytest

from rollfleet_operator.api.crd import ROLLOUT_ENGINE, build_schema
from rollfleet_operator.api.launch import (
    EngineOptions,
    Features,
    InsecureSerialization,
    Parallelism,
    RlConfig,
    SleepMode,
    Switch,
    ToolCalling,
    WeightTransfer,
)
from rollfleet_operator.api.rolloutengine import (
    Accelerator,
    Committed,
    EnvVar,
    Hold,
    Model,
    Router,
    WhenClosed,
    WhenClosedType,
)
from rollfleet_operator.api.volumes import ExtraVolume, Volumes, VolumeSource
from rollfleet_operator.api.weightversion import Source, SourceType
from rollfleet_operator.core.accept import (
    MAX_SETTINGS_BYTES,
    RESERVED_ENV,
    in_charge,
    judge_fleet,
    judge_orphan,
    judge_weight_version,
    path_fault,
)
from rollfleet_operator.core.reasons import Reason
from rollfleet_protocol.launch_settings import FleetMode, TokenEndpoint, TransferBackend
from tests.support.builders import (
    NOW,
    make_claim,
    make_committed,
    make_fleet,
    make_settings,
    make_weight_version,
)
from tests.support.simulated_updates import ROLLBACK

COLOCATED: dict[str, Any] = {"mode": FleetMode.COLOCATED, "sleep_mode": SleepMode.ENABLED}
HOST = VolumeSource(host_path={"path": "/data"})


def volumes(**changes: Any) -> Volumes:
    return Volumes(**({"model": make_claim("m"), "checkpoints": make_claim("c")} | changes))


def extra(name: str, path: str) -> ExtraVolume:
    return ExtraVolume(name=name, mount_path=path, source=make_claim("x"))


FLEET_FAULTS = {
    "a path that climbs": ({"model": Model(path="a/../b", served_name="p")}, "spec.model.path"),
    "an absolute path": ({"model": Model(path="/a", served_name="p")}, "spec.model.path"),
    "a volume of nothing": ({"volumes": volumes(model=VolumeSource())}, "spec.volumes.model"),
    "a volume of two kinds": (
        {"volumes": volumes(checkpoints=VolumeSource(host_path={"path": "/a"}, csi={"driver": "d"}))},
        "spec.volumes.checkpoints",
    ),
    "a mount path twice": ({"volumes": volumes(extra=(extra("a", "/x"), extra("b", "/x")))}, "mountPath '/x'"),
    "a variable of ours": ({"env": (EnvVar(name="PYTHONPATH", value="/x"),)}, "spec.env[PYTHONPATH]"),
    "a variable round the guard": (
        {"env": (EnvVar(name="VLLM_USE_RUST_FRONTEND", value="1"),)},
        "spec.env[VLLM_USE_RUST_FRONTEND] may not be set: the Rust front end",
    ),
    "a variable against a field": (
        {"env": (EnvVar(name="VLLM_BATCH_INVARIANT", value="0"),), "rl_config": RlConfig(enable_batch_invariant=True)},
        "spec.env[VLLM_BATCH_INVARIANT] is '0', but spec.rlConfig.enableBatchInvariant needs '1'",
    ),
    "a variable twice": ({"env": (EnvVar(name="A"), EnvVar(name="A"))}, "spec.env has two entries"),
    "more workers than devices": (
        {"parallelism": Parallelism(tensor=2, data=4), "accelerator": Accelerator(per_pod=4)},
        "spec.parallelism asks for 8 devices (tensor x pipeline x data), more than spec.accelerator.perPod (4)",
    ),
    "more workers than the devices of all nodes": (
        {"parallelism": Parallelism(tensor=8, pipeline=3, nodes=2), "accelerator": Accelerator(per_pod=8)},
        "asks for 24 devices (tensor x pipeline x data), more than spec.accelerator.perPod (8 x 2 nodes)",
    ),
    "workers that nodes cannot share": (
        {"parallelism": Parallelism(tensor=2, nodes=4)},
        "spec.parallelism.nodes is 4: tensor x pipeline, 2, must be divisible by it",
    ),
    "ranks on several nodes": (
        {"parallelism": Parallelism(tensor=2, data=2, nodes=2), "accelerator": Accelerator(per_pod=8)},
        "spec.parallelism.data must be 1 where spec.parallelism.nodes is more: NotSupported: raise spec.replicas",
    ),
    "handles between nodes": (
        {
            **COLOCATED,
            "parallelism": Parallelism(tensor=2, nodes=2),
            "weight_transfer": WeightTransfer(backend=TransferBackend.SHM),
        },
        "spec.weightTransfer.backend shm needs spec.parallelism.nodes 1: handles are of one host",
    ),
    "a place of ours": ({"env": (EnvVar(name="ROLLFLEET_PLACE", value="{}"),)}, "spec.env[ROLLFLEET_PLACE]"),
    "colocated without sleep": ({"mode": FleetMode.COLOCATED}, "spec.sleepMode must be Enabled"),
    "handles between different NPUs": (
        {"weight_transfer": WeightTransfer(backend=TransferBackend.IPC)},
        "spec.weightTransfer.backend ipc needs spec.mode Colocated",
    ),
    "collectives on one NPU": (
        {**COLOCATED, "weight_transfer": WeightTransfer(backend=TransferBackend.HCCL)},
        "spec.weightTransfer.backend hccl needs spec.mode Disaggregated",
    ),
    "consent where nothing is pickled": (
        {
            **COLOCATED,
            "weight_transfer": WeightTransfer(
                backend=TransferBackend.SHM, insecure_serialization=InsecureSerialization.ALLOWED
            ),
        },
        "spec.weightTransfer.insecureSerialization may be Allowed",
    ),
    "cleaning up without sleep": (
        {"rl_config": RlConfig(sleep_mode_extra_cleanup=True)},
        "spec.rlConfig.sleepModeExtraCleanup needs spec.sleepMode Enabled",
    ),
    "tools without chat": (
        {"features": Features(token_endpoint=TokenEndpoint.TOKENS_ONLY, tool_calling=ToolCalling(parser="hermes"))},
        "spec.features.tokenEndpoint TokensOnly excludes spec.features.toolCalling",
    ),
    "traces that nobody can send": (
        {"features": Features(trace_replay=Switch.ENABLED)},
        "spec.features.traceReplay needs spec.features.tokenEndpoint",
    ),
    "formats that updates cannot write": (
        {"engine": EngineOptions(additional_config={"weight_nz_mode": 1})},
        "spec.engine.additionalConfig.weight_nz_mode is 1, but spec.rlConfig.enabled needs 0",
    ),
    "a key that rl_config does not have": (
        {"engine": EngineOptions(additional_config={"rl_config": {"refresh": True}})},
        "spec.engine.additionalConfig.rl_config.refresh is no key",
    ),
    "graphs that hold attention": (
        {
            "rl_config": RlConfig(enable_batch_invariant=True),
            "engine": EngineOptions(compilation_config={"cudagraph_mode": "FULL"}),
        },
        'spec.engine.compilationConfig.cudagraph_mode is "FULL", but spec.rlConfig.enableBatchInvariant',
    ),
    "settings without end": (
        {"engine": EngineOptions(additional_config={"a": "x" * MAX_SETTINGS_BYTES})},
        "spec.engine.additionalConfig must not be longer",
    ),
    "the accelerator twice": ({"resources": {"limits": {"huawei.com/Ascend910": 1}}}, "spec.resources.limits"),
}


@pytest.mark.parametrize("case", FLEET_FAULTS)
def test_a_fault_of_the_fleet_names_its_field(case: str) -> None:
    spec, words = FLEET_FAULTS[case]
    verdict = judge_fleet(make_fleet(**spec), make_settings())
    assert (verdict.accepted, verdict.reason) == (False, Reason.INVALID_SPEC)
    assert words in verdict.message


@pytest.mark.parametrize("backend", TransferBackend)
def test_every_backend_is_accepted_in_its_mode(backend: TransferBackend) -> None:
    handles = backend in (TransferBackend.IPC, TransferBackend.SHM)
    mode = COLOCATED if handles else {}
    consents = [InsecureSerialization.FORBIDDEN, *([InsecureSerialization.ALLOWED] if backend == "ipc" else [])]
    for consent in consents:
        transfer = WeightTransfer(backend=backend, insecure_serialization=consent)
        assert judge_fleet(make_fleet(**mode, weight_transfer=transfer), make_settings()).accepted


def test_host_paths_are_accepted_only_where_they_are_allowed() -> None:
    fleet = make_fleet(volumes=volumes(extra=(ExtraVolume(name="venv", mount_path="/venv", source=HOST),)))
    refused = judge_fleet(fleet, make_settings())
    assert (refused.accepted, refused.reason) == (False, Reason.HOST_PATH_NOT_ALLOWED)
    assert "spec.volumes.extra[venv].source.hostPath" in refused.message
    assert judge_fleet(fleet, make_settings(host_path_allowed=True)).accepted


@pytest.mark.parametrize("path", ["step-1", "run/step-1", "a..b"])
def test_paths_below_the_volume_are_fine(path: str) -> None:
    assert path_fault(path) == ""


@pytest.mark.parametrize("path", ["..", "a/..", "/a", "a//b", "./a", ".", "a\nb", ""])
def test_paths_that_lead_elsewhere_are_not(path: str) -> None:
    assert path_fault(path) != ""


def test_the_whole_volume_is_a_model_but_no_checkpoint() -> None:
    assert path_fault(".", dot=True) == ""
    assert path_fault(".") != ""


def test_the_older_is_in_charge_unless_the_committed_one_is_there() -> None:
    older = make_weight_version(1, name="a", uid="uid-a", created=NOW)
    newer = make_weight_version(2, name="b", uid="uid-b", created=NOW + timedelta(seconds=1))
    assert in_charge((newer, older), None) is older
    assert in_charge((newer, older), make_committed(2, weight_version_uid="uid-b")) is newer
    assert in_charge((newer, older), make_committed(2, weight_version_uid="uid-gone")) is older
    assert in_charge((), None) is None


def test_one_that_is_being_deleted_is_not_in_charge() -> None:
    going = make_weight_version(1)
    going = going.model_copy(update={"metadata": going.metadata.model_copy(update={"deletion_timestamp": NOW})})
    assert in_charge((going,), make_committed(1)) is None


def test_a_second_weight_version_is_told_who_is_in_charge() -> None:
    first, second = make_weight_version(1, name="first", uid="a"), make_weight_version(2, name="second", uid="b")
    verdict = judge_weight_version(second, make_fleet(), first, None)
    assert verdict.reason is Reason.ANOTHER_WEIGHT_VERSION
    assert "spec.engineRef" in verdict.message
    assert "'first'" in verdict.message


@pytest.mark.parametrize(("version", "accepted"), [(4, False), (5, False), (6, True)])
def test_a_version_must_exceed_the_committed_one(version: int, accepted: bool) -> None:
    weight_version = make_weight_version(version, uid="another")
    verdict = judge_weight_version(weight_version, make_fleet(), weight_version, make_committed(5))
    assert verdict.accepted is accepted
    if not accepted:
        assert verdict.reason is Reason.VERSION_NOT_HIGHER
        assert f"spec.version {version} must exceed 5" in verdict.message


def test_the_committed_version_itself_stays_accepted() -> None:
    weight_version = make_weight_version(5)
    assert judge_weight_version(weight_version, make_fleet(), weight_version, make_committed(5)).accepted


def test_a_checkpoint_needs_a_volume_and_a_path_below_it() -> None:
    weight_version = make_weight_version(1, path="../secrets")
    verdict = judge_weight_version(weight_version, make_fleet(), weight_version, None)
    assert (verdict.reason, "spec.source.checkpoint.path" in verdict.message) == (Reason.INVALID_SPEC, True)
    weight_version = make_weight_version(1)
    without = make_fleet(volumes=volumes(checkpoints=None))
    verdict = judge_weight_version(weight_version, without, weight_version, None)
    assert "spec.volumes.checkpoints" in verdict.message
    empty = make_weight_version(1, source=Source(type=SourceType.CHECKPOINT))
    assert "spec.source.checkpoint" in judge_weight_version(empty, make_fleet(), empty, None).message


@pytest.mark.parametrize(
    ("committed", "accepted"),
    [(make_committed(5), True), (make_committed(0), True), (make_committed(5, checkpoint=None), False), (None, True)],
    ids=["with a checkpoint", "version 0", "stored nowhere", "not known yet"],
)
def test_rollback_needs_a_stored_copy_of_the_committed_version(committed: Committed | None, accepted: bool) -> None:
    weight_version = make_weight_version(6, on_failure=ROLLBACK)
    verdict = judge_weight_version(weight_version, make_fleet(), weight_version, committed)
    assert verdict.accepted is accepted
    if not accepted:
        assert verdict.reason is Reason.VERSION_NOT_STORED
        assert "spec.onFailure.type is Rollback" in verdict.message
        assert "version 5 is stored nowhere" in verdict.message


def test_rollback_stays_accepted_once_its_own_version_is_committed() -> None:
    weight_version = make_weight_version(5, on_failure=ROLLBACK)
    committed = make_committed(5, checkpoint=None)
    assert judge_weight_version(weight_version, make_fleet(), weight_version, committed).accepted


def test_a_weight_version_without_a_fleet_names_the_reference() -> None:
    verdict = judge_orphan(make_weight_version(1))
    assert verdict.reason is Reason.ENGINE_NOT_FOUND
    assert "spec.engineRef.name" in verdict.message
    assert "'qwen'" in verdict.message


def test_holding_needs_its_bounds_and_rejecting_has_none() -> None:
    for when_closed, accepted in (
        (WhenClosed(), True),
        (WhenClosed(type=WhenClosedType.HOLD, hold=Hold()), True),
        (WhenClosed(type=WhenClosedType.HOLD), False),
        (WhenClosed(hold=Hold()), False),
    ):
        verdict = judge_fleet(make_fleet(router=Router(when_closed=when_closed)), make_settings())
        assert verdict.accepted is accepted
        if not accepted:
            assert "spec.router.whenClosed.hold" in verdict.message


def test_the_crd_and_we_refuse_the_same_variables() -> None:
    """What the operator, the image or the device plugin sets is nobody else's to set."""
    spec = build_schema(ROLLOUT_ENGINE)["properties"]["spec"]["properties"]
    name = spec["env"]["items"]["properties"]["name"]
    refused = {word for rule in name["x-kubernetes-validations"] for word in re.findall(r"'([A-Z_]+)'", rule["rule"])}
    assert refused == set(RESERVED_ENV)
    for variable in RESERVED_ENV:
        verdict = judge_fleet(make_fleet(env=(EnvVar(name=variable, value="0"),)), make_settings())
        assert not verdict.accepted
        assert variable in verdict.message
