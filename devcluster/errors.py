"""What can go wrong, by cause. Each error says what to do next.

DevclusterError
    MissingPrerequisite     a program or a kernel ability is not there
    CommandFailed           a program that was run said no
    NotReady                something did not come up before its deadline
    Occupied                somebody else's cluster holds what this one needs
    NotRunning              the command needs a cluster that is up
    LeftBehind              the machine could not be put back as it was
    InvalidInput            an argument makes no sense
"""


class DevclusterError(Exception):
    """The common base: the one type that the command line catches."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.cause}\n  {self.remedy}" if self.remedy else self.cause


class MissingPrerequisite(DevclusterError):
    """A program or a kernel ability is not there."""


class CommandFailed(DevclusterError):
    """A program that was run ended with an error or ran out of time."""


class NotReady(DevclusterError):
    """Something did not come up before its deadline."""


class Occupied(DevclusterError):
    """Somebody else's cluster holds what this one needs."""


class NotRunning(DevclusterError):
    """The command needs a cluster that is up."""


class LeftBehind(DevclusterError):
    """The machine could not be put back as it was."""


class InvalidInput(DevclusterError):
    """An argument makes no sense."""
