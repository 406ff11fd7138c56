"""Every cause that a status can name is explained to who meets it, by the page and by `rollfleet diagnose`."""

import re
from pathlib import Path

import pytest

from rollfleet_cli.remedies import (
    ENGINES,
    FAILED,
    IGNORED,
    JOINING,
    NOT_ACCEPTED,
    STEPS,
    UNAVAILABLE,
    VERSIONS,
    WAITING,
)
from rollfleet_operator.core.engine_states import Doing
from rollfleet_operator.core.reasons import Reason
from rollfleet_protocol.state import FailureReason

TROUBLESHOOTING = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
TABLES = NOT_ACCEPTED | IGNORED | WAITING | FAILED | STEPS | VERSIONS | UNAVAILABLE | ENGINES | JOINING
NOTHING_IS_WRONG = {
    # All is well, or a step was done.
    Reason.ACCEPTED,
    Reason.SERVING,
    Reason.STEADY,
    Reason.ALL_WELL,
    Reason.CURRENT,
    Reason.QUIESCED,
    Reason.TRANSFERRED,
    Reason.VERIFIED,
    Reason.ACTIVE,
    Reason.OPENED,
    Reason.NONE_KEPT,
    Reason.ONE_VERSION,
    Reason.NOTHING_IGNORED,
    Doing.TERMINATING,
    # Told by a finding of another name beside it: what it waits for, the condition itself, the engines one by one.
    Reason.PENDING,
    Reason.UPDATE_PENDING,
    Reason.NOT_REACHED,
    Reason.REPLACING,
    Reason.REQUESTS_KEPT,
    Reason.ENGINES_NOT_WELL,
}
NAMES = sorted({each.value for kind in (Reason, FailureReason, Doing) for each in kind})


@pytest.mark.parametrize("name", NAMES)
def test_troubleshooting_tells_of_every_reason(name: str) -> None:
    assert re.search(rf"\b{name}\b", TROUBLESHOOTING.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_diagnose_has_cause_and_remedy_for_every_reason_that_is_a_fault(name: str) -> None:
    remedy = TABLES.get(name)
    assert (remedy is None) is (name in NOTHING_IS_WRONG)
    assert remedy is None or (remedy.cause and remedy.remedy)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_sentence(reason: Reason) -> None:
    assert reason.sentence.endswith(".")


@pytest.mark.parametrize("reason", FailureReason)
def test_whatever_fails_in_an_engine_can_fail_an_update(reason: FailureReason) -> None:
    assert reason.value in FAILED
