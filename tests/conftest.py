"""For all tests."""

import asyncio

from hypothesis import settings

# looptime asks for the current event loop before synchronous tests too, and Python 3.11 makes one, which nobody closes,
# unless it was said that there is none.
asyncio.set_event_loop(None)

# A busy machine is no failure of an example's; each test has pytest's own limit of time.
settings.register_profile("rollfleet", deadline=None)
settings.load_profile("rollfleet")
