"""Words of others, made fit to be shown: no engine, file or person must be able to steer the terminal of who reads."""

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


def visible(text: str) -> str:
    """The text with control characters, and those that turn the direction of reading, written out. Lines stay lines."""
    return text.translate(_SHOWN)
