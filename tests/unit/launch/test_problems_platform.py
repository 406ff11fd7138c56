"""What is wrong with devices, driver, versions, memory and models, and what is said of it."""

import ast
import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devtools import preflight_page
from devtools.preflight_page import ASCEND, CPU, DEVICES, EXAMPLES, MODEL, SOFTWARE, Example, build_ascend, build_config
from rollfleet_engine.launch import problems_model, problems_platform, versions
from rollfleet_engine.launch.chips import MOST_CHIPS, chips_of
from rollfleet_engine.launch.facts import (
    AscendSoftware,
    Devices,
    EngineKind,
    Facts,
    Installation,
    Memory,
    ModelFolder,
    Plugin,
)
from rollfleet_engine.launch.memory_needs import (
    GIB,
    MIB,
    largest_queue_bytes,
    needs_queues,
    queues_bytes,
    sleeping_bytes,
)
from rollfleet_engine.launch.plan import Plan, Refused, plan
from rollfleet_engine.launch.problems_model import model_problems
from rollfleet_engine.launch.problems_platform import platform_problems, platform_warnings
from rollfleet_engine.launch.termination import encode, exit_code_of
from rollfleet_engine.launch.versions import PAIRINGS, pairing_of
from rollfleet_protocol.engine_config import EngineConfig
from rollfleet_protocol.termination import Problem, TerminationMessage, summary


def problems(config: EngineConfig, facts: Facts) -> list[Problem]:
    return [*platform_problems(config, facts), *model_problems(config, facts)]


def causes(facts: Facts, **config: object) -> list[str]:
    return [problem.cause for problem in problems(build_config(**config), facts)]


def test_nothing_is_wrong_with_what_is_right():
    assert problems(build_config(), build_ascend()) == []
    assert list(platform_warnings(build_config(), build_ascend())) == []
    assert problems(build_config(), preflight_page.build_cpu()) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.section}-{EXAMPLES.index(example)}")
def test_each_example_of_the_page_is_one_problem(example: Example):
    (problem,) = example.problems()
    assert problem.cause
    assert problem.remedy


