"""The bytes of `.metadata` for a plan, without making the objects that they stand for.

DCP's Metadata has two objects for each piece of each tensor, which for a thousand ranks take longer to make and pickle
than everything else in a save. Here each kind is pickled once, with holes in it, and the holes are filled for each
piece: so the layout is that of this version of torch, whatever fields its classes have. Constants, keys and names of
files are written once, in front (pickle protocol 2, "memo"); what follows refers to them. So what one rank wrote can be
replaced without writing the others' again.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from unbroken.checkpoint._metadata import no_collection
from unbroken.checkpoint._plan import Item, Places, Plan, dtype_of, owned_pieces, ties_of
from unbroken.checkpoint._state import values_key

__all__ = ["MetadataWriter"]

_PROTOCOL = 2
_BATCH = 1000  # entries of a dictionary that the reader's stack holds at once
_HOLE = "hole in a pickle "
_INTEGER_HOLE = 0x7EA50000  # and those after it: a torch.Size takes integers only
_MOST_DIMENSIONS = 1 << 16
_MOST_SIZES = 1 << 14  # that are kept at once


class MetadataWriter:
    """For one plan. Not thread-safe."""

    def __init__(self, plan: Plan) -> None:
        """plan: the coordinator's."""
        assert plan.everything is not None
        assert plan.owners is not None
        self._everything, self._owners = plan.everything, plan.owners
        self._ties = ties_of(plan.everything)
        self._pickle = _Pickle()
        self._numbers = [array("q") for _ in self._owners]  # by rank: which piece of its tensor each one is
        self._places: list[Places | None] = []  # what _stored was made of
        self._stored: list[bytes] = []  # by rank: its entries of storage_data
        with no_collection():
            self._described, self._paths = self._describe()

    def write(self, places: Sequence[Places], apart: Collection[int]) -> list[bytes]:
        """The file, in parts: as a whole it can be so large that joining them would keep other threads waiting.

        places: where each rank has each of its slots, the last one for its own values.
        apart: the ranks whose own values are listed.
        """
        if not self._places:
            self._places, self._stored = [None for _ in places], [b"" for _ in places]
        with no_collection():
            for rank, its in enumerate(places):
                if its != self._places[rank]:
                    self._stored[rank] = self._store(rank, its)
                    self._places[rank] = its
            keys = {rank: values_key(rank) for rank in apart}
            state = _batches(self._pickle.name(key) + self._pickle.object for key in keys.values())
            paths = _batches(self._pickle.name(key) + self._pickle.plain((key,)) for key in keys.values())
            stored = _batches(
                self._pickle.index_of_object(key) + self._pickle.info(*places[rank].at(-1))
                for rank, key in keys.items()
            )
            return self._pickle.metadata([*self._described, *state], [*self._paths, *paths], [*self._stored, *stored])

    def _describe(self) -> tuple[list[bytes], list[bytes]]:
        """The entries of state_dict_metadata and of planner_data."""
        items: dict[str, Item] = {}
        for its in self._everything:  # in the order of the walk, so that mappings come back in theirs
            for item in its:
                items.setdefault(item.key, item)
        chunks: dict[str, list[bytes]] = {key: [] for key, item in items.items() if item.dtype is not None}
        for rank, _, item, piece in owned_pieces(self._everything, self._owners):
            if item.dtype is None:
                continue
            chunk = self._pickle.chunk(piece.offsets, piece.sizes)
            for key in self._names(item):
                self._numbers[rank].append(len(chunks[key]))
                chunks[key].append(chunk)
        described = _batches(self._entry(item, chunks.get(key, [])) for key, item in items.items())
        paths = _batches(self._pickle.name(key) + self._pickle.plain(item.path) for key, item in items.items())
        return list(described), list(paths)

    def _names(self, item: Item) -> Sequence[str]:
        ties = self._ties.get(item.key)
        return (item.key,) if ties is None else [item.key, *(other.key for other in ties)]

    def _entry(self, item: Item, chunks: list[bytes]) -> bytes:
        name = self._pickle.name(item.key)
        if item.dtype is None:
            return name + self._pickle.object
        return name + self._pickle.tensor(item.dtype, item.size, chunks)

    def _store(self, rank: int, places: Places) -> bytes:
        numbers = iter(self._numbers[rank])

        def entries() -> Iterator[bytes]:
            for _, slot, item, piece in owned_pieces(self._everything, self._owners, (rank,)):
                info = self._pickle.info(*places.at(slot))
                for key in self._names(item):
                    if item.dtype is None:
                        yield self._pickle.index_of_object(key) + info
                    else:
                        yield self._pickle.index(key, piece.offsets, next(numbers)) + info

        return b"".join(_batches(entries()))


class _Template:
    """The code of an object, but for what is to be filled in."""

    def __init__(self, parts: list[bytes], order: list[int]) -> None:
        """parts: what stands around the holes. order: of each hole, the number of the value that goes there."""
        self._parts = parts
        self._form = b"%b".join(part.replace(b"%", b"%%") for part in parts)
        self._order = order
        self._ordered = itemgetter(*order) if order != sorted(order) else None

    def fill(self, *values: bytes) -> bytes:
        return self._form % (values if self._ordered is None else self._ordered(values))

    def around(self, *values: list[bytes]) -> Iterator[bytes]:
        """As fill(), for values in parts, in parts."""
        yield self._parts[0]
        for number, part in zip(self._order, self._parts[1:], strict=True):
            yield from values[number]
            yield part


