"""What a RolloutEngine's status remembers of single pods, because the API server may forget them."""

from datetime import datetime

from rollfleet_operator.api.meta import ApiModel

MAX_MEMBERS = 1100  # as many engines as a fleet may have, and a hundred that vanished


class Member(ApiModel):
    """A pod whose engine may be open. Recorded before it is opened for the first time."""

    name: str
    """The pod."""
    uid: str
    """Its uid."""
    ordinal: int
    """Its place in the fleet."""
    ip: str
    """Where its guard answers."""
    node: str = ""
    """Where its containers run."""
    grace_seconds: int = 30
    """The pod's terminationGracePeriodSeconds."""
    restarts: int = 0
    """How often its container had been restarted when it served last."""
    vanished_since: datetime | None = None
    """Since when the API server has no such pod, without anybody's word that its containers ended."""
    vanished_epoch: int = 0
    """The fleet's epoch at that time: nothing sent since could open the engine again."""
