"""The errors of checkpoints and of pushes."""

from rollfleet_protocol.state import FailureReason


class CheckpointError(Exception):
    """A checkpoint cannot be taken; `message` names the file or tensor, what is wrong, and where known the cure."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def incomplete(message: str) -> CheckpointError:
    """It may become whole later: somebody is still writing, or was killed while writing."""
    return CheckpointError(FailureReason.CHECKPOINT_INCOMPLETE, message)


def invalid(message: str) -> CheckpointError:
    """It can never become right."""
    return CheckpointError(FailureReason.CHECKPOINT_INVALID, message)


class PushError(Exception):
    """Weights that a trainer sends cannot be taken; `message` names tensor, rank or backend, and the other's words."""

    def __init__(self, message: str, reason: FailureReason = FailureReason.TRANSFER_FAILED) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
