"""Reading one checkpoint: its metadata, its objects, and byte ranges straight into tensors."""

from __future__ import annotations

import abc
import ctypes
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from unbroken import _engine
from unbroken.checkpoint._layout import boxes_of
from unbroken.checkpoint._metadata import read_metadata
from unbroken.checkpoint._plan import is_raw
from unbroken.checkpoint._safe import load, loads
from unbroken.checkpoint._state import NOTES_KEY
from unbroken.checkpoint._tree import Notes, Path, unpack_notes
from unbroken.errors import DamagedError, InvalidArgumentError

__all__ = ["CheckpointReader", "Reading", "Saved", "Target", "put", "tensor_in"]

_TEMPORARY_BYTES = 256 << 20


@dataclass(frozen=True)
class Saved:
    """One leaf of a checkpoint."""

    key: str
    path: Path
    tensor: TensorStorageMetadata | None  # None: an object

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.size) if self.tensor is not None else ()

    @property
    def dtype(self) -> torch.dtype:
        assert self.tensor is not None
        return self.tensor.properties.dtype


@dataclass
class _Range:
    file: str
    offset: int
    nbytes: int
    address: int


Target = tuple[ReadItem, torch.Tensor]


class Reading(abc.ABC):
    """A checkpoint that can be read. What is in it is never run."""

    def __init__(self, attempt: str, raw_metadata: bytes) -> None:
        self.attempt = attempt
        self.metadata: Metadata = read_metadata(raw_metadata)
        storage = self.metadata.storage_data
        self._storage: dict[Any, Any] = storage if isinstance(storage, dict) else {}
        noted = self.metadata.planner_data
        paths: dict[str, Any] = noted if isinstance(noted, dict) else {}  # a planner of one's own keeps what it likes
        self.saved = {
            key: Saved(key, _path(paths.get(key), key), entry if isinstance(entry, TensorStorageMetadata) else None)
            for key, entry in self.metadata.state_dict_metadata.items()
        }

    @property
    def step(self) -> int:
        """The step that it was saved at; 0 where none was told."""
        return 0

    def notes(self) -> Notes | None:
        """What DCP's layout loses of containers; None where it was not written down."""
        return None

    @abc.abstractmethod
    def archives(self, keys: Sequence[str]) -> dict[str, bytes | memoryview]:
        """The bytes of the objects of `keys`, which torch.save wrote. Not checked for what they would run."""

    @abc.abstractmethod
    def fill(self, targets: Iterable[Target], *, alone: bool | None = None) -> None:
        """Fills the tensors, which do not require grad, each with what its item asks for.

        alone: no other process of this machine is about to read the same, so that the page cache would not help it;
        None: as far as the number of ranks here tells.
        """

    def objects(self, keys: Sequence[str]) -> dict[str, Any]:
        """The objects of `keys`, read without running what they say."""
        return {key: loads(key, raw) for key, raw in self.archives(keys).items()}

    def tensors(self, targets: dict[str, torch.Tensor]) -> None:
        """Fills the targets, by key. A target may be sharded; it has the saved tensor's shape."""
        here = _is_alone()
        alone = {key: here or _is_held_once(target) for key, target in targets.items()}
        with torch.no_grad():
            for kind in sorted(set(alone.values())):
                some = {key: target.detach() for key, target in targets.items() if alone[key] is kind}
                self.fill(self._plan(some), alone=kind)

    def _plan(self, targets: dict[str, torch.Tensor]) -> Iterator[tuple[ReadItem, torch.Tensor]]:
        """What to read, and the memory that it goes to."""
        for key, target in targets.items():
            saved = self.saved[key].tensor
            assert saved is not None
            if tuple(saved.size) != tuple(target.shape):
                raise InvalidArgumentError(
                    f"load {self.attempt}: {key!r} was saved as {tuple(saved.size)} and is {tuple(target.shape)} here"
                )
            if len(saved.chunks) == 1 and saved.chunks[0].sizes == saved.size and not isinstance(target, DTensor):
                yield _whole(key, saved), target  # what most are, at a tenth of the cost
                continue
            if isinstance(target, DTensor):
                local = target.to_local()
                parts = [(box.offsets, box.sizes, box.of(local)) for box in boxes_of(key, target)]
            else:
                parts = [((0,) * target.dim(), tuple(target.shape), target)]
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in parts]
            items = create_read_items_for_chunk_list(key, saved, chunks)
            if sum(math.prod(item.lengths) for item in items) < sum(part.numel() for _, _, part in parts):
                raise DamagedError(f"{self.attempt}: the saved pieces of {key!r} do not fill it")
            for item in items:
                assert item.dest_index.index is not None
                part = parts[item.dest_index.index][2]
                yield item, narrow_tensor_by_index(part, item.dest_offsets, item.lengths)

    def _info(self, index: MetadataIndex) -> _StorageInfo:
        info: _StorageInfo | None = self._storage.get(index)
        if info is None:
            raise DamagedError(f"{self.attempt}: .metadata does not say where {index.fqn!r} is")
        said = vars(info) if type(info) is _StorageInfo else {}
        file, offset, length = said.get("relative_path"), said.get("offset"), said.get("length")
        if not (type(file) is str and type(offset) is int and type(length) is int and offset >= 0 and length >= 0):
            raise DamagedError(f"{self.attempt}: what .metadata says of the place of {index.fqn!r} makes no sense")
        return info


