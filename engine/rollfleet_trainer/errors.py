"""The errors of a push, on the trainer's side."""


class TransferError(Exception):
    """The weights were not taken. The message names the engine and tells its own words."""


class PublishError(Exception):
    """No checkpoint was published; the message names the file or tensor, the cause, and where known the cure.

    Nothing that readers could take for a checkpoint is left behind.
    """


class CheckpointExistsError(PublishError):
    """There is another checkpoint of that name. It is never overwritten: engines may be reading it."""


class CheckpointNotReadyError(PublishError):
    """A directory that another trainer writes did not become whole in time."""
