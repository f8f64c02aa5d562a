"""The order of samples as one rank sees it: the engine's permutation, schedule and share put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from unbroken._engine import Permutation, Schedule, Share
from unbroken.data._ranks import Ranks

__all__ = ["ALGORITHM", "EpochEnd", "GlobalBatch", "Order", "OrderOptions", "Place", "Request", "Uneven"]

ALGORITHM = "feistel-1"  # docs/order.md; another order of samples needs another name
_MAX_SEED = 2**64 - 1

EpochEnd: TypeAlias = Literal["drop", "wrap", "keep"]
Uneven: TypeAlias = Literal["balanced"]


class Place(NamedTuple):
    """Where the next global batch starts: at the ``offset``-th sample, in the epoch's order, of epoch ``epoch``."""

    epoch: int
    offset: int


@dataclass(frozen=True)
class OrderOptions:
    """What, beside the dataset, decides which samples a global batch has."""

    global_batch_size: int
    seed: int = 0
    shuffle: bool = True
    epoch_end: EpochEnd = "drop"
    uneven: Uneven | None = None
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name, least in (("global_batch_size", 1), ("micro_batches", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r}: it must be an int, not {type(value).__name__}")
            if not least <= value <= _MAX_SEED:
                raise ValueError(f"{name}={value}: it must be {least} or more, and below 2**64")
        if self.epoch_end not in ("drop", "wrap", "keep"):
            raise ValueError(f"epoch_end={self.epoch_end!r}: it must be 'drop', 'wrap' or 'keep'")
        if self.uneven not in (None, "balanced"):
            raise ValueError(f"uneven={self.uneven!r}: it must be None or 'balanced'")


@dataclass(frozen=True, slots=True)
class Request:
    """One micro-batch to be made: the samples, by the epoch whose random numbers they get, and whose batch it is."""

    epoch: int
    offset: int
    share: int
    samples: tuple[tuple[int, list[int]], ...]

    @property
    def indices(self) -> list[int]:
        return [index for _, indices in self.samples for index in indices]

    def __len__(self) -> int:
        return sum(len(indices) for _, indices in self.samples)


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """A global batch and this rank's share of it; micro-batches without samples are left out."""

    start: Place
    next: Place
    samples: int
    requests: tuple[Request, ...]


class Order:
    """The order in which one rank reads a dataset. Immutable but for a remembered permutation; one thread."""

    def __init__(self, options: OrderOptions, samples: int, ranks: Ranks) -> None:
        self.options = options
        self.samples = samples
        self.ranks = ranks
        self._schedule = Schedule(samples, options.global_batch_size, options.epoch_end)
        self._share = Share(
            global_batch_size=options.global_batch_size,
            ranks=ranks.size,
            rank=ranks.rank,
            micro_batches=options.micro_batches,
            balanced=options.uneven == "balanced",
        )
        self._permutation: tuple[int, Permutation] | None = None

    @property
    def batches_per_epoch(self) -> int:
        return self._schedule.batches_per_epoch

    @property
    def leaves_ranks_empty(self) -> bool:
        """Whether the last batch of an epoch has fewer samples than there are ranks."""
        return self.options.epoch_end == "keep" and 0 < self.samples % self.options.global_batch_size < self.ranks.size

    def batches_left(self, place: Place) -> int:
        return self._schedule.batches_left(*place)

    def settle(self, place: Place) -> Place:
        """``place``, or the next epoch's first where no batch starts at ``place``."""
        return Place(*self._schedule.settle(*place))

    def after(self, place: Place, batches: int) -> Place:
        """The place that many batches after ``place``, which is settled."""
        for _ in range(batches):
            place = Place(*self._schedule.batch_at(*place)[1])
        return place

    def batch_at(self, place: Place) -> GlobalBatch:
        """The batch that starts at ``place``, which is settled."""
        samples, following = self._schedule.batch_at(*place)
        first_share = self.ranks.rank * self.options.micro_batches
        requests = tuple(
            Request(place.epoch, place.offset, first_share + number, self._samples(place, first, count))
            for number, (first, count) in enumerate(self._share.micro_batches(samples))
            if count > 0
        )
        return GlobalBatch(place, Place(*following), samples, requests)

    def _samples(self, place: Place, skip: int, count: int) -> tuple[tuple[int, list[int]], ...]:
        return tuple(
            (epoch, self._indices(epoch, offset, run))
            for epoch, offset, run in self._schedule.ranges(*place, skip, count)
        )

    def _indices(self, epoch: int, offset: int, count: int) -> list[int]:
        if not self.options.shuffle:
            return list(range(offset, offset + count))
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = (epoch, Permutation(self.options.seed, epoch, self.samples))
        indices: list[int] = self._permutation[1].fill(offset, count).tolist()
        return indices