def _is_alone() -> bool:
    """Whether no other rank is on this machine."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if here.isdecimal():
        return int(here) == 1
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def _is_held_once(target: torch.Tensor) -> bool:
    """Whether no other rank holds what this one holds of it."""
    return isinstance(target, DTensor) and all(
        target.device_mesh.size(dim) == 1 or not placement.is_replicate()
        for dim, placement in enumerate(target.placements)
    )


def _path(noted: Any, key: str) -> Path:
    good = isinstance(noted, tuple) and noted and all(type(part) in (str, int) for part in noted)
    return noted if good else (key,)


def _whole(key: str, saved: TensorStorageMetadata) -> ReadItem:
    """All of a tensor that was saved in one piece."""
    origin = torch.Size((0,) * len(saved.size))
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(key, origin, 0),
        dest_offsets=origin,
        storage_index=MetadataIndex(key, saved.chunks[0].offsets, 0),
        storage_offsets=origin,
        lengths=saved.size,
    )


def tensor_in(key: str, stream: IO[bytes]) -> torch.Tensor:
    """The tensor that torch.save wrote."""
    value = load(key, stream)
    if not isinstance(value, torch.Tensor):
        raise DamagedError(f"read {key!r}: a {type(value).__name__} where a tensor should be")
    return value


def put(where: str, item: ReadItem, target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies to `target` what `item` asks for of `tensor`, the whole of a saved piece."""
    key = item.storage_index.fqn
    try:
        part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
        if part.size() != target.size():
            raise DamagedError(f"{where}: {key!r} is of {tuple(part.size())}, and {tuple(target.size())} is asked for")
        target.copy_(part)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        kinds = f"a {type(tensor).__name__} of {tensor.dtype} into a {type(target).__name__} of {target.dtype}"
        raise InvalidArgumentError(f"load {where}: {key!r}: {kinds}: {error}") from error


