"""How a loop ends that goes on after failures.

A task is asked to end once. asyncio.gather swallows that where one of its calls has failed in the same moment and
another is still under way: it raises the failure. So does a library that takes the asking for its own timeout.
"""

import asyncio


def end_if_asked() -> None:
    """Raise CancelledError where this task was asked to end, and something made another error of it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
