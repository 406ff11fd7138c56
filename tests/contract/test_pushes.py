"""Weights that a trainer sends, by gloo and by shm: the operator arms and orders, the trainer calls vLLM's four phases.

The trainer is a process of its own with torch. Of gloo the simulator needs torch too, so both engines run under the
interpreter of the vLLM environment here.
"""

import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import pytest

from devtools import vllm_venv
from rollfleet_engine.weights.coverage import read_model_tensors
from rollfleet_protocol.pushes import DTYPES, SHM_FOLDER
from rollfleet_protocol.state import DigestSource, Gate, OperationStatus, WeightsState
from tests.contract.client import STEP_TIMEOUT_S, Client, Operator, held, operation_of
from tests.contract.conftest import run_engine
from tests.contract.models import Models
from tests.contract.process import EngineProcess, Kind, Site
from tests.contract.trainer import SUBJECT, UID, Trainer

NATIVE = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
BACKENDS = {
    "gloo": {"weightTransfer": {"backend": "gloo"}},
    "shm": {"weightTransfer": {"backend": "shm"}, "mode": "Colocated", "sleepMode": True},
}
GLOO = pytest.mark.parametrize("backend", ["gloo"], indirect=True)
SHM = pytest.mark.parametrize("backend", ["shm"], indirect=True)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The one that the engine's spec names: one engine after the other."""
    return str(request.param)


@pytest.fixture(scope="module")
def pushed(kind: Kind, site: Site, models: Models, backend: str) -> Iterator[EngineProcess]:
    """An engine that has torch beside it."""
    venv = vllm_venv.venv_path()
    if not vllm_venv.is_complete(venv):
        pytest.skip(f"no torch: `make vllm-venv` makes {venv}")
    python = str(venv / "bin" / "python")
    command = [python, "-m", "rollfleet_engine.launch"]
    yield from run_engine(
        kind, site, f"pushed-{backend}", models.folder(0), models, command=lambda _: command, **BACKENDS[backend]
    )


@pytest.fixture(scope="module")
def trainer(pushed: EngineProcess, site: Site, models: Models) -> Iterator[Trainer]:
    one = Trainer(pushed, site, models)
    yield one
    one.close()


@pytest.fixture(scope="module")
def reader(pushed: EngineProcess) -> Iterator[Client]:
    one = Client(pushed)
    yield one
    one.close_client()


def serves(reader: Client, models: Models, version: int) -> None:
    answer = reader.complete(models.short_prompt, models.longest_answer)
    assert (answer.status, answer.version, answer.text) == (200, version, models.answer(version, models.short_prompt))


def test_a_push_is_served_when_it_is_verified(trainer: Trainer, reader: Client, models: Models, backend: str):
    capabilities = trainer.operator.state().facts.capabilities
    assert "source/Trainer" in capabilities
    assert [each for each in capabilities if each.startswith("backend/")] == [f"backend/{backend}"]
    for version in (1, 2):
        state = trainer.update(version, backend)
        transferred = state.transferred
        assert transferred is not None
        assert held(state) == (WeightsState.VERIFIED, version, models.digest(version))
        assert state.weights.source == f"trainer:{SUBJECT}"
        assert transferred.digest_source is DigestSource.TRAINER
        assert set(transferred.phase_seconds) == {"init", "start", "update", "finish"}
        assert transferred.tensors > 10
        assert transferred.layers > 2
        serves(reader, models, version)


def test_c03_the_first_request_after_a_push_uses_no_old_cache(
    trainer: Trainer, reader: Client, models: Models, backend: str
):
    for version in (3, 1):
        reader.complete(models.long_prompt, 4)
        assert reader.complete(models.long_prompt, 4).cached_tokens == 128
        trainer.update(version, backend)
        first = reader.complete(models.long_prompt, models.longest_answer)
        assert (first.version, first.cached_tokens) == (version, 0)
        assert first.text == models.answer(version, models.long_prompt)


