"""Every cause that a condition can name is explained to the person who meets it."""

import re
from pathlib import Path

import pytest

from rollfleet_operator.core.reasons import Reason
from rollfleet_protocol.state import FailureReason

TROUBLESHOOTING = Path(__file__).parents[3] / "docs" / "troubleshooting.md"


@pytest.mark.parametrize("name", sorted({*(each.value for each in Reason), *(each.value for each in FailureReason)}))
def test_troubleshooting_tells_of_every_reason(name: str) -> None:
    assert re.search(rf"\b{name}\b", TROUBLESHOOTING.read_text())
