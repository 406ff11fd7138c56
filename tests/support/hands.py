"""What faults do to an engine as a whole, in memory."""


class MemoryHands:
    """Keeps Hands for an engine without a process: remembers what was asked for."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def die(self) -> None:
        """Noted."""
        self.done.append("die")

    async def hang(self, seconds: float) -> None:
        """Noted."""
        self.done.append("hang")

    async def restart(self) -> None:
        """Noted."""
        self.done.append("restart")
