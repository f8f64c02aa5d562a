"""The short way to what a plain state holds: it gives what the walk gives, or says that it cannot tell."""

import random

import pytest
import torch

from unbroken.checkpoint._tree import Shape, flatten

SKIPPED = frozenset({("m",), ("a", "m")})


def walked(state):
    """(paths, values) by the long way."""
    paths, values = [], []

    def leaf(path, value):
        if path not in SKIPPED:
            paths.append(path)
            values.append(value)

    flatten(state, (), leaf, {})
    return paths, values


def random_leaf(rng):
    return rng.choice([torch.zeros(2), torch.nn.Parameter(torch.zeros(1)), 1, 1.5, True, None, "x"])


def random_state(rng, depth=0):
    state = {}
    for _ in range(rng.randrange(6)):
        state[rng.choice("abcdm")] = (
            random_state(rng, depth + 1) if depth < 3 and rng.random() < 0.3 else random_leaf(rng)
        )
    return state


def change(rng, state):
    """One change of any kind somewhere in the state."""
    inner = [value for value in state.values() if type(value) is dict]
    if inner and rng.random() < 0.5:
        change(rng, rng.choice(inner))
        return
    key = rng.choice("abcdm")
    kind = rng.randrange(6)
    if kind == 0:
        state.pop(key, None)
    elif kind == 1:
        state[key] = random_leaf(rng)
    elif kind == 2:
        state[key] = random_state(rng, 3)
    elif kind == 3:
        state[key] = [torch.zeros(1), {"x": 1}]
    elif kind == 4:
        state[7] = 1
    else:
        state[key] = state.pop(key, 1)  # to the end


def test_it_never_differs_from_the_walk():
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    told = 0
    for number in range(2000):
        state = random_state(rng)
        try:
            shape = Shape(state, (), SKIPPED)
        except TypeError:
            pytest.fail(f"seed {seed}, number {number}: {state}")
        paths, values = walked(state)
        found = shape.leaves(state)
        assert found is not None, f"seed {seed}, number {number}"
        assert same(found, values), f"seed {seed}, number {number}"
        change(rng, state)
        found = shape.leaves(state)
        if found is not None:
            told += 1
            now_paths, now = walked(state)
            assert now_paths == paths, f"seed {seed}, number {number}"
            assert same(found, now), f"seed {seed}, number {number}"
    assert told > 100, "some changes are of values alone"


def same(one, other):
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("odd", [{"a": [1]}, {"a": (1,)}, {1: 2}, {"a": {"b": {None: 1}}}, {"a": object()}])
def test_what_it_cannot_tell_is_walked(odd):
    with pytest.raises(TypeError):
        Shape(odd, (), SKIPPED)


def test_what_stands_where_a_mapping_was_is_seen():
    state = {"a": {"b": 1}}
    shape = Shape(state, (), SKIPPED)
    for other in ({"a": 1}, {"a": {"b": [torch.zeros(1)]}}, {"a": {"b": {}}}, {}, [], None):
        assert shape.leaves(other) is None
