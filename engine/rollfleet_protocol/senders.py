"""How a trainer says that it stands ready: the fleet's Lease `<fleet>-sender` and the words on it (ADR 0028).

The operator makes the Lease for each fleet with spec.trainers; trainers only update it. `holderIdentity` is
`<ServiceAccount>/<instance>`, the instance new for each process; it goes with each call to a guard
(pushes.HOLDER_HEADER).
"""

OFFERS_ANNOTATION = "rollfleet.io/offers"  # <uid of the WeightVersion>/<version>: what the holder stands ready to send
MESSAGE_ANNOTATION = "rollfleet.io/sender-message"  # why the holder gave up, in its own words
SHORTEST_LEASE_S, LONGEST_LEASE_S = 5, 60  # leaseDurationSeconds that is believed
LONGEST_MESSAGE = 1000  # characters


def sender_lease(fleet: str) -> str:
    """Name of the Lease that a fleet's trainers hold, one at a time."""
    return f"{fleet}-sender"


def holder_identity(account: str, instance: str) -> str:
    """holderIdentity of one process of a ServiceAccount."""
    return f"{account}/{instance}"


def account_of(holder: str) -> str:
    """The ServiceAccount's name in a holderIdentity."""
    return holder.partition("/")[0]


def offer(weight_version_uid: str, version: int) -> str:
    """What OFFERS_ANNOTATION says of a version."""
    return f"{weight_version_uid}/{version}"
