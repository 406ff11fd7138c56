"""What one call says to every engine: made into JSON once, not once for each of a thousand.

The lists of a model of today have 140,000 names: a tenth of a second, and a thread that encodes lets no other one run.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from rollfleet_protocol.ipc import plain_handles


class Said(dict[str, Any]):
    """An info or a list of tensors that is not changed any more: what was encoded stays."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._lock = threading.Lock()
        self._json: bytes | None = None

    @property
    def json(self) -> bytes:
        """Compact JSON in UTF-8, encoded by the first caller, of any thread.

        What vLLM's classes leave empty is left out; handles as vLLM-Ascend's trainer engine has them become plain.
        ValueError or TypeError where JSON has no word for it.
        """
        with self._lock:
            if self._json is None:
                found = {name: value for name, value in self.items() if value is not None}
                if "ipc_handles" in found:
                    found["ipc_handles"] = plain_handles(found["ipc_handles"])
                self._json = as_json(found)
            return self._json

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        """A client of someone else's may hand it to another process: as what it is."""
        return dict, (dict(self),)


def said(values: Mapping[str, Any]) -> Said:
    """The same one again, where it is one."""
    return values if isinstance(values, Said) else Said(values)


def as_json(value: object) -> bytes:
    """Compact, in UTF-8. ValueError for a number that is none, TypeError for a type that JSON does not know."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
