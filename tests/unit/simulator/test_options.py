"""The simulator's command line: what the launcher lets through never switches faults on."""

import pytest

from rollfleet_engine.launch.dialects import DIALECTS
from rollfleet_engine.launch.options import spellings
from rollfleet_engine.launch.preflight import SIMULATED_RELEASE
from rollfleet_engine.simulator.__main__ import parse

NEEDED = ["--model", "/model", "--served-model-name", "policy", "--host", "::", "--port", "8000"]
OPTIONS = ("--faults", "--fault-seed", "--fault-counts")


def test_options_have_an_effect_by_hand():
    found = parse([*NEEDED, "--faults", "plan.json", "--fault-seed", "7"])
    assert (str(found.faults), found.fault_seed, found.port) == ("plan.json", 7, 8000)


@pytest.mark.parametrize("arguments", [["--", "--faults", "plan.json"], ["--", "--fault-seed=7"]])
def test_what_comes_after_two_dashes_is_no_option(arguments: list[str]):
    found = parse([*NEEDED, *arguments])
    assert (found.faults, found.fault_seed) == (None, None)


@pytest.mark.parametrize("option", OPTIONS)
def test_no_beginning_that_stands_for_an_option_of_vllm_means_one_of_faults(option: str):
    """The launcher lets unambiguous beginnings of vLLM's options through as they are: --fault is one."""
    (dialect,) = (each for each in DIALECTS if SIMULATED_RELEASE in each.verified)
    known = dialect.option_names()
    for length in range(3, len(option) + 1):
        word = option[:length]
        (spelling,) = spellings([word], known)
        if spelling.exact:
            found = parse([*NEEDED, f"{word}=7"])
            assert (found.faults, found.fault_seed, found.fault_counts) == (None, None, {})
    assert not any(spelling.exact for spelling in spellings([option], known))