class CheckpointReader(Reading):
    """A complete checkpoint of Unbroken. All that comes out of it has been verified."""

    def __init__(self, store: _engine.Store, attempt: str, *, only_rank: int | None = None) -> None:
        """only_rank: what this rank has saved alone."""
        self._reader = _engine.AttemptReader(store, attempt, only_rank=only_rank)
        self.manifest: dict[str, Any] = json.loads(self._reader.manifest())
        self._slots: dict[str, dict[int, _engine.Slot]] = {}
        super().__init__(attempt or store.url, self._reader.metadata())

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    def _slot(self, index: MetadataIndex) -> _engine.Slot:
        """Where an entry lies. .metadata and the manifest say both, and must agree."""
        info = self._info(index)
        file = info.relative_path
        if file not in self._slots:
            self._slots[file] = {slot.offset: slot for slot in self._reader.slots(file)}
        slot = self._slots[file].get(info.offset)
        if slot is None or slot.length != info.length:
            raise DamagedError(f"{self.attempt}: {index.fqn!r} is not in {file} where .metadata says")
        return slot

    def notes(self) -> Notes | None:
        if NOTES_KEY not in self.saved:
            return None
        return unpack_notes(self.objects([NOTES_KEY])[NOTES_KEY])

    def archives(self, keys: Sequence[str]) -> dict[str, bytes | memoryview]:
        return dict(zip(keys, self._read_archives([self._slot(MetadataIndex(key)) for key in keys]), strict=True))

    def _read_archives(self, slots: Sequence[_engine.Slot]) -> list[memoryview]:
        memory = bytearray(sum(slot.length for slot in slots))
        if not memory:
            return []
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ranges, found, at = [], [], 0
        for slot in slots:
            ranges.append(_Range(slot.file, slot.offset, slot.length, base + at))
            found.append(memoryview(memory)[at : at + slot.length])
            at += slot.length
        self._read(ranges, _is_alone())
        return found

    def fill(self, targets: Iterable[Target], *, alone: bool | None = None) -> None:
        with torch.no_grad():
            self._fill(targets, _is_alone() if alone is None else alone)

    def _fill(self, targets: Iterable[Target], alone: bool) -> None:
        ranges: list[_Range] = []
        later: list[tuple[torch.Tensor, torch.Tensor]] = []  # (target, temporary part) to copy when the ranges are read
        waiting = 0
        for item, target in targets:
            if tuple(target.size()) != tuple(item.lengths):
                raise InvalidArgumentError(
                    f"load {self.attempt}: {item.storage_index.fqn!r}: a tensor of {tuple(target.size())} is to take "
                    f"{tuple(item.lengths)}"
                )
            if 0 in item.lengths:
                continue
            slot = self._slot(item.storage_index)
            if slot.data_length == 0:  # not raw bytes: what torch.save makes of this kind of tensor
                (archive,) = self._read_archives([slot])
                put(self.attempt, item, target, tensor_in(item.storage_index.fqn, io.BytesIO(archive)))
                continue
            one, rows, part = self._locate(item, slot)
            direct = (
                part is None
                and is_raw(target)
                and target.is_cpu
                and target.is_contiguous()
                and target.dtype == rows.dtype
                and not (target.is_neg() or target.is_conj())
            )
            if direct:
                one.address = target.data_ptr()
            else:
                temporary = torch.empty(rows.shape, dtype=rows.dtype, device="cpu")
                one.address = temporary.data_ptr()
                waiting += one.nbytes
                for dim, (start, length) in enumerate(part or ()):
                    temporary = temporary.narrow(dim, start, length)
                later.append((target, temporary))
            ranges.append(one)
            if waiting >= _TEMPORARY_BYTES:
                self._read_and_copy(ranges, later, alone)
                ranges, later, waiting = [], [], 0
        self._read_and_copy(ranges, later, alone)

    def _locate(self, item: ReadItem, slot: _engine.Slot) -> tuple[_Range, _Rows, list[tuple[int, int]] | None]:
        """The bytes that hold what `item` asks for: whole rows of the saved piece, and which part of them (or all). The
        rows are of the first dimension in which it asks for more than one place."""
        saved = self.saved[item.storage_index.fqn].tensor
        assert saved is not None
        sizes = tuple(_chunk(saved, item.storage_index).sizes)
        itemsize = saved.properties.dtype.itemsize
        if slot.data_length != math.prod(sizes) * itemsize:
            raise DamagedError(f"{self.attempt}: {item.storage_index.fqn!r} is not as long as .metadata says")
        begin, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        if lengths == sizes and not any(begin):
            all_of_it = _Range(slot.file, slot.offset + slot.data_offset, slot.data_length, 0)
            return all_of_it, _Rows(sizes, saved.properties.dtype), None
        dim = next((dim for dim, length in enumerate(lengths) if length != 1), max(len(sizes) - 1, 0))
        row = math.prod(sizes[dim + 1 :]) * itemsize
        first = sum(at * math.prod(sizes[i + 1 :]) for i, at in enumerate(begin[: dim + 1])) * itemsize
        count = lengths[dim] if sizes else 1
        one = _Range(slot.file, slot.offset + slot.data_offset + first, count * row, 0)
        within = zip(begin[dim + 1 :], lengths[dim + 1 :], strict=True)
        whole = lengths[dim + 1 :] == sizes[dim + 1 :]
        part = None if whole else [*((0, n) for n in lengths[: dim + 1]), *within]
        return one, _Rows((*lengths[: dim + 1], *sizes[dim + 1 :]), saved.properties.dtype), part

    def _read_and_copy(self, ranges: list[_Range], later: list[tuple[torch.Tensor, torch.Tensor]], alone: bool) -> None:
        self._read(ranges, alone)
        for target, temporary in later:
            target.copy_(temporary)

    def _read(self, ranges: Iterable[_Range], alone: bool) -> None:
        asked = [(one.file, one.offset, one.nbytes, one.address) for one in ranges if one.nbytes]
        if asked:
            self._reader.read(asked, alone=alone)


@dataclass(frozen=True)
class _Rows:
    shape: tuple[int, ...]
    dtype: torch.dtype


def _chunk(saved: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    if index.index is not None and index.index < len(saved.chunks):
        chunk = saved.chunks[index.index]
        if index.offset is None or chunk.offsets == index.offset:
            return chunk
    for chunk in saved.chunks:
        if chunk.offsets == index.offset:
            return chunk
    raise DamagedError(f".metadata has no piece of {index.fqn!r} at {index.offset}")
