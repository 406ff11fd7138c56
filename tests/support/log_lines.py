"""Reading the log of a process that goes on writing: its last line may be half there."""

from __future__ import annotations

import json
from typing import Any


def whole_lines(text: str) -> list[str]:
    """Those that have their newline; what comes after the last newline is not yet a line.

    A write is no more atomic to who reads the file than the file system makes it.
    """
    return text.split("\n")[:-1]


def json_lines(text: str, *marks: str) -> list[dict[str, Any]]:
    """The objects of the whole lines that have one of the marks in them, or of all lines; a prefix is left out."""
    lines = (line for line in whole_lines(text) if not marks or any(mark in line for mark in marks))
    return [json.loads(line[line.index("{") :]) for line in lines]
