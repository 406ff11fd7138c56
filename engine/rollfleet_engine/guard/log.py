"""The guard's log: one JSON object a line, so that what it did can be proved from the container's log alone."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TextIO

from rollfleet_protocol.words import visible_json

STDOUT = 1


class GuardLog:
    """Writes lines that carry `fields` (whose engine this is). Not for the path of a request."""

    def __init__(
        self, fields: Mapping[str, Any], stream: TextIO | None = None, logger: str = "rollfleet.guard"
    ) -> None:
        self._fields = dict(fields)
        self._logger = logger
        self._stream = stream  # None: the process's standard output, past the prefix that vLLM puts on sys.stdout

    def write(self, event: str, *, time_ns: int | None = None, **details: Any) -> None:
        """One line. `time_ns` is wall-clock time where the moment matters more than that of writing."""
        moment = time.time_ns() if time_ns is None else time_ns
        stamp = datetime.fromtimestamp(moment / 1e9, UTC).isoformat(timespec="microseconds")
        line = {"time": stamp, "timeNs": moment, "logger": self._logger, "event": event, **self._fields, **details}
        text = visible_json(json.dumps(line, ensure_ascii=False)) + "\n"  # names of files need not be UTF-8
        # Nobody reads any more: no reason to leave a gate as it should not be. There is nowhere to say it either.
        with suppress(OSError):
            if self._stream is None:
                os.write(STDOUT, text.encode())
            else:
                self._stream.write(text)
