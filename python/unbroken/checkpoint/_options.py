"""Options of the Checkpointer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Every", "Keep"]


@dataclass(frozen=True, kw_only=True)
class Every:
    """When a save is due: every `steps` optimizer steps, or `seconds` after the last save began, or both.

    By steps, all ranks know without asking. By time, the coordinator's clock decides, and the save is a step later.
    """

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None:
            raise ValueError("Every() says nothing: give steps=, seconds= or both; every=None saves only on request")
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise ValueError(f"Every(steps={self.steps!r}): steps is a whole number of optimizer steps, at least 1")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"Every(seconds={self.seconds!r}): seconds must be over 0")


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which durable checkpoints stay: the `last` newest ones, and besides every one of a step that `every_steps`
    divides. `keep=None` keeps all.

    At least one stays always: `last` counts from 1.
    """

    last: int = 3
    every_steps: int | None = None

    def __post_init__(self) -> None:
        if type(self.last) is not int or self.last < 1:
            raise ValueError(f"Keep(last={self.last!r}): last is a whole number, at least 1; keep=None keeps all")
        if self.every_steps is not None and (type(self.every_steps) is not int or self.every_steps < 1):
            raise ValueError(f"Keep(every_steps={self.every_steps!r}): every_steps is a whole number, at least 1")
