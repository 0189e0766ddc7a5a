"""Errors that a user can mend. Each message is one sentence or two: the cause and the remedy."""


class UserError(Exception):
    """Bad input or usage; the command line exits with code 2."""

    exit_code = 2


class CheckFailed(UserError):
    """A check that the user asked for did not hold; exit code 1."""

    exit_code = 1


class MachineError(UserError):
    """The machine lacks something (disk, memory, a package); exit code 3."""

    exit_code = 3
