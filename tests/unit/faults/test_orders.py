"""Damaged copies: only what was asked for is damaged, and never the original."""

import io
import json
from pathlib import Path

import pytest

from rollfleet_engine.faults.copies import tensors_of
from rollfleet_engine.faults.injector import Strike
from rollfleet_engine.faults.orders import FOLDER, Orders
from rollfleet_engine.faults.plan import Call, FaultType, Plan, PlanError, Rule, drawn_plan
from rollfleet_engine.guard.log import GuardLog
from rollfleet_engine.tools.tiny_model import make_simulated
from rollfleet_engine.weights.coverage import layer_of, read_model_tensors
from rollfleet_engine.weights.errors import CheckpointError
from rollfleet_engine.weights.staging import stage_checkpoint
from tests.support.guards import make_config

NORM = "model.norm.weight"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_simulated(tmp_path, checkpoints=2, seed=3, shards=2)
    return tmp_path


class Told:
    """Orders, with their log."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stream = io.StringIO()
        config = make_config(model={"path": str(root / "base"), "servedName": "policy"}, checkpoints_path=str(root))
        self.orders = Orders(config, GuardLog({}, self.stream))

    def prepare(self, plan: Plan, strike: Strike | None = None, **changes: object) -> str:
        """The path that the guard is given."""
        source = {"type": "Checkpoint", "root": "Checkpoints", "path": "step-1"} | changes
        body = json.dumps({"incarnation": "i", "epoch": 2, "version": 1, "source": source}).encode()
        assert self.orders.wanted(plan, strike)
        return str(json.loads(self.orders.rewrite(Call.PREPARE, body, plan, strike))["source"]["path"])

    def digest(self, path: str) -> str:
        """As the guard stages it."""
        staged = stage_checkpoint(self.root, path, read_model_tensors(self.root / "base"))
        staged.close()
        return staged.digest


def plan_of(call: Call, fault: FaultType, **parameters: str) -> tuple[Plan, Strike]:
    """A plan of one rule, and its strike."""
    rule = Rule(call=call, fault=fault, at=(1,), **parameters)
    return Plan(seed=9, rules=(rule,)), Strike(rule, 1)


def test_a_corrupt_tensor_changes_the_digest_and_not_the_original(root: Path):
    told = Told(root)
    good = told.digest("step-1")
    plan, strike = plan_of(Call.PREPARE, FaultType.CORRUPT, tensor=NORM)
    path = told.prepare(plan, strike)
    assert path.startswith(f"{FOLDER}/")
    assert told.digest(path) != good
    assert told.digest("step-1") == good
    before, after = (_bytes(root / each) for each in ("step-1", path))
    assert [name for name in before if before[name] != after[name]] == [NORM]
    assert '"tensor": "model.norm.weight"' in told.stream.getvalue()


def _bytes(folder: Path) -> dict[str, bytes]:
    return {
        name: path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
        for name, (path, entry) in tensors_of(folder).items()
    }


def test_files_without_damage_are_shared(root: Path):
    told = Told(root)
    plan, strike = plan_of(Call.PREPARE, FaultType.CORRUPT, tensor=NORM)
    path = told.prepare(plan, strike)
    hurt = tensors_of(root / "step-1")[NORM][0].name
    for file in (root / "step-1").iterdir():
        assert file.samefile(root / path / file.name) == (file.name != hurt)


def test_the_seed_chooses_the_tensor_always_the_same(root: Path):
    plan, strike = plan_of(Call.PREPARE, FaultType.CORRUPT)
    digests = set()
    for _ in range(2):
        told = Told(root)
        digests.add(told.digest(told.prepare(plan, strike)))
        told.orders.close()
    assert len(digests) == 1
    told = Told(root)
    assert told.digest(told.prepare(plan.model_copy(update={"seed": 10}), strike)) not in digests


def test_a_tensor_changes_when_the_transfer_passes(root: Path):
    told = Told(root)
    plan, strike = plan_of(Call.TRANSFER, FaultType.CORRUPT)
    path = told.prepare(plan)
    good = told.digest("step-1")
    assert told.digest(path) == good
    stamps = {file.name: file.stat().st_mtime_ns for file in (root / path).iterdir()}
    body = b'{"epoch": 2}'
    assert told.orders.rewrite(Call.TRANSFER, body, plan, None) == body
    assert told.digest(path) == good
    assert told.orders.rewrite(Call.TRANSFER, body, plan, strike) == body
    assert told.digest(path) != good
    assert told.digest("step-1") == good
    assert {file.name: file.stat().st_mtime_ns for file in (root / path).iterdir()} == stamps


@pytest.mark.parametrize("shards", [1, 2])
def test_a_skipped_layer_is_missing_and_nothing_else(tmp_path: Path, shards: int):
    make_simulated(tmp_path, checkpoints=1, seed=3, shards=shards)
    told = Told(tmp_path)
    plan, strike = plan_of(Call.PREPARE, FaultType.SKIP, layer="model.layers.1")
    path = told.prepare(plan, strike)
    before, after = (_bytes(tmp_path / each) for each in ("step-1", path))
    assert after == {name: raw for name, raw in before.items() if layer_of(name) != "model.layers.1"}
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\."):
        told.digest(path)


def test_a_repeated_order_gets_the_same_copy_and_a_new_one_removes_it(root: Path):
    told = Told(root)
    plan, strike = plan_of(Call.PREPARE, FaultType.CORRUPT)
    path = told.prepare(plan, strike)
    assert told.prepare(plan) == path
    assert told.prepare(plan, path="step-2") == "step-2"
    assert not (root / path).exists()
    path = told.prepare(plan, strike, path="step-2")
    told.orders.close()
    assert list((root / FOLDER).iterdir()) == []


def test_the_model_s_own_folder_can_be_damaged_too(root: Path):
    told = Told(root)
    plan, strike = plan_of(Call.PREPARE, FaultType.CORRUPT)
    path = told.prepare(plan, strike, root="Model", path=".")
    assert path.startswith(FOLDER)
    assert told.digest(path) != told.digest("base")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"no json", "JSONDecodeError"),
        (b"{}", "KeyError"),
        (b'{"epoch": 2, "version": 1, "source": {"path": "../step-1"}}', '\\"..\\"'),
        (b'{"epoch": 2, "version": 1, "source": {"path": "step-9"}}', "no tensors in"),
    ],
)
def test_orders_that_a_guard_refuses_pass_as_they_are(root: Path, body: bytes, words: str):
    told = Told(root)
    plan, strike = plan_of(Call.PREPARE, FaultType.CORRUPT)
    assert told.orders.rewrite(Call.PREPARE, body, plan, strike) == body
    assert words in told.stream.getvalue()
    assert "faults.not_done" in told.stream.getvalue()


def test_a_tensor_that_there_is_not(root: Path):
    told = Told(root)
    plan, strike = plan_of(Call.PREPARE, FaultType.CORRUPT, tensor="lora.weight")
    assert told.prepare(plan, strike) == "step-1"
    assert "no 'lora.weight' among" in told.stream.getvalue()


def test_damage_needs_a_folder_to_write_to(root: Path, monkeypatch: pytest.MonkeyPatch):
    plan, _ = plan_of(Call.PREPARE, FaultType.CORRUPT)
    harmless, _ = plan_of(Call.ARM, FaultType.CUT)
    without = Orders(make_config(), GuardLog({}, stream := io.StringIO()))
    with pytest.raises(PlanError, match="checkpointsPath"):
        without.require(plan)
    assert without.require(harmless) is harmless
    reduced = without.reduced(drawn_plan(1))
    assert not any(rule.fault in (FaultType.CORRUPT, FaultType.SKIP) for rule in reduced.rules)
    assert "faults.left_out" in stream.getvalue()
    told = Told(root)
    assert told.orders.reduced(plan) is plan
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(PlanError, match="cannot be written to"):
        told.orders.require(plan)
