"""What we rely on in vLLM-Ascend and torch_npu: our code uses no more, the stand-ins keep it, and a change is seen."""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from devtools import torch_npu_rules
from devtools.ascend_rules import RULES, WRAPPER, Rule
from devtools.check_ascend import check, differences, main

ROOT = Path(__file__).resolve().parents[3]
STAND_IN = ROOT / "tests" / "support" / "ascend"
TRANSPORT = ROOT / "engine" / "rollfleet_transport"
UPSTREAM = ("vllm_ascend", "torch_npu")
ALL = (*RULES, *torch_npu_rules.RULES)


def trees(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for file in sorted(folder.rglob("*.py")):
        yield file, ast.parse(file.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Module and name of each import of theirs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UPSTREAM:
            yield from ((str(node.module), alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] in UPSTREAM)


def test_only_the_transport_imports_theirs_and_only_what_has_a_row() -> None:
    rows = {(rule.file.removesuffix(".py").replace("/", "."), rule.name.partition(".")[0]) for rule in ALL}
    seen = set()
    for package in ("engine", "operator", "kernels"):
        for file, tree in trees(ROOT / package):
            found = set(imports(tree))
            assert not found or file.is_relative_to(TRANSPORT), file
            seen |= found
    assert seen, "nothing was found: has the package another name now?"
    assert seen <= rows, seen - rows


def test_nor_does_it_use_members_without_a_row() -> None:
    """HCCL's names all begin with its own."""
    members = {rule.name.rpartition(".")[2] for rule in RULES}
    used = {
        node.attr
        for _, tree in trees(TRANSPORT)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith(("hccl", "Hccl"))
    }
    assert used == {"hcclGetUniqueId", "hcclCommInitRank", "hcclBroadcast", "hcclCommDestroy", "hcclUint8"} & members


INSIDE = (  # of vLLM-Ascend, and not called by us
    *("HCCLLibrary.HCCL_CHECK", "register_engine", "NPUIPCWeightTransferEngine.start_weight_update"),
    *("NPUIPCTrainerWeightTransferEngine.trainer_init", "NPUIPCTrainerWeightTransferEngine._send_unpacked"),
    "packed_npu_ipc_producer",
)


@pytest.mark.parametrize("rule", [rule for rule in ALL if rule.name not in INSIDE], ids=lambda rule: str(rule.name))
def test_the_stand_in_has_the_names_arguments_and_values_of_the_table(rule: Rule) -> None:
    assert list(differences(STAND_IN, rule, bodies=False)) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("ctypes.c_byte * 4108", "ctypes.c_byte * 8192", "not \"[('internal', ctypes.c_byte * 4108)]\""),
        ("hcclUint8 = 7", "hcclUint8 = 9", "it is '9', not '7'"),
        ("def hcclCommDestroy(", "def hcclCommFinalize(", "it is not there"),
        ("world_size: int, unique_id", "unique_id: object, world_size", "its arguments are"),
    ],
)
def test_a_checkout_that_differs_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    shutil.copytree(STAND_IN, tmp_path / "checkout")
    file = tmp_path / "checkout" / WRAPPER
    before = file.read_text(encoding="utf-8")
    assert old in before
    file.write_text(before.replace(old, new), encoding="utf-8")
    assert main([str(tmp_path / "checkout")]) == 1
    assert told in capsys.readouterr().out


def torch_npu_at(folder: Path) -> Path:
    """Something that says what torch_npu's C++ must say, and the stand-in's Python."""
    shutil.copytree(STAND_IN, folder)
    for text in torch_npu_rules.TEXTS:
        file = folder / text.file
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as sink:
            sink.write(f"  {text.says.replace(' = ', '  =  ')}\n")
    return folder


@pytest.mark.parametrize("text", torch_npu_rules.TEXTS, ids=lambda text: str(text.why))
def test_a_torch_npu_that_says_otherwise_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: torch_npu_rules.Text
) -> None:
    checkout = torch_npu_at(tmp_path / "torch_npu")
    assert check(checkout, (), torch_npu_rules.TEXTS) == 0
    file = checkout / text.file
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(line for line in lines if line.split() != text.says.split()), encoding="utf-8")
    assert check(checkout, (), torch_npu_rules.TEXTS) == 1
    assert f"DIFFERS {text.file}: {text.says}" in capsys.readouterr().out


def test_what_is_no_checkout_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is this a checkout of vllm-ascend?" in capsys.readouterr().err
