"""The page about conformance names each check, and closes nothing by one that does not exist."""

from pathlib import Path

from devtools.conformance_page import HARDWARE, OPEN, PAGE, render
from rollfleet_cli.conformance.checks.catalogue import CHECKS

ROOT = Path(__file__).parents[3]
PAGE_TEXT = (ROOT / PAGE).read_text()


def test_the_page_is_as_it_would_be_written():
    assert render(PAGE_TEXT) == PAGE_TEXT
    assert all(f"| `{name}` |" in PAGE_TEXT for name in CHECKS)


def test_what_closes_a_claim_exists():
    assert {name for _, _, names in HARDWARE for name in names} <= set(CHECKS)
    assert all(why for _, why in OPEN)
