"""Transferring what a trainer sends: who may send it, what comes of it, and what its loss leads to.

The digest is not known before: the targets tell it. Where the trainer has told each of them what it sent they have
compared that already; else they are compared here, and one that got other bytes than most of them is out by itself.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from rollfleet_operator.api.weightversion import Target, WeightVersionStatus
from rollfleet_operator.core.moves import Move, Update, failed
from rollfleet_operator.core.policies import Deadline
from rollfleet_operator.core.reasons import Reason
from rollfleet_operator.core.topology import TRAINER_RANKS
from rollfleet_operator.core.world import holds
from rollfleet_protocol.commands import Push, Sender, Transfer
from rollfleet_protocol.state import DigestSource, EngineState

Told = tuple[str, EngineState]  # a target that holds the weights


def push_command(update: Update, target: Target, state: EngineState, deadline: Deadline) -> Transfer | None:
    """Open this target's transfer routes to the sender. None where its record is lost."""
    sender = update.status.sender
    if sender is None:
        return None
    namespace = update.world.fleet.metadata.namespace
    subject = f"system:serviceaccount:{namespace}:{sender.service_account_name}"
    return Transfer(
        incarnation=state.incarnation,
        epoch=update.epoch,
        version=update.version,
        push=Push(
            sender=Sender(subject=subject, uid=sender.uid),
            holder=sender.holder,
            backend=update.backend,
            rank_offset=target.rank_offset,
            world_size=TRAINER_RANKS + sum(each.world_size for each in update.status.targets),
            workers=target.world_size,
        ),
        deadline_seconds=deadline.left_s(update.now),
    )


def with_digest(update: Update, told: Sequence[Told]) -> WeightVersionStatus | Move:
    """The record with the digest of what came; the end of the update where no majority of the targets agrees on it."""
    digests = {name: state.weights.digest or "" for name, state in told}
    [(digest, count)] = Counter(digests.values()).most_common(1)
    if count * 2 <= len(digests):
        one, other = sorted({each: name for name, each in digests.items()}.items())[:2]
        text = f"{one[1]} received {one[0]}, {other[1]} received {other[0]}"
        return Move(update.status, failed(Reason.DIGEST_DISAGREES, text))
    vouched, committed = _vouched(update, told), update.record.committed
    if vouched is DigestSource.ENGINES_ONLY and committed is not None and digest == committed.digest:
        text = (
            f"all engines hold the digest of version {committed.version}, and nobody says that this was sent: {digest}"
        )
        return Move(update.status, failed(Reason.DIGEST_DISAGREES, text))
    return update.status.model_copy(update={"digest": digest, "digest_source": vouched})


def _vouched(update: Update, told: Sequence[Told]) -> DigestSource:
    """The weakest of what the targets say."""
    sources = {
        state.transferred.digest_source
        for _, state in told
        if state.transferred is not None and state.transferred.epoch == update.epoch
    }
    return DigestSource.TRAINER if sources == {DigestSource.TRAINER} else DigestSource.ENGINES_ONLY


def is_untouched(update: Update, states: Iterable[EngineState | None]) -> bool:
    """Whether every target says, now, that it holds the committed version as ever."""
    committed = update.record.committed
    return all(state is not None and holds(state, committed) for state in states)