@GLOO
def test_a_group_is_formed_once_and_anew_after_a_failure(trainer: Trainer, reader: Client, models: Models):
    kept = {"keeps": "group-1", "group": "group-1"}
    for version, formed in ((1, True), (2, False), (3, False)):
        transferred = trainer.update(version, "gloo", **kept).transferred
        assert transferred is not None
        assert ("init" in transferred.phase_seconds) is formed
        serves(reader, models, version)
    told, _ = trainer.fail("gloo", 2, omit=["model.norm.weight"], **kept)
    assert "model.norm.weight" in told
    assert "there is no group: init comes first" in trainer.send("gloo", 2, **kept)["error"]
    trainer.update(2, "gloo", keeps="group-2", group="group-2")
    trainer.update(1, "gloo", group="group-3")
    serves(reader, models, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"omit": ["model.norm.weight"]}, "model.norm.weight"),
        ({"add": ["model.layers.9.extra"]}, "model.layers.9.extra"),
        ({"halve": ["model.norm.weight"]}, "model.norm.weight"),
    ],
    ids=["missing", "unknown", "other-shape"],
)
def test_c28_what_does_not_cover_the_model_fails_by_name_on_both_sides(
    trainer: Trainer, reader: Client, models: Models, backend: str, change: dict[str, list[str]], words: str
):
    """Before the engine gives anything up: the version before, which is stored nowhere, is served again."""
    trainer.update(1, backend)
    told, state = trainer.fail(backend, 2, **change)
    failure = operation_of(state).failure
    assert failure is not None
    assert failure.reason == "CoverageFailed"
    assert words in failure.message
    assert words in told
    assert "engine-0" in told
    assert held(state) == (WeightsState.VERIFIED, 1, models.digest(1))
    assert reader.complete("abc", 1).status == 503
    assert trainer.operator.do("cancel", state.epoch).gate is Gate.OPEN
    serves(reader, models, 1)
    trainer.update(3, backend)
    serves(reader, models, 3)


def test_a_sender_that_was_refused_sends_what_is_right_after_another_init(
    trainer: Trainer, reader: Client, models: Models, backend: str
):
    kept = {"keeps": f"again-{backend}", "group": "again"}
    trainer.update(1, backend, **kept)
    trainer.fail(backend, 2, omit=["model.norm.weight"], **kept)
    trainer.update(2, backend, joins=True, **kept)
    serves(reader, models, 2)


@GLOO
@pytest.mark.parametrize(
    ("change", "touches"),
    [
        ({"add": ["model.layers.9.extra"]}, False),
        ({"halve": ["model.norm.weight"]}, False),
        ({"omit": ["model.norm.weight"]}, True),
    ],
    ids=["unknown", "other-shape", "missing"],
)
def test_c28_so_does_what_vllm_s_own_client_sends_as_far_as_its_first_call_tells(
    trainer: Trainer, reader: Client, models: Models, change: dict[str, list[str]], touches: bool
):
    """It says nothing at the start, and of what is missing nobody knows before the last call."""
    trainer.update(1, "gloo")
    _, state = trainer.fail("gloo", 2, silent=True, **change)
    failure = operation_of(state).failure
    assert failure is not None
    assert failure.reason == "CoverageFailed"
    if touches:
        assert state.weights.state is WeightsState.UNCERTAIN
    else:
        assert held(state) == (WeightsState.VERIFIED, 1, models.digest(1))
        trainer.operator.do("cancel", state.epoch)
        serves(reader, models, 1)
    trainer.update(3, "gloo")
    serves(reader, models, 3)


def test_a_trainer_that_breaks_off_says_why_to_the_engine(
    trainer: Trainer, reader: Client, models: Models, backend: str
):
    told, state = trainer.fail(backend, 2, half_way="breaks")
    assert "the gather failed on rank 3" in told
    failure = operation_of(state).failure
    assert failure is not None
    assert 'the trainer broke off: "ValueError: the gather failed on rank 3"' in failure.message
    trainer.update(1, backend)
    serves(reader, models, 1)


