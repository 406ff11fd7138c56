"""Lists of NPUs as annotations and variables spell them. Pure.

Source: mind-cluster's ascend-docker-runtime (runtime/process/process.go: parseDevices, parseAscendDevices): numbers and
ranges ("0,1", "0-3"), or names ("Ascend910-0,Ascend910-1", "npu-3"). Names of virtual NPUs have more parts
("Ascend910-2c-100-0"); what they mount cannot be told from the name.
"""

import re

MOST_CHIPS = 128  # the highest number that Ascend Docker Runtime takes
_NAME = re.compile(r"(?:Ascend[0-9A-Z]{2,8}|npu)-([0-9]{1,4})")
_RANGE = re.compile(r"([0-9]{1,4})\s*-\s*([0-9]{1,4})")
_SINGLE = re.compile(r"[0-9]{1,4}")


def chips_of(text: str) -> frozenset[int] | None:
    """The numbers of a list; None where it is no list of whole chips (empty, "void", virtual ones, anything else)."""
    found: set[int] = set()
    for part in text.split(","):
        numbers = _numbers(part.strip())
        if numbers is None:
            return None
        found.update(numbers)
    return frozenset(found)


def spelt(chips: frozenset[int] | tuple[int, ...]) -> str:
    """For messages: 0,1,2,5; "none" where there are none."""
    return ",".join(str(number) for number in sorted(chips)) or "none"


def _numbers(part: str) -> range | None:
    if name := _NAME.fullmatch(part):
        return _up_to(int(name[1]), int(name[1]))
    if _SINGLE.fullmatch(part):
        return _up_to(int(part), int(part))
    if bounds := _RANGE.fullmatch(part):
        return _up_to(int(bounds[1]), int(bounds[2]))
    return None


def _up_to(first: int, last: int) -> range | None:
    return range(first, last + 1) if first <= last <= MOST_CHIPS else None
