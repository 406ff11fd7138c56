"""What of an engine sleeps, in vLLM's own words (level 1 or 2, tags weights and kv_cache)."""

from enum import StrEnum

from rollfleet_protocol.base import Answer


class Tag(StrEnum):
    """A part of an engine's memory that is given back and taken again by itself."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


ALL_TAGS = (Tag.WEIGHTS, Tag.KV_CACHE)


class Sleeping(Answer):
    """The guard's own record: vLLM says that it sleeps when it is merely paused, too."""

    level: int = 0  # 0: awake. 1: the weights lie in host memory. 2: they are gone. The KV cache is gone at both
    awake: tuple[Tag, ...] = ALL_TAGS
