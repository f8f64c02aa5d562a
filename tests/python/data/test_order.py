"""The order of samples: what docs/order.md says, and what must hold for any sizes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken._engine import Permutation, batch_seeds, sample_seeds
from unbroken.data import GlobalBatchSampler, Place
from unbroken.errors import InvalidArgumentError

PAGE = Path(__file__).parents[3] / "docs" / "order.md"


@pytest.fixture(scope="module")
def definition() -> dict[str, Any]:
    """The functions that the page defines."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(code, names)
    return names


words = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 100))


@given(seed=words, epoch=words, samples=st.integers(1, 600))
@settings(deadline=None)
def test_engine_has_the_documented_order(definition: dict[str, Any], seed: int, epoch: int, samples: int) -> None:
    documented = definition["permutation"](seed, epoch, samples)
    assert Permutation(seed, epoch, samples).fill(0, samples).tolist() == [documented(i) for i in range(samples)]


@given(seed=words, epoch=words, samples=st.integers(1, 2**62), data=st.data())
@settings(deadline=None)
def test_engine_has_the_documented_order_of_large_datasets(
    definition: dict[str, Any], seed: int, epoch: int, samples: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, samples - 1))
    order = Permutation(seed, epoch, samples)
    assert order(place) == definition["permutation"](seed, epoch, samples)(place)
    assert order.inverse(order(place)) == place


@given(a=words, b=words, c=words, d=words)
def test_engine_has_the_documented_seeds(definition: dict[str, Any], a: int, b: int, c: int, d: int) -> None:
    assert sample_seeds(a, b, c) == definition["sample_seeds"](a, b, c)
    assert batch_seeds(a, b, c, d) == definition["batch_seeds"](a, b, c, d)


