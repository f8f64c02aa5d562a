"""What the data side raises beside the engine's own errors."""

from unbroken.errors import LoaderBusyError, StateMismatchError

__all__ = ["LoaderBusyError", "StateMismatchError"]
