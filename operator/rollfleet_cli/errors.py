"""Errors that end the command line, each with its exit code.

CommandError
├── UnreachableError   1   no answer from the API server, or no way to it
├── ForbiddenError     1   the user may not read this
├── NotFoundError      3   no such fleet, or no WeightVersion where one is needed
├── UpdateFailedError  4   the awaited version ended Failed
└── TimedOutError      5   --timeout passed first

2 is the shell's own for wrong usage, 130 for Ctrl-C.
"""


class CommandError(Exception):
    """What the person is told, in one or two lines."""

    exit_code = 1


class UnreachableError(CommandError):
    """No answer from the API server, or no way to it."""


class ForbiddenError(CommandError):
    """The user may not read this."""


class NotFoundError(CommandError):
    """No such fleet."""

    exit_code = 3


class UpdateFailedError(CommandError):
    """The awaited version will not be served."""

    exit_code = 4


class TimedOutError(CommandError):
    """Not within the time that was given."""

    exit_code = 5
