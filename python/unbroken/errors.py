"""What Unbroken raises.

Every class has `code` (a short name such as "no_space"), `retryable` (the same call may succeed later) and
`data_may_be_lost` (bytes that were believed safe may be gone). The message says what was done to what, the cause and,
where there is one, the remedy.

Beside these: a wrong argument may be a plain ValueError or TypeError (InvalidArgumentError is a ValueError), a wait for
`timeout` seconds ends in a TimeoutError, and a signal ends a run by SystemExit(unbroken.EXIT_STOPPED).
"""

from unbroken._engine import (
    AlreadyExistsError,
    CancelledError,
    DamagedError,
    DeadlineError,
    Error,
    FencedError,
    InternalError,
    InvalidArgumentError,
    IoError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnknownOutcomeError,
    UnsupportedError,
)

__all__ = [
    "AlreadyExistsError",
    "CancelledError",
    "DamagedError",
    "DeadlineError",
    "Error",
    "FencedError",
    "InternalError",
    "InvalidArgumentError",
    "IoError",
    "LoaderBusyError",
    "NoSpaceError",
    "NotFoundError",
    "PermissionDeniedError",
    "SaveFailedError",
    "StateMismatchError",
    "UnavailableError",
    "UnknownOutcomeError",
    "UnsupportedError",
]


class SaveFailedError(Error):
    """A save did not become durable; the message names the ranks and the cause. Older checkpoints are not touched."""

    code = "save_failed"


class LoaderBusyError(Error, RuntimeError):
    """The loader has a live iterator, and what was asked for would make its place ambiguous."""

    code = "loader_busy"


class StateMismatchError(InvalidArgumentError):
    """A loader's state belongs to another dataset, seed or order; the message names both sides."""

    code = "state_mismatch"
