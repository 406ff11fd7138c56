"""docs/hardware.md names all that is untested on NPUs, and every page that speaks of NPUs leads there."""

import re
from pathlib import Path

import pytest

from devtools.launch_table import SEED
from rollfleet_cli.conformance.checks.catalogue import CHECKS
from rollfleet_engine.launch.dialects import ASCEND, ASCEND_BEFORE_RL_CONFIG
from rollfleet_engine.launch.words import Words

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HAS_RUN, _, UNTESTED = (ROOT / "docs" / "hardware.md").read_text().partition("## Untested on hardware")
OF_ASCEND = {
    feature.value
    for platform in (ASCEND, ASCEND_BEFORE_RL_CONFIG)
    for feature, words in platform.words.items()
    if isinstance(words, Words)
}


@pytest.mark.parametrize("field", sorted({row.feature.value for row in SEED} | OF_ASCEND))
def test_every_setting_of_the_seed_document_is_listed(field: str) -> None:
    """And every one that has a word of vLLM-Ascend's own."""
    assert f"`{field}`" in UNTESTED


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_that_speaks_of_npus_leads_to_the_list(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"\bNPU|Ascend", text) or page.name == "hardware.md" or "hardware.md)" in text


def test_every_check_that_is_named_is_one_of_conformance() -> None:
    lines = [line for line in UNTESTED.splitlines() if line.startswith("|")]
    named = {name for line in lines for name in re.findall(r"`([a-z][a-z-]+)`", line.rpartition(" | ")[2])}
    assert "update-active" in named
    assert named <= CHECKS.keys()


def test_every_line_says_what_would_close_it() -> None:
    for part, cells in ((HAS_RUN, 2), (UNTESTED, 4)):
        lines = [line for line in part.splitlines() if line.startswith("|")][2:]
        assert len(lines) > 5
        for line in lines:
            filled = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(filled) == cells, line
            assert all(filled), line
