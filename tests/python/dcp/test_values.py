"""Which plain values count as different between ranks. What is taken for different fails a save."""

import copy
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from unbroken.checkpoint._dcp_values import differences, digests_of

STATE = {
    "set": {"a", "b", "c", "dd", "eee"},
    "frozen": frozenset({1, "x", (2, 3)}),
    "tuple of a dict": ({"b": 1, "a": {"c", "d"}},),
    "list": [1, 2.5, None, [True, b"x"]],
    "nan": float("nan"),
    "complex": 1 + 2j,
    "array": np.arange(6.0).reshape(2, 3),
    "transposed": np.arange(6.0).reshape(3, 2).T,
    "scalar": np.float32(0.1),
    "size": torch.Size([1, 2]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "big": 1 << 90,
}


def told(*states):
    """What is said of ranks that have these."""
    keys = {key for state in states for key in state}
    return differences(sorted(keys), dict(enumerate(map(digests_of, states))))


def test_equal_values_are_equal_in_another_process():
    """Where strings hash to something else, so that sets have another order."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_values; "
        "print(*(raw.hex() for raw in test_values.digests_of(test_values.STATE)))"
    )
    for seed in ("1", "2"):
        command = [sys.executable, "-c", script, os.path.dirname(__file__)]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True, check=True
        )
        assert tuple(map(bytes.fromhex, done.stdout.split())) == digests_of(STATE)
    assert len(digests_of(STATE)[0]) == 8 * len(STATE)


def test_copies_in_another_order_are_equal():
    other = copy.deepcopy(dict(reversed(STATE.items()))) | {"array": np.asfortranarray(STATE["array"])}
    other["tuple of a dict"] = ({"a": {"d", "c"}, "b": 1},)
    assert told(STATE, other) == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("a", b"a"),
        ([1], (1,)),
        (("ab", "c"), ("a", "bc")),
        ({1}, frozenset({1})),
        ({1}, {2}),
        (({"a": 1},), ({"a": 2},)),
        (({"a": "b"},), ({"b": "a"},)),
        (np.arange(4), np.arange(4).reshape(2, 2)),
        (np.arange(4), np.arange(4).astype("int32")),
        (np.float32(1), np.float64(1)),
        (torch.float16, torch.bfloat16),
        (None, 0),
    ],
)
def test_what_differs_in_anything_is_different(one, other):
    assert told({"k": one, "same": 1}, {"k": other, "same": 1}) == "'k' (rank 1 not as rank 0)"


def test_what_cannot_be_told_is_not_compared():
    for one, other in [(object(), object()), ([object()], [object()]), (np.array([None]), np.array([1, None]))]:
        assert told({"k": one}, {"k": other}) == ""
    assert told({"k": object()}, {"k": 1}) != ""
    assert told({"k": torch.ones(2)}, {"k": torch.zeros(2)}) == ""


def test_any_two_ranks_that_have_a_key_are_compared():
    assert told({"a": 1}, {"b": 1}, {"b": 2, "a": 1}, {"b": 1}) == "'b' (rank 2 not as rank 1)"
    assert differences([], {0: digests_of({"a": 1}), 1: digests_of({"a": 2})}) == ""  # it is not saved under that name


def test_many_are_told_in_short():
    states = [{f"k{i:03}": rank for i in range(100)} for rank in range(100)]
    text = told(*states)
    assert text.endswith("and 80 more")
    assert "20 and 79 more not as rank 0)" in text
    assert len(text) < 4000
