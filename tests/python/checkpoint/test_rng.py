"""Random number generators come back exactly."""

import random

import numpy as np
import pytest
import torch

import unbroken
from unbroken import _rng


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


@pytest.mark.parametrize("before", [0, 1, 5, 700])
def test_what_is_drawn_after_a_restore_is_what_was_drawn_after_the_capture(before):
    for _ in range(before):
        draw()
    random.gauss(0, 1)  # leaves one of a pair behind, in python and in numpy
    np.random.randn()
    state = _rng.capture()
    first = [draw() for _ in range(700)]
    assert _rng.restore(state) == []
    assert [draw() for _ in range(700)] == first


def test_names_and_shapes_never_change():
    first = _rng.capture()
    random.gauss(0, 1)
    draw()
    second = _rng.capture()
    assert {k: (v.shape, v.dtype) for k, v in first.items()} == {k: (v.shape, v.dtype) for k, v in second.items()}
    assert {"python", "numpy", "torch"} <= set(first)


def test_capturing_draws_nothing():
    _rng.restore(_rng.capture())
    before = _rng.capture()
    after = _rng.capture()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_derived_seeds_differ_by_step_rank_and_generator():
    seen = set()
    for seed, step, rank in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        _rng.seed_from(seed, step, rank)
        one = (random.random(), np.random.rand(), torch.rand(1).item())
        _rng.seed_from(seed, step, rank)
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == one
        seen |= set(one)
    assert len(seen) == 12


def test_a_device_that_is_gone_is_named():
    state = _rng.capture() | {"cuda_99": torch.zeros(16, dtype=torch.uint8)}
    assert _rng.restore(state) == ["cuda_99"]


@pytest.mark.parametrize(("saved", "now"), [(2, 2), (2, 1)])
def test_another_layout_of_as_many_ranks_draws_new_numbers(tmp_path, saved, now, caplog):
    """Where ranks share a batch that did not before, as under tensor parallelism, numbers of their own would differ."""

    def start(dp_size):
        loader = unbroken.data.DataLoader(range(100), global_batch_size=4, seed=1, dp_rank=0, dp_size=dp_size)
        return unbroken.Checkpointer(tmp_path, {"x": torch.zeros(3)}, loader=loader, seed=5, signals=False)

    with start(saved) as run:
        for _ in run.batches(until=2):
            torch.rand(7)
        drawn = torch.get_rng_state()
    torch.manual_seed(0)
    with start(now) as run:
        assert run.resume() == 2
        here = torch.get_rng_state()
    _rng.seed_from(5, 2, 0)
    assert torch.equal(here, drawn if saved == now else torch.get_rng_state())
    assert ("data-parallel size 2, this one is of 1" in caplog.text) == (saved != now)
