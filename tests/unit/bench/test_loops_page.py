"""docs/loops.md says of each claim which test shows it."""

import re

from tests.support.pages import ROOT


def test_the_tests_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "loops.md").read_text()))
    assert len(named) > 10
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for name in named if f"def {name}(" not in written} == set()