class _Pickle:
    """Parts of a pickle, each for itself, behind the constants that they refer to."""

    def __init__(self) -> None:
        self._constants: list[bytes] = []
        self._references: dict[bytes, bytes] = {}  # by the code of a constant
        self._names: dict[str, bytes] = {}
        self._sizes: dict[tuple[int, ...], bytes] = {}  # most pieces are as large, and many begin, where others do
        self._size_templates: dict[int, _Template] = {}
        self._properties: dict[str, bytes] = {}  # by dtype
        self.object = self._template(BytesStorageMetadata()).fill()
        hole: Any = _hole  # stands where the classes want something else
        self._chunk = self._template(ChunkStorageMetadata(hole(0), hole(1)))
        self._tensor = self._template(TensorStorageMetadata(hole(0), hole(1), hole(2)))
        self._index_of_object = self._template(MetadataIndex(hole(0)))
        index = MetadataIndex(hole(0), (), hole(2))
        object.__setattr__(index, "offset", hole(1))  # the class is frozen, and makes a torch.Size of what it is given
        self._index = self._template(index)
        self._info = self._template(_StorageInfo(hole(0), hole(1), hole(2)))
        self._metadata = self._template(Metadata(hole(0), hole(1), hole(2), version=CURRENT_DCP_VERSION))

    def metadata(self, state: list[bytes], paths: list[bytes], stored: list[bytes]) -> list[bytes]:
        """All of it, given the entries of its three mappings."""
        mappings = ([pickle.EMPTY_DICT, *entries] for entries in (state, paths, stored))
        head = pickle.PROTO + bytes([_PROTOCOL])
        return [head, b"".join(self._constants), *self._metadata.around(*mappings), pickle.STOP]

    def chunk(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> bytes:
        return self._chunk.fill(self._size(offsets), self._size(sizes))

    def tensor(self, dtype: str, size: tuple[int, ...], chunks: list[bytes]) -> bytes:
        properties = self._properties.get(dtype)
        if properties is None:  # they take long to read, and are the same for all: one object is enough
            code = self._template(TensorProperties(dtype=dtype_of(dtype))).fill()
            properties = self._properties[dtype] = self._constant(code)
        listed = b"".join((pickle.EMPTY_LIST, pickle.MARK, *chunks, pickle.APPENDS))
        return self._tensor.fill(properties, self._size(size), listed)

    def index_of_object(self, key: str) -> bytes:
        return self._index_of_object.fill(self.name(key))

    def index(self, key: str, offsets: tuple[int, ...], number: int) -> bytes:
        return self._index.fill(self.name(key), self._size(offsets), _integer(number))

    def info(self, file: str, offset: int, length: int) -> bytes:
        return self._info.fill(self.name(file), _integer(offset), _integer(length))

    def plain(self, value: Any) -> bytes:
        """A value that has no holes, whatever is in it."""
        return _pickled(value)

    def name(self, name: str) -> bytes:
        code = self._names.get(name)
        if code is None:
            code = self._names[name] = self._constant(_pickled(name))
        return code

    def _constant(self, code: bytes) -> bytes:
        if code not in self._references:
            number = len(self._references).to_bytes(4, "little")
            self._constants.append(code + pickle.LONG_BINPUT + number + pickle.POP)
            self._references[code] = pickle.LONG_BINGET + number
        return self._references[code]

    def _size(self, sizes: tuple[int, ...]) -> bytes:
        code = self._sizes.get(sizes)
        if code is None:
            if len(self._sizes) == _MOST_SIZES:
                self._sizes.clear()
            code = self._sizes[sizes] = self._new_size(sizes)
        return code

    def _new_size(self, sizes: tuple[int, ...]) -> bytes:
        template = self._size_templates.get(len(sizes))
        if template is None:
            sample = torch.Size(_INTEGER_HOLE + i for i in range(len(sizes)))
            template = self._size_templates[len(sizes)] = self._template(sample)
        return template.fill(*map(_integer, sizes))

    def _template(self, value: Any) -> _Template:
        code = _pickled(value)
        ops = [(op.name, told, begin or 0) for op, told, begin in pickletools.genops(code + pickle.STOP)]
        parts, order = [b""], []
        for (name, told, begin), (_, _, end) in pairwise(ops):
            if (number := _number_of_hole(told)) is not None:
                parts.append(b"")
                order.append(number)
            elif name in ("GLOBAL", "BINUNICODE"):
                parts[-1] += self._constant(code[begin:end])
            else:
                parts[-1] += code[begin:end]
        return _Template(parts, order)


def _hole(number: int) -> str:
    return f"{_HOLE}{number}"


def _number_of_hole(told: Any) -> int | None:
    """The number of the hole that a code's argument stands for, if it does."""
    if isinstance(told, str) and told.startswith(_HOLE):
        return int(told.removeprefix(_HOLE))
    if isinstance(told, int) and _INTEGER_HOLE <= told < _INTEGER_HOLE + _MOST_DIMENSIONS:
        return told - _INTEGER_HOLE
    return None


def _pickled(value: Any) -> bytes:
    """The code that makes `value`, without references within it."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, _PROTOCOL)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()[2:-1]  # without PROTO and STOP


def _integer(number: int) -> bytes:
    return pickle.BININT + number.to_bytes(4, "little") if number < 1 << 31 else _pickled(number)


def _batches(entries: Iterable[bytes]) -> Iterator[bytes]:
    """The code that puts all entries, each a key and a value, into the dictionary on top of the stack."""
    left = iter(entries)
    while batch := list(islice(left, _BATCH)):
        yield b"".join((pickle.MARK, *batch, pickle.SETITEMS))
