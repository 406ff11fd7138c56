"""For tests of passes."""

from collections.abc import AsyncIterator

import pytest

from rollfleet_operator.ports import ROLLOUT_ENGINES
from tests.support.desk import Desk, make_fleet


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    made = Desk()
    made.cluster.put(ROLLOUT_ENGINES, "rl", make_fleet())
    yield made
    await made.followers.close()
