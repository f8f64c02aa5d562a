"""What runs in the loader's workers: samples, transforms, collation, each with its own random numbers."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from unbroken._engine import batch_seeds, sample_seeds
from unbroken.data import _random
from unbroken.data._order import Request

__all__ = ["MapDataset", "Source", "WorkerInit", "check_dataset"]


class MapDataset(Protocol):
    """A dataset whose samples have numbers: ``dataset[0]`` to ``dataset[len(dataset) - 1]``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_dataset(dataset: object) -> None:
    """Raises TypeError where ``dataset`` has no samples that can be asked for by number."""
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(type(dataset), name)]
    if isinstance(dataset, IterableDataset) or missing:
        why = f"it has no {' and no '.join(missing)}" if missing else "it is an IterableDataset"
        raise TypeError(
            f"dataset of type {type(dataset).__name__}: {why}; an exact order needs a map-style dataset, one with "
            "len(dataset) and dataset[index]"
        )


def _takes_generator(function: Callable[..., Any] | None) -> bool:
    called = function.forward if isinstance(function, torch.nn.Module) else function
    if called is None:
        return False
    try:
        parameter = inspect.signature(called).parameters.get("generator")
    except (TypeError, ValueError):  # a callable written in C without a signature
        return False
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


class Source(Dataset[Any]):
    """The dataset that torch's DataLoader sees: its indices are requests, its items whole micro-batches."""

    def __init__(
        self,
        dataset: MapDataset,
        seed: int,
        transform: Callable[..., Any] | None,
        collate_fn: Callable[..., Any] | None,
    ) -> None:
        self.dataset = dataset
        self._seed = seed
        self._transform = transform
        self._transform_takes_generator = _takes_generator(transform)
        self._collate: Callable[..., Any] = collate_fn or default_collate
        self._collate_takes_generator = _takes_generator(collate_fn)

    def __getitem__(self, request: Request) -> Any:
        if get_worker_info() is None:
            with _random.preserved():
                return self._micro_batch(request)
        return self._micro_batch(request)

    def _micro_batch(self, request: Request) -> Any:
        samples = [self._sample(epoch, index) for epoch, indices in request.samples for index in indices]
        seeds = batch_seeds(self._seed, request.epoch, request.offset, request.share)
        _random.seed_globals(seeds)
        if self._collate_takes_generator:
            return self._collate(samples, generator=_random.generator(seeds))
        return self._collate(samples)

    def _sample(self, epoch: int, index: int) -> Any:
        seeds = sample_seeds(self._seed, epoch, index)
        _random.seed_globals(seeds)
        try:
            sample = self.dataset[index]
            if self._transform is None:
                return sample
            if self._transform_takes_generator:
                return self._transform(sample, generator=_random.generator(seeds))
            return self._transform(sample)
        except Exception as error:
            error.add_note(f"while making sample {index} of epoch {epoch}")
            raise


class WorkerInit:
    """Runs first in every worker."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        # Schedulers signal whole process groups to announce that a job will end. The trainer answers that, with a last
        # save; a worker that died of it would take the trainer with it before the save is made.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        info = get_worker_info()
        # Functions written for torch's DataLoader find their dataset there; the info refuses plain assignment.
        assert info is not None
        assert isinstance(info.dataset, Source)
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._init is not None:
            self._init(worker)
