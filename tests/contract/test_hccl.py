"""Weights sent by hccl, without NPUs: our backend and our sender over a stand-in of what vLLM-Ascend has for it.

The engine is the simulator, started by hand: the launcher refuses hccl to vLLM on CPUs, and modules that a container
brings by PYTHONPATH (real workers are in tests/vllm/test_hccl.py). The stand-in (tests/support/ascend) makes groups of
gloo; what HCCL itself does is untested on hardware.
"""

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools import vllm_venv
from rollfleet_protocol.pushes import HCCL_ID_BYTES
from rollfleet_protocol.state import DigestSource, WeightsState
from tests.contract.client import Client, held, operation_of
from tests.contract.conftest import MS_PER_TOKEN, SIMULATOR, run_engine
from tests.contract.models import SimulatedModels
from tests.contract.process import EngineProcess, Kind, Site, simulator
from tests.contract.trainer import Trainer
from tests.support.log_lines import whole_lines
from tests.support.stand_in import stand_in

LOG = "ROLLFLEET_TEST_HCCL_LOG"


class Communicators:
    """What the stand-in noted of those of one side."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def counts(self) -> tuple[int, int]:
        """Made and destroyed so far."""
        lines = whole_lines(self._log.read_text(encoding="utf-8")) if self._log.exists() else []
        made = sum(line.startswith("init ") for line in lines)
        return made, len(lines) - made


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hccl")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> SimulatedModels:
    return SimulatedModels(tmp_path_factory.mktemp("models-hccl"))


@pytest.fixture(scope="module")
def pushed(site: Site, simulated: SimulatedModels, logs: Path) -> Iterator[EngineProcess]:
    venv = vllm_venv.venv_path()
    if not vllm_venv.is_complete(venv):
        pytest.skip(f"no torch: `make vllm-venv` makes {venv}")
    python = str(venv / "bin" / "python")
    environ = {"ROLLFLEET_ENGINE": SIMULATOR, "ROLLFLEET_SIMULATOR_TOKEN_MS": MS_PER_TOKEN, LOG: str(logs / "engine")}
    yield from run_engine(
        Kind(SIMULATOR, environ, stand_in()),
        site,
        "pushed-hccl",
        simulated.folder(0),
        simulated,
        command=lambda config: simulator(config, python=python),
        weightTransfer={"backend": "hccl"},
    )


@pytest.fixture(scope="module")
def trainer(pushed: EngineProcess, site: Site, simulated: SimulatedModels, logs: Path) -> Iterator[Trainer]:
    one = Trainer(pushed, site, simulated, **{LOG: str(logs / "trainer")})
    yield one
    one.close()


@pytest.fixture(scope="module")
def reader(pushed: EngineProcess) -> Iterator[Client]:
    one = Client(pushed)
    yield one
    one.close_client()


@pytest.fixture
def engine_side(logs: Path) -> Communicators:
    return Communicators(logs / "engine")


@pytest.fixture
def trainer_side(logs: Path) -> Communicators:
    return Communicators(logs / "trainer")


def serves(reader: Client, models: SimulatedModels, version: int) -> None:
    answer = reader.complete(models.short_prompt, models.longest_answer)
    assert (answer.status, answer.version, answer.text) == (200, version, models.answer(version, models.short_prompt))


def test_a_push_is_served_when_it_is_verified(trainer: Trainer, reader: Client, simulated: SimulatedModels):
    assert {"source/Trainer", "backend/hccl"} <= set(trainer.operator.state().facts.capabilities)
    for version, buffer in ((1, 1 << 16), (2, 1 << 12)):
        state = trainer.update(version, "hccl", bufferBytes=buffer)
        assert held(state) == (WeightsState.VERIFIED, version, simulated.digest(version))
        assert state.transferred is not None
        assert state.transferred.digest_source is DigestSource.TRAINER
        assert set(state.transferred.phase_seconds) == {"init", "start", "update", "finish"}
        serves(reader, simulated, version)


def test_a_group_is_formed_once_and_anew_after_a_failure_and_nobody_keeps_an_old_one(
    trainer: Trainer,
    reader: Client,
    simulated: SimulatedModels,
    engine_side: Communicators,
    trainer_side: Communicators,
):
    trainer.update(3, "hccl")
    made, destroyed = engine_side.counts()
    assert made - destroyed == 1, "the engine keeps the last one"
    kept = {"keeps": "group-1", "group": "group-1"}
    for version, formed in ((1, True), (2, False), (3, False)):
        transferred = trainer.update(version, "hccl", **kept).transferred
        assert transferred is not None
        assert ("init" in transferred.phase_seconds) is formed
        serves(reader, simulated, version)
    assert engine_side.counts() == (made + 1, destroyed + 1)
    told, _ = trainer.fail("hccl", 2, omit=["model.norm.weight"], **kept)
    assert "model.norm.weight" in told
    assert "engine-0" in told
    assert engine_side.counts() == (made + 1, destroyed + 2), "of a failed update nothing stays"
    assert "there is no group: init comes first" in trainer.send("hccl", 2, **kept)["error"]
    trainer.update(1, "hccl")
    assert engine_side.counts() == (made + 2, destroyed + 2)
    serves(reader, simulated, 1)
    sent, left = trainer_side.counts()
    assert sent == left, "a sender that is closed or has failed keeps none"


def test_their_own_static_function_sends_over_our_group(
    trainer: Trainer, reader: Client, simulated: SimulatedModels, trainer_side: Communicators
):
    """vLLM-Ascend's HCCLWeightTransferEngine.trainer_send_weights, digested on its way, as docs/trainer.md has it."""
    state = trainer.update(2, "hccl", helper=True)
    assert state.transferred is not None
    assert state.transferred.digest_source is DigestSource.TRAINER
    serves(reader, simulated, 2)
    made, destroyed = trainer_side.counts()
    assert made == destroyed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"add": ["model.layers.9.extra"]}, "model.layers.9.extra"),
        ({"halve": ["model.norm.weight"]}, "model.norm.weight"),
    ],
    ids=["unknown", "other-shape"],
)
@pytest.mark.parametrize("silent", [False, True], ids=["said at the start", "in a broadcast"])
def test_what_does_not_fit_the_model_is_told_by_name_and_nothing_is_touched(
    trainer: Trainer, reader: Client, simulated: SimulatedModels, change: dict[str, list[str]], words: str, silent: bool
):
    trainer.update(1, "hccl")
    told, state = trainer.fail("hccl", 2, silent=silent, **change)
    failure = operation_of(state).failure
    assert failure is not None
    assert failure.reason == "CoverageFailed"
    assert words in failure.message
    assert words in told
    assert held(state) == (WeightsState.VERIFIED, 1, simulated.digest(1))
    trainer.update(3, "hccl")
    serves(reader, simulated, 3)


