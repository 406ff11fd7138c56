"""What can go wrong, by cause. Each error says what to do next.

DevclusterError
    MissingPrerequisiteError     a program or a kernel ability is not there
    CommandFailedError           a program that was run said no
    NotReadyError                something did not come up before its deadline
    OccupiedError                somebody else's cluster holds what this one needs
    NotRunningError              the command needs a cluster that is up
    LeftBehindError              the machine could not be put back as it was
    InvalidInputError            an argument makes no sense
"""


class DevclusterError(Exception):
    """The common base: the one type that the command line catches."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.cause}\n  {self.remedy}" if self.remedy else self.cause


class MissingPrerequisiteError(DevclusterError):
    """A program or a kernel ability is not there."""


class CommandFailedError(DevclusterError):
    """A program that was run ended with an error or ran out of time."""


class NotReadyError(DevclusterError):
    """Something did not come up before its deadline."""


class OccupiedError(DevclusterError):
    """Somebody else's cluster holds what this one needs."""


class NotRunningError(DevclusterError):
    """The command needs a cluster that is up."""


class LeftBehindError(DevclusterError):
    """The machine could not be put back as it was."""


class InvalidInputError(DevclusterError):
    """An argument makes no sense."""