def test_a_trainer_with_nothing_to_send_says_so_before_anything_is_touched(
    trainer: Trainer, reader: Client, models: Models, backend: str
):
    trainer.update(1, backend)
    told, state = trainer.fail(backend, 2, omit=sorted(read_model_tensors(models.folder(2)).tensors))
    assert told == "ValueError: there are no tensors to send"
    failure = operation_of(state).failure
    assert failure is not None
    assert failure.message == 'the trainer broke off: "there are no tensors to send"'
    assert state.weights.state is WeightsState.VERIFIED
    trainer.operator.do("cancel", state.epoch)
    serves(reader, models, 1)


@SHM
def test_c17_ranks_that_do_not_fit_stop_before_any_group_forms(trainer: Trainer, reader: Client, models: Models):
    trainer.update(1, "shm")
    epoch = trainer.operator.next_epoch()
    trainer.arm(epoch, 2)
    trainer.order(epoch, 2, "shm", workers=4)
    failure = operation_of(trainer.ended()).failure
    assert failure is not None
    assert "1 workers" in failure.message
    assert "for 4" in failure.message
    trainer.order(epoch, 2, "shm", rankOffset=3, worldSize=9)
    info = {"rank_offset": 1, "world_size": 9}
    status, message = trainer.call("init_weight_transfer_engine", {"init_info": info})
    assert status == 409
    assert "rank_offset is 3" in message
    state = trainer.operator.do("cancel", epoch)
    assert (state.gate, held(state)) == (Gate.OPEN, (WeightsState.VERIFIED, 1, models.digest(1)))
    serves(reader, models, 1)


def refusal_of(operator: Operator, backend: str) -> str:
    """Of a push by this backend, which must fail before the trainer is heard; version 1 is served again."""
    epoch = operator.next_epoch()
    operator.close(epoch, 2)
    operator.do("arm", epoch)
    push = {
        "sender": {"subject": SUBJECT, "uid": UID},
        "backend": backend,
        "rankOffset": 1,
        "worldSize": 2,
        "workers": 1,
    }
    state = operator.do("transfer", epoch, version=2, push=push, deadlineSeconds=STEP_TIMEOUT_S)
    while operation_of(state).status is OperationStatus.RUNNING:
        state = operator.state(after=state.sequence, wait_s=30)
    failure = operation_of(state).failure
    assert failure is not None
    assert state.weights.state is WeightsState.VERIFIED, "nothing was touched"
    assert operator.do("cancel", epoch).gate is Gate.OPEN
    return failure.message


def test_a_backend_that_the_spec_does_not_name_is_refused(trainer: Trainer, backend: str, models: Models):
    trainer.operator.update(1, "step-1")
    other = next(each for each in BACKENDS if each != backend)
    for asked in (other, "ncccl"):
        told = refusal_of(trainer.operator, asked)
        assert told == f"the push comes by {asked}, and spec.weightTransfer.backend is {backend}"
    assert held(trainer.operator.state()) == (WeightsState.VERIFIED, 1, models.digest(1))


def test_an_engine_that_names_no_backend_takes_no_pushes(serving: Operator, models: Models):
    capabilities = serving.state().facts.capabilities
    assert [each for each in capabilities if each.startswith("backend/") or each == "source/Trainer"] == []
    for asked in BACKENDS:
        told = refusal_of(serving, asked)
        assert told == f"the push comes by {asked}, and spec.weightTransfer names no backend: checkpoints only"
    assert held(serving.state()) == (WeightsState.VERIFIED, 1, models.digest(1))


