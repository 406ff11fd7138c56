"""What ends one call before its end, and no other one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stop:
    """Of one update: who waits or sends for it raises `why`, once there is one. It may be given from any thread."""

    why: Exception | None = None

    def check(self) -> None:
        """Raise why, where the call shall end."""
        if self.why is not None:
            raise self.why
