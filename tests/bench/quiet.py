"""Measurements that count only where nobody else had the processors meanwhile: machines of tests are shared.

Processor time that was spent and is not ours, from /proc/stat, which counts in hundredths of a second. A disturbed
measurement is thrown away and made again, whatever it said; so it cannot be chosen by its result.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
MOST_OF_OTHERS = 0.3  # processors, on average; a local Kubernetes at rest takes 0.15
DEADLINE_S = 1800.0  # for one measurement
_TICKS = os.sysconf("SC_CLK_TCK")
_SPENT = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; not idle and iowait


class DisturbedError(Exception):
    """The machine was not quiet for long enough."""


def spent_s() -> float:
    """Processor time of everybody since the start of the machine."""
    first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    return sum(int(first[place]) for place in _SPENT) / _TICKS


def own_s(processes: tuple[int, ...]) -> float:
    """Processor time of this process and of others that belong to the measurement, with the threads of all."""
    return time.process_time() + sum(_of(process) for process in processes)


def _of(process: int) -> float:
    """utime and stime, the 14th and 15th field of /proc/<pid>/stat; the name before them may hold blanks."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def undisturbed(measure: Callable[[], T], processes: tuple[int, ...] = ()) -> T:
    """What `measure` says, made again until nobody else disturbed it. Raises DisturbedError."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        spent, own, began = spent_s(), own_s(processes), time.monotonic()
        found = measure()
        took = time.monotonic() - began
        others = spent_s() - spent - (own_s(processes) - own)
        if others <= MOST_OF_OTHERS * took:
            return found
        time.sleep(1.0)
    raise DisturbedError(f"others kept the processors busy for {DEADLINE_S:.0f} s: run it on a quiet machine")
