"""Nested state as a flat list of named leaves, as torch.distributed.checkpoint flattens it, and back.

DCP turns every mapping key into a string and drops empty mappings. What that loses is written down as a note, so that
a state comes back as it was; stock DCP does not see the notes.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from unbroken.errors import InvalidArgumentError

__all__ = ["Notes", "Path", "Shape", "flatten", "key_of", "pack_notes", "unflatten", "unpack_notes"]

Path = tuple[str | int, ...]
# For a mapping that is empty, holds an empty one or has keys other than strings: its keys.
Notes = dict[Path, list[Any]]
_KEY_TYPES = (str, int, float, bool, type(None))


def key_of(path: Path) -> str:
    """DCP's name of a leaf."""
    return ".".join(map(str, path))


def _is_leaf_list(value: list[Any]) -> bool:
    """A list is one value unless it holds tensors, mappings or lists that do."""
    return not any(
        isinstance(entry, (Mapping, torch.Tensor)) or (isinstance(entry, list) and not _is_leaf_list(entry))
        for entry in value
    )


def flatten(value: Any, path: Path, leaf: Callable[[Path, Any], None], notes: Notes) -> int:
    """Calls `leaf` for each leaf of `value` in order; returns how many there are."""
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in _KEY_TYPES:
                raise InvalidArgumentError(
                    f"state {key_of(path)!r}: a mapping with a key of type {type(key).__name__} ({key!r}) cannot be "
                    "saved; use str, int, float or bool"
                )
        counts = []
        for key, entry in value.items():
            at = (*path, str(key))
            if type(entry) is torch.Tensor:  # most are, and need not be asked what else they might be
                leaf(at, entry)
                counts.append(1)
            else:
                counts.append(flatten(entry, at, leaf, notes))
        # An entry without leaves leaves no trace; the order of the keys says where it stood.
        if not counts or 0 in counts or not all(type(key) is str for key in value):
            notes[path] = list(value)
        return sum(counts)
    if isinstance(value, list) and not _is_leaf_list(value):
        return sum(flatten(entry, (*path, i), leaf, notes) for i, entry in enumerate(value))
    leaf(path, value)
    return 1


class Shape:
    """The mappings of a nested state, to see at a glance whether it still has the leaves that it had."""

    _LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, int, float, str, bool, type(None)))

    def __init__(self, mapping: Mapping[Any, Any], path: Path, skipped: Collection[Path]) -> None:
        """skipped: what to leave out. Raises TypeError when there is something that only flatten() can tell."""
        if type(mapping) is not dict or not all(type(key) is str for key in mapping):
            raise TypeError
        self._keys = list(mapping)
        self._kinds = list(map(type, mapping.values()))
        self._apart: list[tuple[int, Shape | None]] = []  # by number of the entry; None: it is left out
        for number, (key, entry) in enumerate(mapping.items()):
            at = (*path, key)
            if type(entry) is dict:
                self._apart.append((number, Shape(entry, at, skipped)))
            elif at in skipped and not isinstance(entry, (Mapping, list)):
                self._apart.append((number, None))
            elif type(entry) not in self._LEAVES:
                raise TypeError

    def leaves(self, mapping: Any) -> list[Any] | None:
        """What the leaves hold now, in flatten()'s order. None: they may be others."""
        if type(mapping) is not dict or list(mapping) != self._keys:
            return None
        entries = list(mapping.values())
        if list(map(type, entries)) != self._kinds:
            return None
        found: list[Any] = []
        begin = 0
        for number, inner in self._apart:
            found += entries[begin:number]
            begin = number + 1
            if inner is not None:
                some = inner.leaves(entries[number])
                if some is None:
                    return None
                found += some
        return found + entries[begin:]


def _insert(root: dict[str, Any], path: Path, value: Any, *, replace: bool = True) -> None:
    node: Any = root
    for i, part in enumerate(path):
        last = i + 1 == len(path)
        fresh: Any = value if last else ({} if isinstance(path[i + 1], str) else [])
        if isinstance(part, int):
            node.extend([None] * (part + 1 - len(node)))
            if node[part] is None or (last and replace):
                node[part] = fresh
        elif part not in node or (last and replace):
            node[part] = fresh
        node = node[part]


def _like(template: Any, made: dict[Any, Any]) -> Any:
    if type(template) is defaultdict:
        return defaultdict(template.default_factory, made)
    if type(template) in (OrderedDict, Counter):
        return type(template)(made)
    return made


def _restore(node: Any, path: Path, notes: Notes, template: Any) -> Any:
    if isinstance(node, dict):
        noted = {str(key): key for key in notes.get(path, ())}
        below = template if isinstance(template, Mapping) else {}
        made = {}
        for name in noted | dict.fromkeys(node):
            if name in node:
                key = noted.get(name, name)
                made[key] = _restore(node[name], (*path, name), notes, below.get(key))
        return _like(template, made)
    if isinstance(node, list):
        like = template if isinstance(template, list) else []
        return [_restore(v, (*path, i), notes, like[i] if i < len(like) else None) for i, v in enumerate(node)]
    return node


def unflatten(leaves: Mapping[Path, Any], notes: Notes, template: Any = None) -> Any:
    """The nested value of `leaves`; mappings get the type that `template` has in the same place."""
    if () in leaves:
        return leaves[()]
    root: dict[str, Any] = {}  # holds the whole, which may be a list
    for path, value in leaves.items():
        _insert(root, ("", *path), value)
    for path, keys in notes.items():
        if not keys and path:
            _insert(root, ("", *path), {}, replace=False)
    return _restore(root.get("", {}), (), notes, template)


def pack_notes(notes: Notes) -> str:
    return json.dumps([[list(path), keys] for path, keys in notes.items()])


def unpack_notes(text: str) -> Notes:
    return {tuple(path): keys for path, keys in json.loads(text)}
