"""Weights that a trainer sends by ipc, over a stand-in of torch_npu: the CPU's shared memory behind NPU handles.

Backend, guard, sender and client are the real ones, and so are vLLM's trainer engine and its reading of pickles; no NPU
has been asked (tests/support/ascend). The engine is the simulator; tests/vllm takes the same into real vLLM's layers.
"""

import base64
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools import vllm_venv
from rollfleet_engine.weights.coverage import read_model_tensors
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.pushes import DTYPES
from rollfleet_protocol.state import DigestSource, WeightsState
from tests.contract.client import held, operation_of
from tests.contract.conftest import MS_PER_TOKEN, SIMULATOR, run_engine
from tests.contract.models import Models, SimulatedModels
from tests.contract.process import EngineProcess, Kind, Site, simulator
from tests.contract.trainer import SUBJECT, Trainer
from tests.support.stand_in import stand_in
from tests.unit.weights.test_ipc_handles import handle

PUSHER = "tests.contract.ipc_pusher"
COLOCATED = {"mode": "Colocated", "sleepMode": True}
EVENT = base64.b64encode(bytes(range(64))).decode()  # one of the stand-in that has come
HERE = "127.0.0.1-0"  # the NPU that the engine's worker is on


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return SimulatedModels(tmp_path_factory.mktemp("models-ipc"))


def engine_of(site: Site, models: Models, name: str, **transfer: Any) -> Iterator[EngineProcess]:
    venv = vllm_venv.venv_path()
    if not vllm_venv.is_complete(venv):
        pytest.skip(f"no torch: `make vllm-venv` makes {venv}")
    environ = {"ROLLFLEET_ENGINE": SIMULATOR, "ROLLFLEET_SIMULATOR_TOKEN_MS": MS_PER_TOKEN}
    if transfer.get("insecureSerialization"):
        environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    python = str(venv / "bin" / "python")

    def command(config: EngineConfig) -> list[str]:
        return simulator(config, python=python)

    changes = COLOCATED | {"weightTransfer": {"backend": "ipc"} | transfer}
    kind = Kind(SIMULATOR, environ, stand_in())
    yield from run_engine(kind, site, name, models.folder(0), models, command=command, **changes)


def trainer_of(engine: EngineProcess, site: Site, models: Models) -> Iterator[Trainer]:
    one = Trainer(engine, site, models, PUSHER, VLLM_CONFIGURE_LOGGING="0")  # it would log to the pusher's answers
    yield one
    one.close()


@pytest.fixture(scope="module")
def engine(site: Site, models: Models) -> Iterator[EngineProcess]:
    """Its spec does not consent to pickles."""
    yield from engine_of(site, models, "ipc")


@pytest.fixture(scope="module")
def trainer(engine: EngineProcess, site: Site, models: Models) -> Iterator[Trainer]:
    yield from trainer_of(engine, site, models)


@pytest.fixture(scope="module")
def consenting(site: Site, models: Models) -> Iterator[EngineProcess]:
    yield from engine_of(site, models, "ipc-consenting", insecureSerialization=True)


@pytest.fixture(scope="module")
def trusted(consenting: EngineProcess, site: Site, models: Models) -> Iterator[Trainer]:
    yield from trainer_of(consenting, site, models)


def mapped_by(engine: EngineProcess) -> list[str]:
    """Files of others' shared memory that the engine's processes have mapped."""
    maps = (Path(f"/proc/{pid}/maps").read_text() for pid in (engine.pid, *engine.descendants()))
    return [line for text in maps for line in text.splitlines() if "/dev/shm/torch_" in line]


def begin(trainer: Trainer, version: int) -> int:
    """Arm, and let the operator order a push by ipc."""
    epoch = trainer.operator.next_epoch()
    trainer.arm(epoch, version)
    trainer.order(epoch, version, "ipc")
    return epoch


@pytest.mark.parametrize("buffer_bytes", [4096, 1 << 20], ids=["many-calls", "one-call"])
def test_a_push_by_our_sender_is_served_and_leaves_nothing_mapped(
    trainer: Trainer, engine: EngineProcess, models: Models, buffer_bytes: int
):
    assert "backend/ipc" in trainer.operator.state().facts.capabilities
    for version in (1, 2):
        epoch = begin(trainer, version)
        answer = trainer.send("ipc", version, bufferBytes=buffer_bytes)
        assert answer == {"digest": models.digest(version), "readers": 0}
        state = trainer.ended()
        assert state.transferred is not None
        assert state.transferred.digest_source is DigestSource.TRAINER
        trainer.operator.verify(epoch, version, models.digest(version))
        state = trainer.operator.do("open", epoch, version=version, digest=models.digest(version))
        assert held(state) == (WeightsState.VERIFIED, version, models.digest(version))
        assert state.weights.source == f"trainer:{SUBJECT}"
        assert mapped_by(engine) == []


def test_vllm_s_own_trainer_needs_no_consent_with_our_client(trainer: Trainer, engine: EngineProcess, models: Models):
    begin(trainer, 3)
    assert trainer.send("ipc", 3, how="json") == {"readers": 0}
    state = trainer.ended()
    assert state.transferred is not None
    assert (state.transferred.digest_source, state.transferred.digest) == (DigestSource.ENGINES_ONLY, models.digest(3))
    assert mapped_by(engine) == []


