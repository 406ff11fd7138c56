"""Words of others, made fit to be shown: no engine, file or person must be able to steer the terminal of who reads."""

from typing import Annotated

from pydantic import AfterValidator

MAX_WORDS = 4096  # characters; a state stays far below what an operator reads of an answer
_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))  # they show text in another order
_STEERING = (
    *(code for code in range(0x20) if chr(code) not in "\t\n"),
    *range(0x7F, 0xA0),
    0x2028,
    0x2029,
    *_BIDI,
    *range(0xD800, 0xE000),  # halves of pairs, which no UTF-8 can hold
)
_SHOWN = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _STEERING}

_IN_JSON = {code: f"\\u{code:04x}" for code in _STEERING if code >= 0x7F}  # below that JSON has only escapes


def visible(text: str) -> str:
    """The text with control characters, and those that turn the direction of reading, written out. Lines stay lines."""
    return text.translate(_SHOWN)


def fitted(text: str, most: int = MAX_WORDS) -> str:
    """The same in at most `most` characters; UTF-8 can always hold it."""
    shown = visible(text[:most])
    return shown if len(shown) <= most and len(text) <= most else shown[: most - 1] + "…"


def visible_json(text: str) -> str:
    """JSON of the same meaning that can be shown: what would steer a terminal stands there as an escape of JSON's."""
    return text.translate(_IN_JSON)


# Of a file's or a tensor's name, a token, an engine: what keeps no answer from being told.
Words = Annotated[str, AfterValidator(fitted)]
