"""Random number generators come back exactly."""

import random

import numpy as np
import pytest
import torch

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