@SHM
def test_native_routes_are_open_to_the_sender_of_an_armed_update_only(trainer: Trainer, models: Models, reader: Client):
    trainer.update(1, "shm")
    operator = trainer.operator
    for route in (*NATIVE, "pause", "resume", "sleep", "collective_rpc"):
        assert trainer.call(route)[0] == 403, route
    epoch = operator.next_epoch()
    trainer.arm(epoch, 2)
    assert trainer.call("start_weight_update")[0] == 403, "armed, but the operator has named nobody"
    trainer.order(epoch, 2, "shm")
    stranger = operator.make_token(subject=SUBJECT, uid="another-uid")
    for token in (stranger, operator.token):
        answer = operator.request("POST", "/start_weight_update", json={}, token=token)
        assert answer.status_code == (403 if token == stranger else 409)
    assert operator.request("POST", "/rollfleet/v1/open", json={}, token=trainer.token).status_code == 403
    assert operator.request("GET", "/rollfleet/v1/state", token=trainer.token).status_code == 403
    assert trainer.call("pause") == (200, trainer.call("resume")[1])
    assert trainer.call("sleep")[0] == 403
    for route in ("update_weights", "finish_weight_update"):
        body = {"update_info": {}} if route == "update_weights" else {}
        status, message = trainer.call(route, body)
        assert (status, "start_weight_update" in message) == (409, True)
    assert operator.state().paused
    operator.do("cancel", epoch)
    assert trainer.call("start_weight_update")[0] == 403
    serves(reader, models, 1)


@SHM
def test_c28_a_label_of_another_version_and_a_digest_of_nothing_are_no_match(trainer: Trainer, models: Models):
    epoch = trainer.operator.next_epoch()
    trainer.arm(epoch, 2)
    trainer.order(epoch, 2, "shm")
    told = trainer.send("shm", 2, label="default")
    assert "weight_version is '2' here, not 'default'" in told["error"]
    assert operation_of(trainer.operator.state()).status is OperationStatus.RUNNING, "refused, and nothing has ended"
    status, _ = trainer.call("finish_weight_update", {"digest": ""})
    assert status == 400
    status, message = trainer.call("finish_weight_update", {"digest": models.digest(3)})
    assert status == 502
    assert models.digest(2) in message
    assert models.digest(3) in message
    assert trainer.ended().weights.state is WeightsState.UNCERTAIN


@SHM
def test_c28_unchanged_weights_that_nobody_vouches_for_are_no_match(trainer: Trainer, reader: Client, models: Models):
    trainer.update(2, "shm")
    epoch = trainer.operator.next_epoch()
    trainer.arm(epoch, 3)
    trainer.order(epoch, 3, "shm")
    trainer.send("shm", 2, label="3", silent=True)
    failure = operation_of(trainer.ended()).failure
    assert failure is not None
    assert failure.reason == "DigestMismatch"
    assert "just what they held before" in failure.message
    assert reader.complete("abc", 1).status == 503
    epoch = trainer.operator.next_epoch()
    trainer.arm(epoch, 3)
    trainer.order(epoch, 3, "shm")
    assert "error" not in trainer.send("shm", 3, silent=True)
    state = trainer.ended()
    assert state.transferred is not None
    assert (state.transferred.digest_source, state.transferred.digest) == (DigestSource.ENGINES_ONLY, models.digest(3))
    trainer.operator.verify(epoch, 3, models.digest(3))
    trainer.operator.do("open", epoch, version=3, digest=models.digest(3))
    epoch = trainer.operator.next_epoch()
    trainer.arm(epoch, 4)
    trainer.order(epoch, 4, "shm")
    assert trainer.send("shm", 3, label="4") == {"digest": models.digest(3)}, "the trainer says that it means it"
    assert operation_of(trainer.ended()).status is OperationStatus.SUCCEEDED
    trainer.operator.verify(epoch, 4, models.digest(3))
    trainer.operator.do("open", epoch, version=4, digest=models.digest(3))
    assert reader.complete("abc", 1).version == 4


@contextmanager
def norm_in_memory(models: Models) -> Iterator[dict[str, Any]]:
    """update_info of one tensor that fits, in shared memory."""
    name = "model.norm.weight"
    dtype, shape = read_model_tensors(models.folder(2)).tensors[name]
    torch_name, size = next((each, size) for each, (known, size) in DTYPES.items() if known == dtype)
    file = Path(SHM_FOLDER, f"rollfleet-{uuid.uuid4().hex}")
    file.write_bytes(bytes(prod(shape) * size))
    try:
        yield {"names": [name], "dtype_names": [torch_name], "shapes": [list(shape)], "file": file.name}
    finally:
        file.unlink()


