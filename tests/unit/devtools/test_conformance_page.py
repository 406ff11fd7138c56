"""The page about conformance names each check."""

from pathlib import Path

from devtools.conformance_page import PAGE, render
from rollfleet_cli.conformance.checks.catalogue import CHECKS

PAGE_TEXT = (Path(__file__).parents[3] / PAGE).read_text()


def test_the_page_is_as_it_would_be_written():
    assert render(PAGE_TEXT) == PAGE_TEXT
    assert all(f"| `{name}` |" in PAGE_TEXT for name in CHECKS)