def test_documented_golden_values_are_the_engines() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+), (\d+), (\d+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 9
    for seed, epoch, samples, *at in (map(int, row) for row in rows):
        order = Permutation(seed, epoch, samples)
        assert [order(0), order(samples // 2), order(samples - 1)] == at


def test_bulk_indices_are_a_writable_int64_array_that_torch_takes() -> None:
    indices = Permutation(1, 0, 2**40 + 1).fill(2**40 - 5, 6)
    assert indices.dtype == np.int64
    assert indices.shape == (6,)
    assert indices.flags.writeable
    assert Permutation(1, 0, 5).fill(5, 0).shape == (0,)


@pytest.mark.parametrize(("offset", "count"), [(0, 11), (10, 1), (11, 0), (2**63, 2**63)])
def test_places_outside_are_refused(offset: int, count: int) -> None:
    with pytest.raises(InvalidArgumentError, match="10 samples"):
        Permutation(0, 0, 10).fill(offset, count)
    with pytest.raises(InvalidArgumentError, match="not one of"):
        Permutation(0, 0, 10).inverse(10)


class Run(NamedTuple):
    """Sizes of a run that fit each other."""

    samples: int
    batch: int
    ranks: int
    micro_batches: int
    epoch_end: str
    uneven: str | None
    seed: int

    def sampler(self, rank: int, **changed: Any) -> GlobalBatchSampler:
        arguments = {
            "global_batch_size": self.batch,
            "seed": self.seed,
            "epoch_end": self.epoch_end,
            "uneven": self.uneven,
            "micro_batches": self.micro_batches,
            "dp_rank": rank,
            "dp_size": self.ranks,
        }
        return GlobalBatchSampler(self.samples, **(arguments | changed))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    samples = draw(st.integers(1, 80))
    epoch_end = draw(st.sampled_from(["drop", "wrap", "keep"]))
    limit = samples if epoch_end == "drop" else 100
    ranks = draw(st.integers(1, min(6, limit)))
    micro_batches = draw(st.integers(1, max(1, min(3, limit // ranks))))
    unit = ranks * micro_batches
    uneven = draw(st.sampled_from([None, "balanced"]))
    batch = draw(st.integers(unit, limit)) if uneven else unit * draw(st.integers(1, limit // unit))
    return Run(samples, batch, ranks, micro_batches, epoch_end, uneven, draw(st.integers(0, 2**64 - 1)))


def epochs_of(run: Run, epochs: int) -> list[list[int]]:
    """The samples of all ranks, batch by batch, epoch by epoch of their batches."""
    result = []
    samplers = [run.sampler(rank) for rank in range(run.ranks)]
    while samplers[0].place.epoch < epochs:
        items = [list(sampler) for sampler in samplers]
        assert [len(item) for item in items] == [len(sampler) for sampler in samplers]
        result.append([index for item in items for part in item for index in part])
        for sampler in samplers:
            batches = -(-len(items[0]) // run.micro_batches)
            sampler.place = sampler.place_after(batches)
            assert sampler.place == samplers[0].place
            assert sampler.place.epoch > 0
    return result


@given(run=runs())
@settings(deadline=None, max_examples=300)
def test_ranks_together_take_each_sample_once_an_epoch(run: Run) -> None:
    if run.epoch_end == "wrap":
        taken = [index for epoch in epochs_of(run, 4) for index in epoch]
        whole = len(taken) // run.samples
        counts = Counter(taken)
        assert set(counts.values()) <= {whole, whole + 1}
        assert len(taken) % run.samples == sum(1 for count in counts.values() if count > whole) or whole == 0
        return
    for epoch in epochs_of(run, 3):
        if run.epoch_end == "keep":
            assert sorted(epoch) == list(range(run.samples))
        else:
            assert len(epoch) == len(set(epoch)) == run.samples // run.batch * run.batch


@given(run=runs(), data=st.data())
@settings(deadline=None, max_examples=200)
def test_global_batches_have_the_same_samples_for_any_number_of_ranks(run: Run, data: st.DataObject) -> None:
    alone = run.sampler(0, dp_size=1, micro_batches=1)
    skip = data.draw(st.integers(0, 3))
    place = alone.place_after(skip)
    for sampler in (alone, *(samplers := [run.sampler(rank) for rank in range(run.ranks)])):
        sampler.place = place
    whole = list(alone)
    shares = [list(sampler) for sampler in samplers]
    for number, batch in enumerate(whole):
        cut = slice(number * run.micro_batches, (number + 1) * run.micro_batches)
        together = [index for share in shares for part in share[cut] for index in part]
        assert together == batch


@given(run=runs())
@settings(deadline=None)
def test_full_batches_are_shared_evenly(run: Run) -> None:
    parts = [[len(part) for part in list(run.sampler(rank))[: run.micro_batches]] for rank in range(run.ranks)]
    if run.epoch_end == "keep" and run.samples < run.batch:
        return
    sizes = [sum(part) for part in parts]
    assert sum(sizes) == run.batch
    assert max(sizes) - min(sizes) <= (1 if run.uneven else 0)
    flat = [size for part in parts for size in part]
    assert max(flat) - min(flat) <= (1 if run.uneven else 0)


def test_epochs_have_unrelated_orders_and_seeds_do_too() -> None:
    first, second = (next(iter(GlobalBatchSampler(1000, global_batch_size=1000, seed=seed))) for seed in (0, 1))
    sampler = GlobalBatchSampler(1000, global_batch_size=1000)
    sampler.set_epoch(1)
    third = next(iter(sampler))
    for one, other in ((first, second), (first, third), (second, third)):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 10
        assert sorted(one) == sorted(other)


def test_without_shuffling_samples_come_by_index() -> None:
    assert list(GlobalBatchSampler(7, global_batch_size=3, shuffle=False, epoch_end="keep")) == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]


def test_sampler_does_not_move_while_it_is_read_ahead() -> None:
    sampler = GlobalBatchSampler(range(100), global_batch_size=10, seed=3)
    whole = list(sampler)
    assert sampler.place == Place(0, 0)
    sampler.place = sampler.place_after(4)
    assert sampler.place == (0, 40)
    assert list(sampler) == whole[4:]
    assert len(sampler) == 6
    assert sampler.place_after(6) == (1, 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"global_batch_size": 10, "dp_size": 4}, "8 and 12 fit"),
        ({"global_batch_size": 12, "dp_size": 2, "micro_batches": 4}, "micro_batches 3 and 6 fit"),
        ({"global_batch_size": 101}, "100 samples"),
        ({"global_batch_size": 3, "dp_size": 4, "uneven": "balanced"}, "4 or more"),
        ({"global_batch_size": 0}, "1 or more"),
        ({"global_batch_size": 8, "seed": -1}, "0 or more"),
        ({"global_batch_size": 8, "seed": 2**64}, r"below 2\*\*64"),
        ({"global_batch_size": 8, "epoch_end": "stop"}, "'drop', 'wrap' or 'keep'"),
        ({"global_batch_size": 8, "uneven": True}, "'balanced'"),
        ({"global_batch_size": 8, "dp_rank": 1}, "dp_size=1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GlobalBatchSampler(100, **({"dp_rank": 0, "dp_size": 1} | arguments))


def test_sizes_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match=r"global_batch_size=8\.0"):
        GlobalBatchSampler(100, global_batch_size=8.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no samples"):
        GlobalBatchSampler([], global_batch_size=8)
