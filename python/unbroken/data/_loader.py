"""The DataLoader: torch's, in an exact order, with a state that is a place."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data
from torch.distributed.device_mesh import DeviceMesh

from unbroken.data import _state, _workers
from unbroken.data._iterator import BatchIterator, Plan, Requests
from unbroken.data._order import EpochEnd, GlobalBatch, Order, OrderOptions, Place, Uneven
from unbroken.data._ranks import resolve
from unbroken.data._source import MapDataset, Source, WorkerInit, check_dataset
from unbroken.data._state import Cursor, DatasetIdentity
from unbroken.errors import InvalidArgumentError, LoaderBusyError

__all__ = ["BatchInfo", "DataLoader"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchInfo:
    """What a delivered item was made of.

    Attributes:
        epoch, offset: the place at which its global batch starts.
        samples: samples of the global batch, over all ranks.
        indices: this rank's samples, in the order of the item, over all its micro-batches.
        weights: one number per micro-batch: with the mean loss of each multiplied by it, summed over the micro-batches
            and averaged over the ranks (as DDP and FSDP average gradients), the result is the mean over the global
            batch. All 1 / micro_batches unless shares differ.
    """

    epoch: int
    offset: int
    samples: int
    indices: list[int]
    weights: tuple[float, ...]


class DataLoader:
    """Batches of a map-style dataset, in an order that is a function of (seed, epoch, offset), with a state to resume.

    The samples of each global batch are the same for any number of ranks and workers, and so are the random numbers
    that a transform sees. ``for batch in loader`` runs to the end of the epoch; the next ``for`` goes on with the next
    epoch, or from the place that :meth:`load_state_dict` set. ``loader.forever()`` goes over the ends of epochs.

    The batches themselves are made by :class:`torch.utils.data.DataLoader`, which the worker options go to unchanged.
    Workers ignore SIGTERM and SIGUSR1, so that a scheduler's warning leaves the trainer able to save.

    One iterator is live at a time: a training loader has one place. For evaluation make another loader, with
    ``shuffle=False, epoch_end="keep"``. Not thread-safe: for the trainer's thread.

    Args:
        dataset: anything with ``len(dataset)`` and ``dataset[index]``.
        global_batch_size: samples per optimizer step, over all data-parallel ranks and micro-batches.
        seed: of the order and of all random numbers; 0 to 2**64 - 1, the same on every rank.
        shuffle: a new permutation each epoch; otherwise by index.
        transform: called with each sample, in the worker. If it has a parameter named ``generator``, it gets a
            ``torch.Generator`` (CPU), seeded for this sample and epoch. python's ``random``, numpy's and torch's
            global generators are seeded for the sample, too, from separate hashes, before ``dataset[index]``; those of
            the main process are left as they were.
        epoch_end: what happens to samples that do not fill a batch: "drop" skips them; "wrap" fills the batch from the
            next epoch; "keep" makes a short batch, of which ranks may get nothing, so it is for evaluation.
        uneven: None requires that every rank gets the same number of samples; "balanced" lets shares differ by one, and
            :attr:`last` has the weights that make up for it.
        micro_batches: splits each rank's share: an item is then a list of that many batches.
        mesh: a DeviceMesh whose dimension "dp", or "dp_replicate" and "dp_shard", says which ranks get different
            samples; or one with a single dimension. Ranks along other dimensions get the same samples.
        dp_rank, dp_size: the same by number. Without any, torch.distributed's rank and world size, if initialised.
        collate_fn: makes a batch of a list of samples; by default torch's. If it has a parameter named ``generator``,
            it gets one seeded for (seed, epoch, batch, share): the same for the same number of ranks only.
        identity: what the dataset is, for the check that a state belongs to it. By default its ``identity``
            attribute, or else the name of its type; its length is always compared. Texts over 256 bytes, or other
            than printable ASCII, are stored as their SHA-256.
        with_indices: items are ``(batch, indices)``, the batch's samples in order as a list of int; with
            micro_batches a list of such pairs.
        num_workers, pin_memory, timeout, worker_init_fn, multiprocessing_context, prefetch_factor, persistent_workers:
            as for torch's DataLoader. The order does not depend on them.

    Raises:
        TypeError: the dataset is not map-style, or an option has the wrong type.
        ValueError: an option that cannot be met; the message names what can: a batch that the ranks or micro-batches
            do not divide, or one larger than the dataset with ``epoch_end="drop"``.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        transform: Callable[..., Any] | None = None,
        epoch_end: EpochEnd = "drop",
        uneven: Uneven | None = None,
        micro_batches: int = 1,
        mesh: DeviceMesh | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        collate_fn: Callable[..., Any] | None = None,
        identity: str | None = None,
        with_indices: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        check_dataset(dataset)
        options = OrderOptions(global_batch_size, seed, shuffle, epoch_end, uneven, micro_batches)
        self._dataset = DatasetIdentity.of(dataset, identity)
        self._order = Order(options, self._dataset.length, resolve(mesh, dp_rank, dp_size))
        self._with_indices = with_indices
        self._requests = Requests()
        self._torch_loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            Source(dataset, seed, transform, collate_fn),
            batch_size=None,
            sampler=self._requests,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=WorkerInit(worker_init_fn),
            multiprocessing_context=multiprocessing_context,
            # torch seeds its workers from a draw; without a generator that draw would come from the trainer's own.
            generator=torch.Generator().manual_seed(seed),
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self._live: weakref.ref[BatchIterator] | None = None
        self._attached = False
        self._completed = Cursor(Place(0, 0), 0)
        self._completed_batches = 0
        self._pending: deque[Cursor] = deque()  # the place after each batch that is delivered and not completed
        self._abandoned = False
        self._last: BatchInfo | None = None

    # Iterating

    def __iter__(self) -> Iterator[Any]:
        """The batches from the place to the end of its epoch. Raises LoaderBusyError while another iterator is live."""
        return self._start(endless=False)

    def forever(self) -> Iterator[Any]:
        """The batches from the place on, over the ends of epochs, without end. Workers fetch ahead across them."""
        self._require_no_empty_ranks()
        return self._start(endless=True)

    def __len__(self) -> int:
        return self.batches_per_epoch

    @property
    def batches_per_epoch(self) -> int:
        """Global batches of an epoch; with epoch_end="wrap" one that starts inside a batch may have one fewer."""
        return self._order.batches_per_epoch

    @property
    def batches_left(self) -> int:
        """Global batches from the place of the last delivered one to the end of the epoch."""
        return self._order.batches_left(self._delivered_cursor.place)

    @property
    def place(self) -> Place:
        """Where the next batch to be delivered starts, as (epoch, offset)."""
        return self._delivered_cursor.place

    @property
    def last(self) -> BatchInfo | None:
        """What the last delivered item was made of; None before the first."""
        return self._last

    @property
    def dp_rank(self) -> int:
        return self._order.ranks.rank

    @property
    def dp_size(self) -> int:
        return self._order.ranks.size

    @property
    def global_batch_size(self) -> int:
        return self._order.options.global_batch_size

    @property
    def micro_batches(self) -> int:
        return self._order.options.micro_batches

    @property
    def seed(self) -> int:
        return self._order.options.seed

    def close(self) -> None:
        """Ends the live iterator, if there is one, and the workers. The place stays; iterating again is fine."""
        iterator = self._live_iterator
        if iterator is not None:
            iterator.close()
        if self._torch_loader._iterator is not None:
            _workers.shut_down(self._torch_loader, self._torch_loader._iterator)

    # State

    def attach(self) -> None:
        """From now on the state is that of the last *completed* batch: called by a Checkpointer.

        A batch is completed by :meth:`complete`, after the optimizer step that trained it. Without this the state
        speaks of delivered batches, which may be ahead of what was trained.

        Raises:
            LoaderBusyError: an iterator is live: which of its batches were trained is not known.
            ValueError: the last batch of an epoch is so short that ranks get none of it, so that their steps would
                differ.
        """
        if self._attached:
            return
        self._refuse_while_live("count completed batches")
        self._require_no_empty_ranks()
        self._attached = True

    def detach(self) -> None:
        """From now on the state is that of the last delivered batch again."""
        self._forget_abandoned()
        if self._pending:
            self.complete(len(self._pending))
        self._attached = False

    def complete(self, batches: int = 1) -> None:
        """Marks the oldest delivered, not yet completed global batches as trained.

        Args:
            batches: how many; with micro_batches one item is one batch.

        Raises:
            InvalidArgumentError: fewer were delivered, or no Checkpointer counts them.
        """
        if not self._attached:
            raise InvalidArgumentError(
                "complete a batch: the loader is not attached, so delivered batches count as done"
            )
        if batches < 1 or batches > len(self._pending):
            raise InvalidArgumentError(
                f"complete {batches} batches: {len(self._pending)} delivered ones are not completed yet; count a step "
                "after each optimizer step, and every optimizer step takes one item of the loader"
            )
        for _ in range(batches):
            self._completed = self._pending.popleft()
        self._completed_batches += batches

    @property
    def delivered(self) -> int:
        """Global batches delivered since construction, without those that were taken back because they come again."""
        return self._completed_batches + len(self._pending)

    @property
    def completed(self) -> int:
        """Global batches completed since construction; not attached, the delivered ones."""
        return self._completed_batches

    def state_dict(self) -> dict[str, Any]:
        """The place of the last completed batch, or, if no Checkpointer is attached, of the last *delivered* one.

        The same on every rank; under 1 KB as JSON.
        """
        return _state.describe(self._completed, self._order.options, self._dataset)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = False) -> None:
        """The next ``iter()`` goes on from the place of ``state``, exactly, whatever the number of ranks and workers.

        With another global batch size it goes on from the place, in batches of the new size.

        Args:
            state: what :meth:`state_dict` gave.
            strict: refuse another global batch size, too.

        Raises:
            StateMismatchError: it is of another dataset, seed or order; the message names both.
            UnsupportedError: it is of a newer version.
            LoaderBusyError: an iterator is live, and has fetched ahead from its old place.
        """
        self._refuse_while_live("load a state")
        cursor = _state.read(state, self._order.options, self._dataset, strict=strict)
        if state["global_batch_size"] != self.global_batch_size:
            _logger.info(
                "global batch size was %d and is %d: going on from epoch %d, offset %d",
                *(state["global_batch_size"], self.global_batch_size, *cursor.place),
            )
        self._completed = cursor._replace(place=self._order.settle(cursor.place))
        self._pending.clear()
        self._abandoned = False

    # What the iterator reports

    def _start(self, *, endless: bool) -> BatchIterator:
        self._refuse_while_live("iterate")
        self._forget_abandoned()
        self._abandoned = True  # until the iterator runs to its end
        plan = Plan(self._order, self.place, endless=endless)
        self._requests.plan = plan
        _workers.close_at_exit(self)
        iterator = BatchIterator(self._torch_loader, plan, self._deliver, self._end)
        self._live = weakref.ref(iterator)
        return iterator

    def _forget_abandoned(self) -> None:
        """Takes back what an iterator that did not run to its end delivered, and nobody trained."""
        if self._abandoned and self._live_iterator is None and self._pending:
            _logger.info("%d delivered batches were not completed; they come again", len(self._pending))
            self._pending.clear()

    def _deliver(self, batch: GlobalBatch, micro_batches: list[Any]) -> Any:
        self._advance(batch)
        scale = self.dp_size / batch.samples
        indices = [request.indices for request in batch.requests]
        self._last = BatchInfo(
            epoch=batch.start.epoch,
            offset=batch.start.offset,
            samples=batch.samples,
            indices=[index for part in indices for index in part],
            weights=tuple(len(part) * scale for part in indices),
        )
        items = list(zip(micro_batches, indices, strict=True)) if self._with_indices else micro_batches
        return items if self.micro_batches > 1 else items[0]

    def _advance(self, batch: GlobalBatch) -> None:
        cursor = Cursor(batch.next, self._delivered_cursor.samples_total + batch.samples)
        if self._attached:
            self._pending.append(cursor)
        else:
            self._completed = cursor
            self._completed_batches += 1

    def _end(self) -> None:
        self._abandoned = False
        skipped = self._requests.plan.skipped if self._requests.plan else None
        if skipped is not None:
            self._completed = Cursor(skipped.next, self._completed.samples_total + skipped.samples)

    @property
    def _delivered_cursor(self) -> Cursor:
        return self._pending[-1] if self._pending else self._completed

    @property
    def _live_iterator(self) -> BatchIterator | None:
        iterator = None if self._live is None else self._live()
        return iterator if iterator is not None and iterator.live else None

    def _refuse_while_live(self, action: str) -> None:
        if self._live_iterator is not None:
            raise LoaderBusyError(
                f"{action}: this loader has a live iterator, at epoch {self.place.epoch}, offset {self.place.offset}; "
                "run it to its end, or call loader.close() first; for evaluation make a loader of its own"
            )

    def _require_no_empty_ranks(self) -> None:
        if self._order.leaves_ranks_empty:
            raise ValueError(
                f"train with epoch_end='keep': the last batch of an epoch has {self._order.samples} % "
                f"{self.global_batch_size} samples, fewer than the {self.dp_size} ranks, so some would make no step; "
                "use 'drop' or 'wrap'"
            )


def _as_it_is(batch: Any) -> Any:
    return batch
