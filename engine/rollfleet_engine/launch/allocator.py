"""PYTORCH_NPU_ALLOC_CONF without expandable_segments, which the memory pool of sleep mode cannot be combined with."""

VARIABLE = "PYTORCH_NPU_ALLOC_CONF"
_REMOVED = "expandable_segments:"


def without_expandable_segments(settings: str) -> str:
    """All other settings, in their order and as written.

    `settings` is torch's list of `key:value` with commas between. Blanks around an entry and empty entries go too, as
    in vLLM-Ascend (platform.py, _disable_expandable_segments); a value in brackets may hold commas, whose parts begin
    with no key and stay.
    """
    entries = (entry.strip() for entry in settings.split(","))
    return ",".join(entry for entry in entries if entry and not entry.startswith(_REMOVED))
