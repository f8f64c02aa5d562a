"""Nested state is flattened as DCP does it, and comes back as it was."""

from collections import Counter, OrderedDict, defaultdict

import pytest
import torch
from checkpoint_parts import differences
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from unbroken.checkpoint._tree import flatten, key_of, pack_notes, unflatten, unpack_notes

VALUES = {
    "plain": {"a": 1, "b": {"c": "x"}},
    "tensors in lists": {"a": [torch.ones(2), torch.zeros(3)], "b": [1, 2]},
    "mappings in lists": {"groups": [{"lr": 0.1, "params": ["x", "y"]}, {"lr": 0.2, "params": []}]},
    "lists in lists": {"a": [[1, 2], [torch.ones(1)]], "b": [[1], [2]], "c": []},
    "keys that are no strings": {"milestones": {3: 1, 7: 2}, "flags": {True: 1, None: 2, 1.5: 3}},
    "empty mappings": {"a": {}, "b": {"c": {}}, "d": [{}, {"x": 1}]},
    "kinds of mappings": {"a": OrderedDict(z=1, y=2), "b": Counter("hello"), "c": defaultdict(list, {"k": [1]})},
    "tuples": {"a": (1, 2), "b": (torch.ones(1), "x"), "c": ((), [])},
    "dots in keys": {"a.b": {"c.d": 1}},
    "nothing": {},
}
LISTS = [[torch.ones(2), 3], [{"a": 1}, {}], [[torch.ones(1)], {3: 4}]]


@pytest.mark.parametrize("value", [*VALUES.values(), *LISTS], ids=[*VALUES, "a list", "of mappings", "of lists"])
def test_it_comes_back(value):
    leaves, notes = {}, {}
    flatten(value, (), lambda path, leaf: leaves.update({path: leaf}), notes)
    again = unflatten(leaves, unpack_notes(pack_notes(notes)), value)
    assert not differences(again, value)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_the_keys_are_those_of_dcp(value):
    if "kinds of mappings" in VALUES and value is VALUES["kinds of mappings"]:
        value = {k: dict(v) for k, v in value.items()}
    leaves = {}
    flatten(value, (), lambda path, leaf: leaves.update({path: leaf}), {})
    stock, paths = flatten_state_dict(value)
    assert [key_of(path) for path in leaves] == list(stock)
    assert list(leaves) == list(paths.values())


def test_a_key_that_cannot_be_written_down_is_refused_by_name():
    with pytest.raises(ValueError, match=r"state 'a\.b'.*tuple"):
        flatten({"a": {"b": {(1, 2): 3}}}, (), lambda *_: None, {})


def test_a_note_that_a_mapping_is_empty_gives_way_to_what_is_in_it():
    """The notes are one rank's; another rank may have had something there."""
    assert unflatten({("more", "y"): 1}, {("more",): []}) == {"more": {"y": 1}}
    assert unflatten({("more", "3"): 1, ("more", "y"): 2}, {("more",): [3]}) == {"more": {3: 1, "y": 2}}
