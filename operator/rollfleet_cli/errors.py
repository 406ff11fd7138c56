"""Errors that end the command line, each with its exit code.

CommandError
├── UnreachableError   1   no answer from the API server, or no way to it
├── ForbiddenError     1   the user may not do this
├── RejectedError      1   the API server does not take what was to be written
├── ConflictError      1   others kept writing the same object
├── NotPossibleError   1   the fleet, as it is, has no use for what is asked
├── DisagreementError  1   engines differ, or cannot be asked
├── NotConformingError 1   a check of `rollfleet conformance` failed
├── NotTriedError      2   `rollfleet conformance` could not run, or not to its end
├── NotFoundError      3   no such fleet, no WeightVersion where one is needed, or no version to go back to
├── UpdateFailedError  4   the awaited version ended Failed, or is not accepted
├── TimedOutError      5   --timeout passed first
└── SupersededError    6   a higher version was asked for before the awaited one was served

2 is the shell's own for wrong usage, 130 for Ctrl-C. Of `rollfleet conformance` 2 is whatever kept it from being tried:
a program that reads the code must not take a fleet that could not be reached for one that failed.
"""


class CommandError(Exception):
    """What the person is told, in one or two lines."""

    exit_code = 1


class UnreachableError(CommandError):
    """No answer from the API server, or no way to it."""


class ForbiddenError(CommandError):
    """The user may not do this."""


class RejectedError(CommandError):
    """The API server does not take what was to be written; its words are the message."""


class ConflictError(CommandError):
    """Somebody else wrote first."""


class NotPossibleError(CommandError):
    """The fleet, as it is, has no use for what is asked."""


class DisagreementError(CommandError):
    """Engines do not hold, or do not answer, what they should; the message names them."""


class NotConformingError(CommandError):
    """A check failed; the report says which, and what the engine said."""


class NotTriedError(CommandError):
    """Nothing was found wrong, and not everything was tried."""

    exit_code = 2


class NotFoundError(CommandError):
    """No such fleet, or no such version."""

    exit_code = 3


class UpdateFailedError(CommandError):
    """The awaited version will not be served."""

    exit_code = 4


class TimedOutError(CommandError):
    """Not within the time that was given."""

    exit_code = 5


class SupersededError(CommandError):
    """A higher version was asked for first."""

    exit_code = 6
