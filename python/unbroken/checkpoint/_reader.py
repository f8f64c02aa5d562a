"""Reading one checkpoint: its metadata, its objects, and byte ranges straight into tensors."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import find_tensor_shard

from unbroken import _engine
from unbroken.checkpoint._metadata import read_metadata
from unbroken.checkpoint._safe import loads
from unbroken.checkpoint._state import NOTES_KEY
from unbroken.checkpoint._tree import Notes, Path, unpack_notes
from unbroken.errors import DamagedError, InvalidArgumentError

__all__ = ["CheckpointReader", "Saved"]

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


class CheckpointReader:
    """A complete checkpoint. All that comes out of it has been verified."""

    def __init__(self, store: _engine.Store, attempt: str) -> None:
        self.attempt = attempt
        self._reader = _engine.AttemptReader(store, attempt)
        self.manifest: dict[str, Any] = json.loads(self._reader.manifest())
        self._metadata: Metadata = read_metadata(self._reader.metadata())
        self._slots: dict[str, dict[int, _engine.Slot]] = {}
        paths = self._metadata.planner_data or {}
        self.saved = {
            key: Saved(key, tuple(paths.get(key, (key,))), entry if isinstance(entry, TensorStorageMetadata) else None)
            for key, entry in self._metadata.state_dict_metadata.items()
        }

    def _slot(self, index: MetadataIndex) -> _engine.Slot:
        """Where an entry lies. .metadata and the manifest say both, and must agree."""
        info = (self._metadata.storage_data or {}).get(index)
        if info is None:
            raise DamagedError(f"{self.attempt}: .metadata does not say where {index.fqn!r} is")
        file = info.relative_path
        if file not in self._slots:
            self._slots[file] = {slot.offset: slot for slot in self._reader.slots(file)}
        slot = self._slots[file].get(info.offset)
        if slot is None or slot.length != info.length:
            raise DamagedError(f"{self.attempt}: {index.fqn!r} is not in {file} where .metadata says")
        return slot

    def notes(self) -> Notes:
        if NOTES_KEY not in self.saved:
            return {}
        return unpack_notes(self.objects([NOTES_KEY])[NOTES_KEY])

    def objects(self, keys: Sequence[str]) -> dict[str, Any]:
        """The objects of `keys`, read without running what they say."""
        slots = {key: self._slot(MetadataIndex(key)) for key in keys}
        memory = bytearray(sum(slot.length for slot in slots.values()))
        if not memory:
            return {}
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        ranges, at = [], 0
        where: dict[str, tuple[int, int]] = {}
        for key, slot in slots.items():
            ranges.append(_Range(slot.file, slot.offset, slot.length, base + at))
            where[key] = (at, slot.length)
            at += slot.length
        self._read(ranges)
        view = memoryview(memory)
        return {key: loads(key, view[at : at + length]) for key, (at, length) in where.items()}

    def tensors(self, targets: dict[str, torch.Tensor]) -> None:
        """Fills the targets, by key. A target may be sharded; it has the saved tensor's shape."""
        with torch.no_grad():
            self._fill({key: target.detach() for key, target in targets.items()})

    def _fill(self, targets: dict[str, torch.Tensor]) -> None:
        try:
            plan = create_default_local_load_plan(targets, self._metadata)
        except (ValueError, RuntimeError) as error:
            raise InvalidArgumentError(f"load {self.attempt}: {error}") from error
        ranges: list[_Range] = []
        later: list[tuple[torch.Tensor, torch.Tensor]] = []  # (target, temporary part) to copy when the ranges are read
        waiting = 0
        for item in plan.items:
            target = find_tensor_shard(targets[item.dest_index.fqn], item.dest_index)
            target = narrow_tensor_by_index(target, item.dest_offsets, item.lengths)
            if target.numel() == 0:
                continue
            one, rows, part = self._locate(item)
            direct = (
                part is None
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
                later.append((target, temporary.view(target.shape) if target.dim() == 0 else temporary))
            ranges.append(one)
            if waiting >= _TEMPORARY_BYTES:
                self._read_and_copy(ranges, later)
                ranges, later, waiting = [], [], 0
        self._read_and_copy(ranges, later)

    def _locate(self, item: ReadItem) -> tuple[_Range, _Rows, list[tuple[int, int]] | None]:
        """The bytes that hold what `item` asks for: whole rows of the saved piece, and which part of them (or all)."""
        saved = self.saved[item.storage_index.fqn].tensor
        assert saved is not None
        slot = self._slot(item.storage_index)
        sizes = tuple(_chunk(saved, item.storage_index).sizes)
        itemsize = saved.properties.dtype.itemsize
        if slot.data_length != math.prod(sizes) * itemsize:
            raise DamagedError(f"{self.attempt}: {item.storage_index.fqn!r} is not as long as .metadata says")
        begin, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        first, count = (begin[0], lengths[0]) if sizes else (0, 1)
        row = math.prod(sizes[1:]) * itemsize
        one = _Range(slot.file, slot.offset + slot.data_offset + first * row, count * row, 0)
        whole = lengths[1:] == sizes[1:]
        part = None if whole else [(0, count), *zip(begin[1:], lengths[1:], strict=True)]
        return one, _Rows((count, *sizes[1:]) if sizes else (), saved.properties.dtype), part

    def _read_and_copy(self, ranges: list[_Range], later: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._read(ranges)
        for target, temporary in later:
            target.copy_(temporary)

    def _read(self, ranges: Iterable[_Range]) -> None:
        asked = [(one.file, one.offset, one.nbytes, one.address) for one in ranges if one.nbytes]
        if asked:
            self._reader.read(asked)


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
