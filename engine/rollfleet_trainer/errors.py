"""The errors of a push, on the trainer's side."""


class TransferError(Exception):
    """The weights were not taken. The message names the engine and tells its own words."""
