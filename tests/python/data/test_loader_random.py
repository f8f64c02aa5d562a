"""Random numbers of samples: functions of (seed, epoch, sample)."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from loader_helpers import Images, Numbers, closing, crop, indices, mixup, random_state

from unbroken._engine import sample_seeds
from unbroken.data import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def by_sample(loader: DataLoader, epochs: int = 1) -> list[dict[int, torch.Tensor]]:
    """What each sample of a loader with_indices became, epoch by epoch."""
    result = []
    for _ in range(epochs):
        epoch = {}
        for batch, numbers in loader:
            epoch |= dict(zip(numbers, batch, strict=True))
        result.append(epoch)
    return result


def equal(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def loader(dataset: Any = None, batch: int = 8, **arguments: Any) -> DataLoader:
    arguments = {"seed": 11, "transform": crop, "with_indices": True} | arguments
    return DataLoader(dataset or Images(48), global_batch_size=batch, **arguments)


def test_d15_every_sample_has_random_numbers_of_its_own_in_every_epoch_from_every_generator() -> None:
    epochs = by_sample(loader(Numbers(48)), epochs=3)
    # crop() gives [the number, 3 of the sample's own generator, torch's, python's, numpy's]
    for column in range(1, 7):
        drawn = [round(float(sample[column]), 9) for epoch in epochs for sample in epoch.values()]
        expected = len(drawn) if column > 3 else len(drawn) * 0.8  # the first are integers below 1000
        assert len(set(drawn)) >= expected, f"column {column} repeats"
    one = epochs[0][7]
    assert len({round(float(number), 6) for number in one[4:]}) == 3


def draw(sample: torch.Tensor, generator: torch.Generator) -> list[float]:
    return [
        random.random(),
        float(np.random.random()),
        torch.rand(1, dtype=torch.float64).item(),
        torch.rand(1, dtype=torch.float64, generator=generator).item(),
    ]


def test_each_generator_has_the_documented_seed_of_its_own() -> None:
    ours = loader(Numbers(48), transform=draw, collate_fn=list)
    for batch, numbers in ours:
        for drawn, number in zip(batch, numbers, strict=True):
            python, numpy, cpu, own = sample_seeds(11, 0, number)
            assert drawn == [
                random.Random(python).random(),
                np.random.RandomState(numpy % 2**32).random_sample(),
                torch.rand(1, dtype=torch.float64, generator=torch.Generator().manual_seed(cpu)).item(),
                torch.rand(1, dtype=torch.float64, generator=torch.Generator().manual_seed(own)).item(),
            ]


def test_random_numbers_depend_on_the_seed() -> None:
    (one,), (other,) = by_sample(loader()), by_sample(loader(seed=12))
    assert one.keys() == other.keys()
    assert not any(torch.equal(one[key], other[key]) for key in one)


def test_d16_random_crops_are_bit_equal_whatever_ranks_workers_batch_and_order_of_reading() -> None:
    random.seed()  # the trainer's own generators have no part in it
    (whole,) = by_sample(loader())
    variants = [
        [loader(batch=48)],
        [loader(dp_rank=rank, dp_size=2) for rank in range(2)],
        [loader(num_workers=3, prefetch_factor=1)],
        [loader(batch=16, num_workers=2, persistent_workers=True)],
    ]
    for variant in variants:
        with closing(*variant):
            torch.rand(3)
            merged: dict[int, torch.Tensor] = {}
            for one in variant:
                merged |= by_sample(one)[0]
            assert equal(merged, whole)


def test_d16_resumed_in_mid_epoch_and_on_other_workers_the_tensors_are_bit_equal() -> None:
    epochs = by_sample(loader(), epochs=2)
    first = loader(num_workers=2)
    with closing(first):
        seen = {}
        for batch, numbers in first:
            seen |= dict(zip(numbers, batch, strict=True))
            if len(seen) == 24:
                break
        state = first.state_dict()
    second = loader(num_workers=1)
    with closing(second):
        second.load_state_dict(state)
        seen |= by_sample(second)[0]
        assert equal(seen, epochs[0])
        assert equal(by_sample(second)[0], epochs[1])


def test_wrapped_samples_have_the_numbers_of_the_epoch_they_are_of() -> None:
    (first, second) = by_sample(loader(Images(48), batch=48), epochs=2)
    drawn: list[tuple[int, torch.Tensor]] = []
    wrapped = loader(Images(48), batch=36, epoch_end="wrap")
    for batch, numbers in (*wrapped, *wrapped):
        drawn += zip(numbers, batch, strict=True)
    assert equal(dict(drawn[:48]), first)
    assert equal(dict(drawn[48:96]), second)


def test_transforms_of_one_argument_and_of_other_kinds_work_as_they_are() -> None:
    class Double:
        def __call__(self, sample: torch.Tensor) -> torch.Tensor:
            return sample * 2

    class Module(torch.nn.Module):
        def forward(self, sample: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
            assert generator is not None
            return sample * 2

    def with_rest(sample: torch.Tensor, **rest: Any) -> torch.Tensor:
        assert not rest, "only a parameter of that name gets a generator"
        return sample * 2

    transforms = [lambda sample: sample * 2, Double(), Module(), with_rest, functools.partial(torch.mul, 2)]
    for transform in transforms:
        ours = DataLoader(Numbers(6), global_batch_size=6, transform=transform)
        plain = DataLoader(Numbers(6), global_batch_size=6)
        assert [index * 2 for index in indices(next(iter(plain)))] == indices(next(iter(ours)))


def test_collation_has_random_numbers_of_the_batch_and_share() -> None:
    def batches(**arguments: Any) -> list[torch.Tensor]:
        ours = DataLoader(Numbers(48), global_batch_size=8, seed=1, collate_fn=mixup, **arguments)
        with closing(ours):
            return list(ours)

    one, other, many = batches(), batches(), batches(num_workers=2)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, other, many, strict=True))
    shares = batches(dp_rank=0, dp_size=2) + batches(dp_rank=1, dp_size=2)
    assert len({round(float(batch[0] % 1), 9) for batch in shares}) == len(shares), "shares repeat each other's numbers"
    (pair,) = DataLoader(Numbers(8), global_batch_size=8, collate_fn=mixup, micro_batches=2)
    assert float(pair[0][0] % 1) != float(pair[1][0] % 1)


def test_the_trainers_generators_are_as_they_were_around_every_batch() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = [(torch.rand(1).item(), np.random.rand(), random.random()) for _ in range(6)]
    for workers in (0, 2):
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        before = random_state()
        ours = loader(num_workers=workers)
        with closing(ours):
            iterator = iter(ours)
            assert random_state() == before
            drawn = []
            for _ in iterator:
                drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
            assert drawn == expected