@pytest.mark.parametrize("module", [problems_platform, problems_model, versions])
def test_the_page_has_every_problem(module: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """Each place of the module that makes a problem makes one of an example of the page."""
    made = {node.lineno for node in ast.walk(ast.parse(inspect.getsource(module))) if _makes_a_problem(node)}
    seen = set()

    def recorded(**fields: object) -> Problem:
        seen.add(sys._getframe(1).f_lineno)
        return Problem(**fields)

    monkeypatch.setattr(module, "Problem", recorded)
    for example in EXAMPLES:
        example.problems()
    begins = {max(line for line in made if line <= place) for place in seen}
    assert begins == made


def _makes_a_problem(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Problem"


def test_the_page_is_as_it_would_be_made():
    page = Path(inspect.getfile(preflight_page)).parents[1] / preflight_page.PAGE
    text = page.read_text(encoding="utf-8")
    assert preflight_page.render(text) == text


def test_simulated_engines_need_no_device():
    facts = replace(build_ascend(devices=Devices(), memory=Memory(limit=1, shared_total=1, shared_free=1)),
                    kind=EngineKind.SIMULATOR)  # fmt: skip
    assert list(platform_problems(build_config(), facts)) == []
    assert list(platform_warnings(build_config(), facts)) == []


def test_chips_are_judged_by_their_numbers_whatever_the_order():
    right = replace(DEVICES, announced="Ascend910-1,Ascend910-0", visible="0-1")
    assert causes(build_ascend(devices=right)) == []


def test_both_lists_are_compared():
    wrong = replace(DEVICES, announced="Ascend910-0,Ascend910-2", visible="0,1")
    (cause,) = causes(build_ascend(devices=wrong))
    assert "annotation says 0,2" in cause
    assert "1 may be another pod's" in cause


@pytest.mark.parametrize("announced", ["Ascend910-2c-100-0", "", "{}", "void"])
def test_what_is_no_list_of_whole_chips_is_not_compared(announced: str):
    assert causes(build_ascend(devices=replace(DEVICES, announced=announced))) == []


def test_the_950_family_has_no_devmm_svm():
    devices = replace(DEVICES, managers=("davinci_manager", "hisi_hdc"))
    assert causes(build_ascend(devices=devices)) != []
    for named in ({"resourceName": "huawei.com/npu"}, {"resourceName": "example.com/950", "profile": "A5"}):
        assert causes(build_ascend(devices=devices), accelerator={"perPod": 2, **named}) == []


@pytest.mark.parametrize(
    ("text", "chips"),
    [
        ("0", {0}),
        ("0,1", {0, 1}),
        (" 3 , 1", {1, 3}),
        ("0-3", {0, 1, 2, 3}),
        ("0-1,5", {0, 1, 5}),
        ("Ascend910-0,Ascend910-7", {0, 7}),
        ("Ascend310P-2", {2}),
        ("npu-3", {3}),
        ("", None),
        ("void", None),
        ("3-1", None),
        ("-1", None),
        ("0,,1", None),
        ("129", None),
        ("0-9999", None),
        ("Ascend910-2c-100-0", None),
        ("٣", None),
    ],
)
def test_lists_of_chips(text: str, chips: set[int] | None):
    assert chips_of(text) == chips


CHIPS = st.frozensets(st.integers(0, MOST_CHIPS), min_size=1)


@given(chips=CHIPS, product=st.sampled_from(["", "Ascend910-", "Ascend310P-", "npu-"]))
def test_a_list_that_is_written_is_read(chips: frozenset[int], product: str):
    assert chips_of(",".join(f"{product}{chip}" for chip in chips)) == chips


@given(text=st.text(alphabet="0123456789,-Ascendnpu vcoid\n٣", max_size=60))
def test_no_list_is_too_odd(text: str):
    found = chips_of(text)
    assert found is None or all(0 <= chip <= MOST_CHIPS for chip in found)


@given(seen=CHIPS, announced=CHIPS)
def test_devices_of_others_need_a_change_and_missing_ones_may_come_back(
    seen: frozenset[int], announced: frozenset[int]
):
    devices = replace(DEVICES, numbers=tuple(sorted(seen)), announced=",".join(str(chip) for chip in announced))
    found = problems(build_config(), build_ascend(devices=devices))
    if seen == announced:
        assert found == []
    else:
        (problem,) = found
        assert problem.retry_may_cure == (seen < announced)


@pytest.mark.parametrize("pairing", PAIRINGS, ids=lambda pairing: pairing.vllm_ascend)
def test_every_row_fits_itself(pairing: versions.Pairing):
    facts = build_ascend(
        installation=replace(
            ASCEND,
            release=f"{pairing.vllm}+empty",
            versions={
                "vllm-ascend": pairing.vllm_ascend,
                "torch": f"{pairing.torch}+cpu",
                "torch-npu": pairing.torch_npu,
                "triton-ascend": pairing.triton_ascend,
            },
        ),
        ascend=replace(SOFTWARE, cann=pairing.cann),
    )
    assert causes(facts) == []
    assert list(platform_warnings(build_config(), facts)) == []
    assert pairing_of(f"v{pairing.vllm_ascend}") is pairing


def test_a_post_release_goes_with_what_its_release_goes_with():
    assert pairing_of("0.23.0.post1") is pairing_of("0.23.0")
    assert pairing_of("0.23.0rc1") is not pairing_of("0.23.0")


@pytest.mark.parametrize(
    ("release", "plugin", "words"),
    [
        ("0.27.1", "0.24.0rc1", ["0.24.0"]),
        ("0.31.0", "0.30.0", ["goes with vLLM 0.30.0"]),
        ("0.30", "0.30.0", []),
        ("0.27.1", "0.23.1.dev12+g1a2b3c", []),
        ("0.27.1", "", []),
        ("nonsense", "0.23.0", []),
    ],
)
def test_vllm_and_its_plugin(release: str, plugin: str, words: list[str]):
    have = {"vllm-ascend": plugin} if plugin else {}
    found = causes(build_ascend(installation=replace(ASCEND, release=release, versions=have)))
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)


def test_what_is_not_known_to_go_together_is_a_warning():
    newer = {"vllm-ascend": "0.23.0", "torch": "2.10.0", "torch-npu": "2.10.0.post5", "triton-ascend": "3.2.2"}
    facts = build_ascend(installation=replace(ASCEND, versions=newer), ascend=AscendSoftware(driver="25.2.0"))
    assert causes(facts) == []
    cann, npu = platform_warnings(build_config(), facts)
    assert "CANN" in cann
    assert "torch-npu is 2.10.0.post5" in npu
    development = build_ascend(installation=replace(ASCEND, versions={"vllm-ascend": "0.23.1.dev1"}))
    (warning,) = platform_warnings(build_config(), development)
    assert "between releases" in warning


def test_message_queues_need_room_where_workers_are_processes():
    one, eight = build_config(), build_config(tensorParallelSize=8)
    ascend, cpu = build_ascend(), preflight_page.build_cpu()
    assert not needs_queues(one, ascend)
    assert needs_queues(build_config(pipelineParallelSize=2), ascend)
    assert needs_queues(build_config(dataParallelSize=2), ascend)
    assert needs_queues(one, cpu)
    # 24 MiB + 2 flags, ten times; what shm_broadcast.py's check_shm_free_space is called with.
    assert largest_queue_bytes(one, ascend) == 251_658_260
    assert queues_bytes(one, cpu) == 10 * (16 * MIB + 2) + 251_658_260
    assert queues_bytes(eight, ascend) == 10 * (16 * MIB + 9) + 8 * 251_658_260 + 3 * 24 * MIB
    wide = replace(ascend, environ={"VLLM_MQ_MAX_CHUNK_BYTES_MB": "64"})
    assert largest_queue_bytes(eight, wide) == 10 * (64 * MIB + 9)


def test_shared_memory_that_may_fill_up_is_a_warning():
    eight = build_config(tensorParallelSize=8)
    facts = build_ascend(memory=Memory(shared_total=GIB, shared_free=GIB))
    assert problems(eight, facts) == []
    (warning,) = platform_warnings(eight, facts)
    assert "/dev/shm has 1024 MiB" in warning
    assert "2152 MiB" in warning


def test_only_who_sleeps_needs_room_for_the_weights():
    facts = build_ascend(memory=Memory(limit=GIB))
    assert causes(facts) == []
    sleepy = build_config(sleepMode=True)
    assert sleeping_bytes(sleepy, facts) == MODEL.least_bytes
    assert len(problems(sleepy, facts)) == 1
    assert sleeping_bytes(sleepy, preflight_page.build_cpu()) == 0
    assert problems(sleepy, build_ascend(memory=Memory(limit=MODEL.least_bytes))) == []


TEXTS = st.one_of(
    st.sampled_from(["", "0", "0-1", "Ascend910-0", "0.23.0", "2.10.0.post4", "9.1.0", "\ud800", "x" * 5000]),
    st.text(max_size=40),
)
NUMBERS = st.one_of(st.none(), st.integers(0, 2**64))
VERSIONED = st.dictionaries(st.sampled_from(["vllm-ascend", "torch", "torch-npu", "triton-ascend"]), TEXTS)
INSTALLATIONS = st.builds(
    Installation,
    python=TEXTS,
    release=TEXTS,
    platforms=st.sampled_from([(), ("vllm_ascend",)]),
    versions=VERSIONED,
    flash_attention_error=st.one_of(st.none(), TEXTS),
)
MODELS = st.builds(
    ModelFolder,
    exists=st.booleans(),
    is_folder=st.booleans(),
    has_config=st.booleans(),
    config_error=TEXTS,
    weight_files=st.lists(TEXTS, max_size=3).map(tuple),
    missing_files=st.lists(TEXTS, max_size=9).map(tuple),
    cut_files=st.lists(TEXTS, max_size=9).map(tuple),
    broken_files=st.lists(TEXTS, max_size=9).map(tuple),
    least_bytes=st.integers(0, 2**60),
    error=TEXTS,
)
FACTS = st.builds(
    Facts,
    kind=st.sampled_from(EngineKind),
    installation=INSTALLATIONS,
    model=MODELS,
    environ=st.dictionaries(st.sampled_from(["VLLM_MQ_MAX_CHUNK_BYTES_MB", "A"]), TEXTS),
    cache_errors=st.dictionaries(TEXTS, TEXTS, max_size=3),
    devices=st.one_of(
        st.none(),
        st.builds(
            Devices,
            numbers=st.lists(st.integers(0, 9999), max_size=4).map(tuple),
            managers=st.sampled_from([(), ("hisi_hdc",)]),
            closed=st.lists(TEXTS, max_size=2).map(tuple),
            announced=TEXTS,
            visible=st.one_of(st.none(), TEXTS),
            remapped=st.one_of(st.none(), TEXTS),
            runtime=st.booleans(),
        ),
    ),
    ascend=st.one_of(st.none(), st.builds(AscendSoftware, TEXTS, TEXTS, st.booleans(), st.booleans())),
    memory=st.builds(Memory, NUMBERS, NUMBERS, NUMBERS),
)
ARGUMENTS = st.lists(
    st.one_of(st.sampled_from(["--seed", "--tensor-parallel-size=99", "8"]), st.text(max_size=9)),
    max_size=5,
)


@given(facts=FACTS, arguments=ARGUMENTS, devices=st.one_of(st.none(), st.integers(1, 64)))
def test_whatever_is_seen_each_problem_has_a_remedy_and_can_be_told(
    facts: Facts, arguments: list[str], devices: int | None
):
    asked = None if devices is None else {"resourceName": "huawei.com/Ascend910", "perPod": devices}
    config = build_config(engineArgs=arguments, accelerator=asked)
    found = tuple(problems(config, facts))
    assert all(problem.cause and problem.remedy for problem in found)
    assert all(isinstance(warning, str) and warning for warning in platform_warnings(config, facts))
    message = encode(TerminationMessage(exit_code=exit_code_of(found), problems=found))
    assert len(message) <= 4096
    assert summary(message.decode()).strip()


def test_the_fleets_status_tells_cause_and_remedy():
    """As the kubelet keeps it and the operator reads it (clients/podviews.py)."""
    found = tuple(problems(build_config(), build_ascend(devices=replace(DEVICES, announced="Ascend910-0"))))
    told = summary(encode(TerminationMessage(exit_code=exit_code_of(found), problems=found)).decode())
    assert "the container has NPUs 0,1, and the pod's annotation says 0" in told
    assert "mount no devices by hand" in told


def test_what_canns_images_set_contradicts_nothing():
    """LCCL_DETERMINISTIC=0 stands in every image of CANN; batch invariance sets 1."""
    plugin = Plugin(has_rl_config=False, device="A2", custom_kernels=True, batch_invariant_kernels=True)
    spoken = replace(ASCEND, release="0.27.1", versions={}, plugin=plugin)
    facts = build_ascend(installation=spoken, environ={"LCCL_DETERMINISTIC": "0"})
    planned = plan(build_config(rlConfig={"enableBatchInvariant": True}), facts)
    assert isinstance(planned, Plan), planned
    assert planned.env["LCCL_DETERMINISTIC"] == "1"
    other = replace(facts, environ={"LCCL_DETERMINISTIC": "2"})
    assert isinstance(plan(build_config(rlConfig={"enableBatchInvariant": True}), other), Refused)


def test_the_cpu_needs_no_npu():
    assert causes(preflight_page.build_cpu(installation=CPU, devices=None)) == []