@SHM
def test_an_update_that_its_trainer_leaves_ends_by_its_deadline(trainer: Trainer, reader: Client, models: Models):
    trainer.update(1, "shm")
    epoch = trainer.operator.next_epoch()
    trainer.arm(epoch, 2)
    trainer.order(epoch, 2, "shm", deadlineSeconds=1)
    failure = operation_of(trainer.ended()).failure
    assert failure is not None
    assert "did not call start_weight_update within 1 s" in failure.message
    state = trainer.operator.do("cancel", epoch)
    assert state.gate is Gate.OPEN
    epoch = trainer.operator.next_epoch()
    trainer.arm(epoch, 2)
    trainer.order(epoch, 2, "shm")
    assert trainer.call("init_weight_transfer_engine", {"init_info": {}})[0] == 200
    assert trainer.call("start_weight_update")[0] == 200
    assert trainer.operator.state().weights.state is WeightsState.VERIFIED, "as long as no tensors come"
    with norm_in_memory(models) as update:
        assert trainer.call("update_weights", {"update_info": update})[0] == 200
    assert trainer.operator.state().weights.state is WeightsState.UPDATING
    assert trainer.operator.refused("cancel", epoch)[0] == 409, "what was touched is not cancelled"
    assert "wait for its end" in trainer.operator.refused("arm", epoch + 1)[2], "and a newer epoch brings that about"
    failure = operation_of(trainer.ended()).failure
    assert failure is not None
    assert "newer epoch" in failure.message
    assert trainer.operator.state().weights.state is WeightsState.UNCERTAIN
    state = trainer.operator.update(1, "step-1")
    assert held(state) == (WeightsState.VERIFIED, 1, models.digest(1))
    serves(reader, models, 1)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Accepts, and says nothing: torch would wait for it for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@GLOO
@pytest.mark.parametrize("silent", [False, True])
def test_a_group_that_does_not_form_is_told_with_where(
    trainer: Trainer, models: Models, reader: Client, silent_port: int, silent: bool
):
    trainer.operator.update(1, "step-1")
    epoch = trainer.operator.next_epoch()
    trainer.arm(epoch, 2)
    trainer.order(epoch, 2, "gloo", deadlineSeconds=10)
    info = {
        "master_address": "127.0.0.1",
        "master_port": silent_port if silent else 9,
        "rank_offset": 1,
        "world_size": 2,
    }
    answers: list[tuple[int, str]] = []
    calling = threading.Thread(
        target=lambda: answers.append(trainer.call("init_weight_transfer_engine", {"init_info": info}))
    )
    calling.start()
    state = trainer.ended()
    calling.join(20)
    assert answers
    assert answers[0][0] == 502
    assert "rank 1 of 2 cannot join at 127.0.0.1" in answers[0][1]
    failure = operation_of(state).failure
    assert failure is not None
    assert held(state) == (WeightsState.VERIFIED, 1, models.digest(1))
    state = trainer.operator.do("cancel", epoch)
    assert state.gate is Gate.OPEN
    serves(reader, models, 1)


@SHM
@pytest.mark.parametrize("file", ["../etc/passwd", "rollfleet-1", "/etc/passwd", "rollfleet-" + "g" * 32])
def test_a_handle_that_is_no_file_of_a_trainer_is_refused(trainer: Trainer, models: Models, file: str):
    epoch = trainer.operator.next_epoch()
    trainer.arm(epoch, 2)
    trainer.order(epoch, 2, "shm")
    assert trainer.call("init_weight_transfer_engine", {"init_info": {}})[0] == 200
    assert trainer.call("start_weight_update")[0] == 200
    with norm_in_memory(models) as update:
        status, message = trainer.call("update_weights", {"update_info": update | {"file": file}})
    assert status == 502
    assert "file" in message
    assert trainer.ended().weights.state is WeightsState.UNCERTAIN
