"""Datasets and transforms that workers can import, and ways to run a loader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from unbroken.data import DataLoader


class Numbers:
    """Sample i is the tensor i."""

    def __init__(self, length: int, identity: str | None = None) -> None:
        self._length = length
        if identity is not None:
            self.identity = identity

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        assert 0 <= index < self._length
        return torch.tensor(index)


class Images(Numbers):
    """Sample i is a random image that depends on the global generators and on i."""

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.from_numpy(np.random.random(4)) + torch.rand(4) + random.random()
        return noise + index


class Failing(Numbers):
    """Sample 13 cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            raise OSError("no such image: 13.png")
        return super().__getitem__(index)


def crop(sample: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
    """An augmentation that uses the sample's own generator, and all the global ones."""
    offset = torch.randint(1000, (3,), generator=generator)
    return torch.cat(
        [sample.reshape(-1).double(), offset, torch.rand(1), torch.tensor([random.random(), np.random.rand()])]
    )


def mixup(samples: list[torch.Tensor], generator: torch.Generator) -> torch.Tensor:
    return torch.stack(samples).double() + torch.rand(1, generator=generator).double() + torch.rand(1)


def indices(item: Any) -> list[int]:
    """The samples of an item of a loader of Numbers."""
    parts = item if isinstance(item, list) else [item]
    return [int(number) for part in parts for number in part]


def take(iterator: Iterator[Any], count: int) -> list[list[int]]:
    return [indices(next(iterator)) for _ in range(count)]


def random_state() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=True)
    return random.getstate(), numpy[1].tobytes(), numpy[2:], torch.get_rng_state().numpy().tobytes()


@contextmanager
def closing(*loaders: DataLoader) -> Iterator[None]:
    try:
        yield
    finally:
        for loader in loaders:
            loader.close()
