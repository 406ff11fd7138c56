"""A guard with an engine in memory."""

from collections.abc import AsyncIterator

import pytest

from tests.support.guards import Guarded


@pytest.fixture
async def guarded() -> AsyncIterator[Guarded]:
    """Stopped at the end."""
    guarded = Guarded()
    yield guarded
    await guarded.service.stop()