def test_a_tensor_that_cannot_be_read_ends_both_sides_at_once_in_the_trainer_s_words(
    trainer: Trainer, reader: Client, simulated: SimulatedModels
):
    """HCCL cannot break off a broadcast: the rest goes out as zeros, and is never taken for weights."""
    told, state = trainer.fail("hccl", 2, half_way="breaks")
    assert told == "ValueError: the gather failed on rank 3"
    failure = operation_of(state).failure
    assert failure is not None
    assert failure.message == 'the trainer broke off: "ValueError: the gather failed on rank 3"'
    assert state.weights.state is WeightsState.UNCERTAIN
    assert reader.complete("abc", 1).status == 503
    trainer.update(1, "hccl")
    serves(reader, simulated, 1)


def test_a_trainer_that_dies_in_mid_push_ends_it(
    trainer: Trainer, reader: Client, simulated: SimulatedModels, site: Site, pushed: EngineProcess
):
    mortal = Trainer(pushed, site, simulated)
    told, state = mortal.fail("hccl", 2, half_way="dies", bufferBytes=1 << 12)
    mortal.close()
    assert told == "it ended with 9"
    failure = operation_of(state).failure
    assert failure is not None
    assert "HCCL error: remote error" in failure.message
    assert "bytes" in failure.message
    trainer.update(2, "hccl")
    serves(reader, simulated, 2)


def test_a_trainer_that_goes_silent_in_mid_push_holds_the_engine_up_to_the_deadline_only(
    trainer: Trainer, reader: Client, simulated: SimulatedModels
):
    epoch = trainer.operator.next_epoch()
    trainer.arm(epoch, 2)
    trainer.order(epoch, 2, "hccl", deadlineSeconds=10)
    told = trainer.send("hccl", 2, half_way="hangs", bufferBytes=1 << 12)
    assert "up to the deadline" in told["error"]
    assert operation_of(trainer.ended()).failure is not None
    trainer.operator.update(1, "step-1")
    serves(reader, simulated, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hccl_id": b64encode(b"x" * (HCCL_ID_BYTES - 1)).decode()}, "hccl_id: Value error, has 4107 bytes"),
        ({"hccl_id": b64encode(b"x" * (HCCL_ID_BYTES + 1)).decode()}, "hccl_id: Value error, has 4109 bytes"),
        ({"hccl_id": "gASV*"}, "hccl_id: Value error, is not base64"),
        ({"hccl_id": 7}, "hccl_id: Value error, is not base64"),
        ({}, "hccl_id: Field required"),
        ({"hccl_id": b64encode(b"x" * HCCL_ID_BYTES).decode()}, "rank 1 of 2 cannot join: HCCL error: parameter error"),
        ({"master_address": "127.0.0.1", "master_port": 29500}, "HcclSender"),
    ],
    ids=["short", "long", "no-base64", "number", "none", "nobody-s", "vllm-ascend-s-own-rendezvous"],
)
def test_an_id_that_is_none_touches_nothing(
    trainer: Trainer, reader: Client, simulated: SimulatedModels, change: dict[str, Any], words: str
):
    trainer.operator.update(1, "step-1")
    epoch = trainer.operator.next_epoch()
    trainer.arm(epoch, 2)
    trainer.order(epoch, 2, "hccl")
    info = {"rank_offset": 1, "world_size": 2} | change
    status, message = trainer.call("init_weight_transfer_engine", {"init_info": info})
    assert (status, words in message) == (502, True), message
    state = trainer.ended()
    assert state.weights.state is WeightsState.VERIFIED
    trainer.operator.do("cancel", epoch)
    serves(reader, simulated, 1)
