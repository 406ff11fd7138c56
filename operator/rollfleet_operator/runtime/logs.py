"""Logs as JSON, one object a line."""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

from rollfleet_protocol.words import visible_json

MAX_LINE = 16_384  # characters of a field's text


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, the record's `fields`, and the trace of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:MAX_LINE],
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))[-MAX_LINE:]
        return visible_json(json.dumps(line, default=str, ensure_ascii=False))


def set_up(level: str) -> None:
    """Our words at the level asked for; kopf's and the libraries' only where something is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("rollfleet_operator").setLevel(level.upper())
    # kopf says "Unresolved resources" and the like at WARNING, which preflight has said better.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
