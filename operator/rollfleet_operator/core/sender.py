"""Who sends the weights of a push: the holder of Lease <fleet>-sender, judged by what its Lease says.

A trainer counts as there while it renews: a renewal is counted from when this operator saw it, by its own clock, and
time in which the API server was out of reach is not counted, since nobody could renew then. Holding the Lease says that
a process lives; offering a version says that it waits with exactly these weights. Both come before a fleet pauses.
"""

from dataclasses import dataclass

from rollfleet_operator.api.weightversion import SenderRecord
from rollfleet_operator.core.moves import Update
from rollfleet_operator.core.policies import Deadline
from rollfleet_protocol.senders import sender_lease

SHORTEST_S, LONGEST_S = 5.0, 60.0  # of a Lease's duration that is believed


@dataclass(frozen=True)
class Offer:
    """The Lease as far as this update goes."""

    sender: SenderRecord | None  # who stands ready to send exactly this version
    lacks: str = ""  # what is missing, in one sentence with its cure

    @property
    def ready(self) -> bool:
        """Whether the fleet may pause for it."""
        return self.sender is not None


def offer(update: Update) -> Offer:
    """Who would send, or why nobody would. The pass is woken when the Lease runs out."""
    view, lease = update.world.sender, sender_lease(update.world.fleet.metadata.name)
    if not view.holder:
        gave_up = f"; the last one said: {view.message}" if view.message else ""
        return Offer(None, f"no trainer holds Lease {lease!r}{gave_up}")
    if view.account not in trainers(update):
        who = f"{view.account!r} may not send this version"
        return Offer(None, f"{view.holder!r} holds Lease {lease!r}: {who} (spec.trainers, spec.source.trainer)")
    if not _alive(update):
        return Offer(None, f"trainer {view.holder!r} has not renewed Lease {lease!r} for {_duration_s(update):g} s")
    if not view.uid:
        return Offer(None, f"trainer {view.holder!r}: there is no ServiceAccount {view.account!r} in this namespace")
    if view.offers != wanted(update):
        said = f" (it said: {view.message})" if view.message else ""
        return Offer(None, f"trainer {view.holder!r} does not offer version {update.version}{said}")
    return Offer(SenderRecord(holder=view.holder, service_account_name=view.account, uid=view.uid))


def loss(update: Update) -> str:
    """Why the sender that this update began with will not come to its end; empty while it may."""
    sender = update.status.sender
    if sender is None:
        return "the record of the sender is lost"
    found = offer(update)
    if found.sender is None:
        return found.lacks
    if found.sender != sender:
        return f"trainer {found.sender.holder!r} has taken Lease over from {sender.holder!r}"
    return ""


def wanted(update: Update) -> str:
    """What the Lease's annotation must say."""
    return f"{update.weight_version.metadata.uid}/{update.version}"


def trainers(update: Update) -> frozenset[str]:
    """ServiceAccounts that may push this version."""
    allowed = frozenset(each.service_account_name for each in update.world.fleet.spec.trainers)
    trainer = update.weight_version.spec.source.trainer
    if trainer is None or trainer.service_account_name is None:
        return allowed
    return allowed & {trainer.service_account_name}


def _duration_s(update: Update) -> float:
    return min(max(SHORTEST_S, update.world.sender.duration_s), LONGEST_S)


def _alive(update: Update) -> bool:
    settings, view = update.world.settings, update.world.sender
    if view.renewed is None:
        return False
    ends = Deadline.of(view.renewed, _duration_s(update), update.now, None, settings.away)
    if ends.passed(update.now):
        return False
    update.work.wake(ends.ends)
    return True
