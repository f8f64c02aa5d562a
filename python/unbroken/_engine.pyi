"""The engine of Unbroken, for its Python package; not for users."""



version: str = '0.1.0'

class Error(Exception):
    """
    What the engine of Unbroken raises: `code` names the kind, `retryable` says that the same call may succeed later, `data_may_be_lost` that bytes believed safe may be gone.
    """

    code: str = 'internal'

    retryable: bool = False

    data_may_be_lost: bool = False

class InvalidArgumentError(Error, ValueError):
    """The caller's input is wrong; the message says what fits."""

    code: str = 'invalid_argument'

    retryable: bool = False

    data_may_be_lost: bool = False

class NotFoundError(Error):
    """The object is known not to exist."""

    code: str = 'not_found'

    retryable: bool = False

    data_may_be_lost: bool = False

class AlreadyExistsError(Error):
    """The object exists and was to be made."""

    code: str = 'already_exists'

    retryable: bool = False

    data_may_be_lost: bool = False

class PermissionDeniedError(Error):
    """The place does not allow it."""

    code: str = 'permission'

    retryable: bool = False

    data_may_be_lost: bool = False

class NoSpaceError(Error):
    """The place is full, or a quota is used up."""

    code: str = 'no_space'

    retryable: bool = False

    data_may_be_lost: bool = False

class IoError(Error):
    """The device or the file system failed."""

    code: str = 'io'

    retryable: bool = False

    data_may_be_lost: bool = False

class UnavailableError(Error):
    """The store or a peer cannot be reached now."""

    code: str = 'unavailable'

    retryable: bool = True

    data_may_be_lost: bool = False

class DeadlineError(Error):
    """It did not happen in time."""

    code: str = 'deadline'

    retryable: bool = True

    data_may_be_lost: bool = False

class UnknownOutcomeError(Error):
    """Whether a publishing operation took effect is not known."""

    code: str = 'unknown'

    retryable: bool = False

    data_may_be_lost: bool = False

class DamagedError(Error):
    """Bytes are there but are not what was written."""

    code: str = 'damaged'

    retryable: bool = False

    data_may_be_lost: bool = False

class FencedError(Error):
    """A newer start owns the run, or the root belongs to another run."""

    code: str = 'fenced'

    retryable: bool = False

    data_may_be_lost: bool = False

class UnsupportedError(Error):
    """The format version, dtype or place is not supported."""

    code: str = 'unsupported'

    retryable: bool = False

    data_may_be_lost: bool = False

class CancelledError(Error):
    """Given up on request."""

    code: str = 'cancelled'

    retryable: bool = False

    data_may_be_lost: bool = False

class InternalError(Error):
    """A bug in Unbroken; please report it."""

    code: str = 'internal'

    retryable: bool = False

    data_may_be_lost: bool = False
