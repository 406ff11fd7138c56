"""The same checks that `rollfleet conformance` makes of a live fleet, of both engines."""

import pytest

from rollfleet_cli.conformance.checks.catalogue import ENGINE_CHECKS
from rollfleet_cli.conformance.checks.check import Check
from rollfleet_cli.conformance.running import Result
from tests.contract.client import Operator
from tests.contract.conforming import run
from tests.contract.process import EngineProcess, Site


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.id)
def test_an_engine_of_ours_conforms(engine: EngineProcess, site: Site, serving: Operator, check: Check):
    before = serving.state()
    verdict = run(engine, site, serving, check)
    assert verdict.faults == ()
    assert verdict.result is Result.PASSED or verdict.skipped.startswith("spec.")
    after = serving.state()
    assert (after.sequence, after.in_flight) == (before.sequence, 0), "nothing was changed"