def test_pickled_handles_are_refused_with_the_cure_and_touch_nothing(trainer: Trainer, models: Models, tmp_path: Path):
    trainer.operator.update(1, "step-1")
    canary = tmp_path / "canary"
    for how in ("pickled", "hostile"):
        told, state = trainer.fail("ipc", 2, how=how, canary=str(canary))
        failure = operation_of(state).failure
        assert failure is not None
        for text in (told, failure.message):
            assert "ipc_handles_pickled is refused" in text
            assert "spec.weightTransfer.insecureSerialization: Allowed" in text
        assert held(state) == (WeightsState.VERIFIED, 1, models.digest(1))
    assert not canary.exists()


class MakesFolder:
    """A pickle of it, read by anybody, makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.mkdir, (Path(self.path),)


def test_with_consent_vllm_s_client_works_and_only_the_sender_is_unpickled(
    trusted: Trainer, consenting: EngineProcess, models: Models, tmp_path: Path
):
    canary = tmp_path / "canary"
    begin(trusted, 1)
    assert trusted.send("ipc", 1, how="pickled") == {"readers": 0}
    state = trusted.ended()
    assert state.transferred is not None
    assert state.transferred.digest == models.digest(1)
    assert mapped_by(consenting) == []
    begin(trusted, 2)
    pickled = base64.b64encode(pickle.dumps([MakesFolder(canary)])).decode()
    body = {"update_info": update_of(models, 2) | {"ipc_handles_pickled": pickled}}
    operator = trusted.operator
    assert trusted.call("init_weight_transfer_engine", {"init_info": {}})[0] == 200
    assert trusted.call("start_weight_update")[0] == 200
    stranger = operator.make_token(subject=SUBJECT, uid="another-uid")
    for token in ("", "x.y.z", stranger, operator.token):
        answer = operator.request("POST", "/update_weights", json=body, token=token)
        assert answer.status_code in (401, 403, 409)
    assert not canary.exists()
    status, message = trusted.call("update_weights", body)
    assert (status, "handles" in message) == (502, True)
    assert canary.exists(), "what consent means: the sender's pickle is read"
    assert mapped_by(consenting) == []


def update_of(models: Models, version: int) -> dict[str, Any]:
    """Words of one of the model's tensors."""
    name, (dtype, shape) = sorted(tensors_of(models, version).items())[0]
    return {"names": [name], "dtype_names": [dtype], "shapes": [list(shape)]}


def tensors_of(models: Models, version: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Torch's name of the dtype, and the shape, by name."""
    names = {safetensors: torchs for torchs, (safetensors, _) in DTYPES.items()}
    held = read_model_tensors(models.folder(version)).tensors
    return {name: (names[dtype], shape) for name, (dtype, shape) in held.items()}


def test_a_worker_whose_npu_the_trainer_is_not_on_is_told_both(trainer: Trainer, engine: EngineProcess):
    told, state = trainer.fail("ipc", 2, npu="5")
    failure = operation_of(state).failure
    assert failure is not None
    for text in (told, failure.message):
        assert f"this worker is on NPU {HERE}, the trainer's handles are for 127.0.0.1-5" in text
    assert state.weights.state is WeightsState.UNCERTAIN
    assert mapped_by(engine) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor_offset": -1}, "tensor_offset"),
        ({"storage_size_bytes": 1}, "its storage at 1"),
        ({"ref_counter_offset": 1 << 40}, "ref_counter_offset"),
        ({"storage_handle": "not base64"}, "storage_handle: is not base64"),
        ({}, "the trainer's memory cannot be read: EL0001: aclrtIpcMemImportByKey failed"),
    ],
    ids=["negative", "too-small", "counter", "base64", "of-nobody"],
)
def test_handles_that_are_not_what_they_say_are_refused_by_name(
    trainer: Trainer, engine: EngineProcess, models: Models, change: dict[str, Any], words: str
):
    update = update_of(models, 2)
    one = handle(tuple(update["shapes"][0]), update["dtype_names"][0]) | {"event_handle": EVENT}
    told = send_by_hand(trainer, update, one | change)
    assert words in told
    assert "\n" not in told
    assert mapped_by(engine) == []


def send_by_hand(trainer: Trainer, update: dict[str, Any], one: dict[str, Any], **order: Any) -> str:
    """The trainer's calls, one by one, with this handle; what the engine says of it."""
    epoch = trainer.operator.next_epoch()
    trainer.arm(epoch, 2)
    trainer.order(epoch, 2, "ipc", **order)
    assert trainer.call("init_weight_transfer_engine", {"init_info": {}})[0] == 200
    assert trainer.call("start_weight_update")[0] == 200
    info = update | {"ipc_handles": [{HERE: one}]}
    status, message = trainer.call("update_weights", {"update_info": info})
    assert status == 502
    assert trainer.ended().weights.state is WeightsState.UNCERTAIN
    return message


def test_a_trainer_s_event_that_never_comes_holds_the_worker_up_to_the_deadline(trainer: Trainer, models: Models):
    update = update_of(models, 2)
    never = base64.b64encode(b"never" + bytes(59)).decode()
    one = handle(tuple(update["shapes"][0]), update["dtype_names"][0]) | {"event_handle": never}
    told = send_by_hand(trainer, update, one, deadlineSeconds=8)
    assert "no answer within" in told
    trainer.operator.update(1, "step-1")
