"""A batch sampler for torch's own DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Sampler

from unbroken.data._order import EpochEnd, Order, OrderOptions, Place, Uneven
from unbroken.data._ranks import resolve

__all__ = ["GlobalBatchSampler"]


class GlobalBatchSampler(Sampler[list[int]]):
    """This rank's share of each global batch, as lists of indices, in an order that is a function of the place.

    For those who keep ``torch.utils.data.DataLoader(dataset, batch_sampler=...)``. It gives the same samples as
    :class:`unbroken.data.DataLoader`, for any number of ranks and workers, but cannot know which batches were trained:
    workers draw from it ahead. So iterating does not move it; ``place`` is where the next ``iter()`` starts, and you
    set it: ``sampler.place = sampler.place_after(batches)``, or ``sampler.set_epoch(epoch)``.

    With ``micro_batches=k`` each item is one micro-batch, and ``k`` of them are an optimizer step.

    Args:
        dataset: the dataset, or its number of samples.
        global_batch_size: samples per optimizer step, over all data-parallel ranks.
        seed, shuffle, epoch_end, uneven, micro_batches, mesh, dp_rank, dp_size: as for
            :class:`unbroken.data.DataLoader`.

    Raises:
        ValueError: the batch cannot be shared evenly (the message names sizes that can), or is larger than the dataset
            with ``epoch_end="drop"``.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        epoch_end: EpochEnd = "drop",
        uneven: Uneven | None = None,
        micro_batches: int = 1,
        mesh: DeviceMesh | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
    ) -> None:
        options = OrderOptions(global_batch_size, seed, shuffle, epoch_end, uneven, micro_batches)
        samples = dataset if isinstance(dataset, int) else len(dataset)
        self._order = Order(options, samples, resolve(mesh, dp_rank, dp_size))
        self._place = Place(0, 0)

    @property
    def place(self) -> Place:
        """Where the next ``iter()`` starts, as (epoch, offset)."""
        return self._place

    @place.setter
    def place(self, place: tuple[int, int]) -> None:
        self._place = self._order.settle(Place(*place))

    def set_epoch(self, epoch: int) -> None:
        """The next ``iter()`` starts at the beginning of that epoch."""
        self.place = Place(epoch, 0)

    def place_after(self, batches: int) -> Place:
        """The place that many global batches after ``place``, over the ends of epochs where need be."""
        return self._order.after(self._place, batches)

    def __iter__(self) -> Iterator[list[int]]:
        place = self._place
        while place.epoch == self._place.epoch:
            batch = self._order.batch_at(place)
            for request in batch.requests:
                yield request.indices
            place = batch.next

    def __len__(self) -> int:
        """Items from ``place`` to the end of its epoch."""
        full = self._order.batches_left(self._place) - 1
        last = Place(self._place.epoch, self._place.offset + full * self._order.options.global_batch_size)
        return full * self._order.options.micro_batches + len(self._order.batch_at(last).requests)
