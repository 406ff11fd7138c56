"""For all tests."""

import asyncio
import os

from hypothesis import settings

# looptime asks for the current event loop before synchronous tests too, and Python 3.11 makes one, which nobody closes,
# unless it was said that there is none.
asyncio.set_event_loop(None)

# A busy machine is no failure of an example's; each test has pytest's own limit of time. The same commit is tried with
# the same examples each time: `make properties` looks for new ones.
settings.register_profile("rollfleet", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("ROLLFLEET_EXAMPLES", "rollfleet"))
