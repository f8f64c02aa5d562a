"""One pass over a loader: requests go to torch's workers ahead, batches come back in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data

from unbroken.data import _workers
from unbroken.data._order import GlobalBatch, Order, Place, Request
from unbroken.errors import LoaderBusyError

__all__ = ["BatchIterator", "Plan", "Requests"]


class Plan:
    """The global batches of one pass, as torch's loader asks for them: some ahead of what is delivered."""

    def __init__(self, order: Order, start: Place, *, endless: bool) -> None:
        self.asked_for: deque[GlobalBatch] = deque()
        self.skipped: GlobalBatch | None = None  # an epoch's last batch, if this rank gets nothing of it
        self._order = order
        self._start = start
        self._endless = endless

    def __iter__(self) -> Iterator[Request]:
        place = self._start
        while self._endless or place.epoch == self._start.epoch:
            batch = self._order.batch_at(place)
            if batch.requests:
                self.asked_for.append(batch)
                yield from batch.requests
            else:
                self.skipped = batch
            place = batch.next


class Requests(torch.utils.data.Sampler[Request]):
    """The sampler that torch's loader keeps; each of its passes follows the plan that was set last."""

    def __init__(self) -> None:
        self.plan: Plan | None = None

    def __iter__(self) -> Iterator[Request]:
        assert self.plan is not None
        return iter(self.plan)


class BatchIterator(Iterator[Any]):
    """Ends with the plan, on close(), or when it is collected. After an error it is closed, and says so.

    Args:
        torch_loader: its sampler follows ``plan``.
        deliver: told each global batch with its micro-batches; returns the item.
        end: told when the plan has come to its end.
    """

    def __init__(
        self,
        torch_loader: torch.utils.data.DataLoader[Any],
        plan: Plan,
        deliver: Callable[[GlobalBatch, list[Any]], Any],
        end: Callable[[], None],
    ) -> None:
        self._torch_loader = torch_loader
        self._plan = plan
        self._deliver = deliver
        self._end = end
        self._process = os.getpid()
        self._exhausted = False
        self._batches: Iterator[Any] | None = iter(torch_loader)

    @property
    def live(self) -> bool:
        return self._batches is not None

    def __next__(self) -> Any:
        if self._exhausted:
            raise StopIteration
        if self._batches is None:
            raise LoaderBusyError("go on with an iterator that was closed, or failed: iterate over the loader anew")
        try:
            micro_batches = [next(self._batches)]
            batch = self._plan.asked_for.popleft()
            micro_batches += [next(self._batches) for _ in batch.requests[1:]]
        except StopIteration:
            self._exhausted = True
            self.close()
            self._end()
            raise
        except BaseException as error:
            # torch's loader would go on after the batch that failed, and its samples would be lost.
            for note in self._finish(_workers.shut_down):
                error.add_note(note)
            raise
        return self._deliver(batch, micro_batches)

    def close(self) -> None:
        """Gives up what was fetched ahead; the loader's place stays."""
        self._finish(_workers.end_pass)

    def _finish(self, finish: Callable[[torch.utils.data.DataLoader[Any], Any], list[str]]) -> list[str]:
        batches, self._batches = getattr(self, "_batches", None), None
        # A forked child has a copy of the iterator, but the workers are its parent's.
        if batches is None or self._process != os.getpid():
            return []
        return finish(self._torch_loader, batches)

    def __del__(self) -> None:
        self.close()
