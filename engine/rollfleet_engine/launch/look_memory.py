"""Looks at host memory: the cgroup's limit (both versions), the node's size, and /dev/shm."""

import os
from pathlib import Path

from rollfleet_engine.launch.facts import Memory

# Where a container sees its own cgroup: version 2's unified hierarchy, and version 1's memory controller.
_LIMIT_FILES = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
_NODE_FILE = "proc/meminfo"
_SHARED = "dev/shm"  # where POSIX shared memory lies, below the root folder
_MOST_BYTES = 4096


def look_at_memory(root: Path) -> Memory:
    """All of it, as far as it can be read."""
    limits = [limit for file in _LIMIT_FILES if (limit := _limit_in(root / file)) is not None]
    node = _node_bytes(root / _NODE_FILE)
    known = [*limits, *([node] if node is not None else [])]
    total, free = _shared(root / _SHARED)
    return Memory(limit=min(known, default=None), shared_total=total, shared_free=free)


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(_MOST_BYTES).decode("ascii", errors="replace")
    except OSError:
        return ""


def _limit_in(file: Path) -> int | None:
    """A number of bytes; None for "max" and for what is no number. Version 1 writes a huge number for no limit."""
    return _number(_read(file).strip())


def _node_bytes(file: Path) -> int | None:
    """MemTotal of /proc/meminfo, which counts in KiB (proc(5))."""
    for line in _read(file).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == "MemTotal" and words:
            kib = _number(words[0])
            return None if kib is None else kib * 1024
    return None


def _number(word: str) -> int | None:
    """A positive integer of at most 20 digits, as many as 64 bits have."""
    if not word.isascii() or not word.isdecimal() or len(word) > 20:
        return None
    return int(word) or None


def _shared(folder: Path) -> tuple[int | None, int | None]:
    try:
        seen = os.statvfs(folder)
    except OSError:
        return None, None
    if seen.f_blocks == 0:  # a tmpfs without a limit says 0
        return None, None
    return seen.f_frsize * seen.f_blocks, seen.f_frsize * seen.f_bavail
