"""For all tests."""

import asyncio

# looptime asks for the current event loop before synchronous tests too, and Python 3.11 makes one, which nobody closes,
# unless it was said that there is none.
asyncio.set_event_loop(None)
