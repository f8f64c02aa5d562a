"""What the Checkpointer asks of a data loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

__all__ = ["Loader"]


@runtime_checkable
class Loader(Protocol):
    """What the Checkpointer asks of a loader; unbroken.data.DataLoader is one."""

    def attach(self) -> None:
        """From now on the Checkpointer says which batches are done."""

    def detach(self) -> None:
        """The Checkpointer is closed: delivered batches count as done again."""

    def complete(self, batches: int = 1) -> None:
        """The oldest `batches` delivered batches are done."""

    def state_dict(self) -> dict[str, Any]:
        """The place of the last completed step: JSON, the same on every rank."""

    def load_state_dict(self, state: dict[str, Any], *, strict: bool = False) -> None:
        """Goes on from there. Refuses the state of other data."""

    def forever(self) -> Iterator[Any]:
        """Batches over the borders of epochs."""
