"""What of a weight update vLLM-Ascend 0.23.0.post1 does itself, by its own worker's code, and what it leaves to ours.

Its methods are taken out of its sources and run with everything else stubbed, as devtools/before_rlconfig.py does it.
What our backends use of it is compared as `make check-ascend` compares a checkout.
"""

import ast
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from devtools import ascend_sdist, vllm_parsers
from devtools.ascend_rules import IPC, RULES
from devtools.check_ascend import differences

WORKER = "vllm_ascend/worker/worker.py"
OWNER = "NPUWorker"
METHODS = (
    *("_check_weight_transfer_engine", "_check_nz_disabled", "init_weight_transfer_engine"),
    *("start_weight_update", "update_weights", "finish_weight_update"),
)
# Of main: the trainer's own engine and how it packs, which came later, and why its receiving is not used.
LATER = {
    "npu_generate_uuid": "its arguments are ()",  # none is given
    "NPUIPCWeightTransferEngine.start_weight_update": "it is not there",
    "NPUIPCTrainerWeightTransferEngine.trainer_init": "it is not there",
    "NPUIPCTrainerWeightTransferEngine._send_unpacked": "it is not there",
}


class Engine:
    """A transfer engine that notes what it is asked for. Nothing else of 0.23's base class is called."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def parse_init_info(self, given: dict[str, Any]) -> dict[str, Any]:
        return given

    def parse_update_info(self, given: dict[str, Any]) -> dict[str, Any]:
        return given

    def init_transfer_engine(self, info: dict[str, Any]) -> None:
        self.asked.append(f"init {info['type']}")

    def receive_weights(self, info: dict[str, Any], load_weights: Any) -> None:
        assert callable(load_weights)
        self.asked.append(f"receive {info['type']}")


def class_of(file: Path, owner: str) -> ast.ClassDef:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)


@pytest.fixture
def worker() -> Any:
    """NPUWorker with these methods only. Preparing or processing layers would import vLLM, which is not here."""
    found = class_of(ascend_sdist.ensure() / WORKER, OWNER)
    found.bases, found.decorator_list = [], []
    found.body = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in METHODS]
    assert len(found.body) == len(METHODS)
    torch = SimpleNamespace(Tensor=object, device=nullcontext, npu=SimpleNamespace(synchronize=lambda: None))
    scope: dict[str, Any] = {"torch": torch, "envs_ascend": SimpleNamespace(VLLM_ASCEND_ENABLE_NZ=0)}
    exec(compile(ast.Module([found], []), WORKER, "exec"), scope)  # noqa: S102 - of a release that is named by its hash
    made = scope[OWNER]()
    made.weight_transfer_engine, made.device, made.model_runner = Engine(), "npu", SimpleNamespace(model=None)
    made._weight_update_active, made._is_checkpoint_format = False, True
    return made


def test_told_of_kernel_format_it_leaves_the_layers_to_us(worker: Any) -> None:
    """rollfleet_engine.vllm.phases says so, and asks our extension for the second and fourth phase itself."""
    worker.init_weight_transfer_engine({"type": "checkpoint"})
    worker.start_weight_update(is_checkpoint_format=False)
    assert worker._weight_update_active
    worker.update_weights({"type": "checkpoint"})
    worker.finish_weight_update()
    assert not worker._weight_update_active
    assert worker.weight_transfer_engine.asked == ["init checkpoint", "receive checkpoint"]


def test_told_nothing_it_prepares_layers_by_itself(worker: Any) -> None:
    """What the test before would see."""
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        worker.start_weight_update()


def test_it_makes_the_engine_without_the_model_s_configuration() -> None:
    """So our extension tells the engine, when it is first asked for."""
    made = next(
        ast.unparse(node)
        for node in ast.walk(class_of(ascend_sdist.ensure() / WORKER, OWNER))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("create_engine")
    )
    config = "self.vllm_config.weight_transfer_config, self.vllm_config.parallel_config"
    assert made == f"WeightTransferEngineFactory.create_engine({config}, self.model_runner.get_model())"


def test_vllm_s_own_worker_does_the_same() -> None:
    """Which runs on CPUs; tests/contract and tests/vllm run it (make contract-023)."""
    folder = vllm_parsers.ensure("0.23.0") / "vllm"
    base = class_of(folder / "distributed" / "weight_transfer" / "base.py", "WeightTransferEngine")
    names = {node.name: node for node in base.body if isinstance(node, ast.FunctionDef)}
    assert [each.arg for each in names["__init__"].args.args] == ["self", "config", "parallel_config", "model"]
    assert not {"start_weight_update", "finish_weight_update", "reset_weight_update_target"} & names.keys()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_our_backends_use_of_it_is_there(rule: Any) -> None:
    found = list(differences(ascend_sdist.ensure(), rule))
    if rule.name in LATER:
        assert rule.file == IPC
        assert [text.partition(", not")[0] for text in found] == [LATER[rule.name]]
    else:
        assert found == []
