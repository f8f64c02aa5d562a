"""What Unbroken raises.

Every class has `code` (a short name such as "no_space"), `retryable` (the same call may succeed later) and
`data_may_be_lost` (bytes that were believed safe may be gone). The message says what was done to what, the cause and,
where there is one, the remedy.
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
    "NoSpaceError",
    "NotFoundError",
    "PermissionDeniedError",
    "SaveFailedError",
    "UnavailableError",
    "UnknownOutcomeError",
    "UnsupportedError",
]


class SaveFailedError(Error):
    """A save did not become durable; the message names the ranks and the cause. Older checkpoints are not touched."""

    code = "save_failed"
