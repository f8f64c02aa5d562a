"""What the data side raises beside the engine's own errors."""

from __future__ import annotations

from unbroken.errors import Error, InvalidArgumentError

__all__ = ["LoaderBusyError", "StateMismatchError"]


class LoaderBusyError(Error, RuntimeError):
    """The loader has a live iterator, and what was asked for would make its place ambiguous."""

    code = "loader_busy"


class StateMismatchError(InvalidArgumentError):
    """A loader's state belongs to another dataset, seed or order; the message names both sides."""

    code = "state_mismatch"
