"""The image of this rank's files in memory, and the copy of the state into it."""

from __future__ import annotations

import ctypes
import io
import logging
import marshal
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unbroken import _engine
from unbroken.checkpoint._archive import frame
from unbroken.checkpoint._plan import LocalPlan, Piece, Place, Plan
from unbroken.checkpoint._safe import loads
from unbroken.errors import InvalidArgumentError

__all__ = ["Copy", "Packer", "SlotImage", "SlotSpec", "StagedImage", "is_simple", "pack", "tensor_at"]

_logger = logging.getLogger(__name__)
_SIMPLE = (int, float, str, bool, bytes, type(None))
_FILE_BYTES = 2 << 30


@dataclass
class _Tensor:
    slot: int
    item: int
    leaf: int
    piece: Piece
    begin: tuple[int, ...] | None  # where the piece lies in the item's memory; None: it is all of it


@dataclass
class _Object:
    key: str
    fingerprint: bytes | None = None
    archive: bytes = b""
    checked: type | None = None


def is_simple(value: Any) -> bool:
    return type(value) in _SIMPLE or (type(value) in (list, tuple) and all(map(is_simple, value)))


def pack(key: str, value: Any, *, check: bool) -> bytes:
    """`value` as torch.save writes it. InvalidArgumentError names the key when that cannot be done or, with `check`,
    when it could not be read again."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        raise InvalidArgumentError(f"state {key!r}: a {type(value).__name__} cannot be saved: {error}") from error
    raw = buffer.getvalue()
    if check:
        loads(key, raw)
    if len(raw) > _FILE_BYTES:
        raise InvalidArgumentError(f"state {key!r}: a single object of {len(raw)} bytes; the most is {_FILE_BYTES}")
    return raw


class Packer:
    """The archives of the objects in the state. One whose value is the same as last time is not made again."""

    def __init__(self, local: LocalPlan, values: Sequence[Any], rank: int) -> None:
        self._objects: dict[int, _Object] = {}
        for item, leaf in zip(local.items, local.leaf_of, strict=True):
            if item.dtype is None:
                self._objects[leaf] = _Object(item.of_rank(rank).key)
                self.pack(leaf, values[leaf])

    def pack(self, leaf: int, value: Any) -> bytes:
        kept = self._objects[leaf]
        # marshal writes the exact value and type of simple ones, so equal bytes are equal values.
        fingerprint = marshal.dumps(value, 2) if is_simple(value) else None
        if fingerprint is None or fingerprint != kept.fingerprint:
            check = fingerprint is None and kept.checked is not type(value)
            kept.archive = pack(kept.key, value, check=check)
            kept.checked = type(value)
        kept.fingerprint = fingerprint
        return kept.archive

    def size(self, leaf: int) -> int:
        return len(self._objects[leaf].archive)

    def keep_only(self, leaves: set[int]) -> None:
        """Forgets objects that another rank writes."""
        self._objects = {leaf: kept for leaf, kept in self._objects.items() if leaf in leaves}


# What a slot holds: a tensor of this dtype and these sizes, or an object whose archive takes so many bytes now.
SlotSpec = tuple[torch.dtype, tuple[int, ...]] | int
# (slot, address, bytes)
Copy = tuple[int, int, int]


class SlotImage:
    """Slots in memory, laid out as the files of one rank: tensors' bytes between their heads and tails, and objects.

    The memory lives as long as a view of it.
    """

    def __init__(self, specs: Sequence[SlotSpec], rank: int) -> None:
        """Allocates and touches the memory: this takes time."""
        builder = _engine.ImageBuilder(rank, max_file_bytes=_FILE_BYTES)
        for number, spec in enumerate(specs):
            if isinstance(spec, int):
                added = builder.add_object(spec)
            else:
                dtype, sizes = spec
                head, tail = frame(dtype, sizes)
                added = builder.add_tensor(head, math.prod(sizes) * dtype.itemsize, tail)
            assert added == number
        self.image = builder.build()
        self.bytes = self.image.arena_bytes
        self._specs = tuple(specs)
        self._views: dict[int, torch.Tensor] = {}  # made when they are first asked for
        self._pinned = 0

    def place(self, tensors: Iterable[tuple[int, torch.Tensor]]) -> list[Copy]:
        """Puts into their slots the tensors that are not plain host memory, and returns what copy() is to do for the
        others. A device is waited for."""
        copies: list[Copy] = []
        on_device: list[tuple[int, torch.Tensor]] = []
        with torch.no_grad():
            for slot, tensor in tensors:
                if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
                    if nbytes := tensor.nbytes:
                        copies.append((slot, tensor.data_ptr(), nbytes))
                elif tensor.is_cpu:
                    self.view(slot).copy_(tensor)
                else:
                    on_device.append((slot, tensor))
            for slot, tensor in on_device:
                self.view(slot).copy_(tensor, non_blocking=True)
            for device in {tensor.device for _, tensor in on_device}:
                torch.accelerator.current_stream(device).synchronize()
        return copies

    def copy(self, copies: Sequence[Copy]) -> None:
        """When it returns, what was copied may change."""
        self.image.stage(copies)

    def view(self, slot: int) -> torch.Tensor:
        """A tensor slot's bytes as a tensor with a storage of its own."""
        view = self._views.get(slot)
        if view is None:
            view = self._views[slot] = self.new_view(slot)
        return view

    def new_view(self, slot: int) -> torch.Tensor:
        spec = self._specs[slot]
        assert not isinstance(spec, int)
        dtype, sizes = spec
        if math.prod(sizes) == 0:
            return torch.empty(sizes, dtype=dtype)
        return tensor_at(self.image.address(slot), dtype, sizes, self.image)

    def pin(self) -> None:
        """Page-locks the image, so that copies from a device need no second copy. Without it they are slower."""
        if self._pinned:
            return
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self.image.arena_address()
        error = int(cudart.cudaHostRegister(address, self.image.arena_bytes, 0))
        if error:
            _logger.warning("pin the staging memory: CUDA error %d; copies from the device will be slower", error)
        else:
            self._pinned = address

    def close(self) -> None:
        """Gives the memory back. Nothing may be using it."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # type: ignore[no-untyped-call]
            self._pinned = 0
        self._views.clear()
        del self.image


def tensor_at(address: int, dtype: torch.dtype, sizes: tuple[int, ...], keep: object) -> torch.Tensor:
    """The memory at `address` as a contiguous tensor with a storage of its own; `keep` lives as long as that."""
    memory = (ctypes.c_ubyte * (math.prod(sizes) * dtype.itemsize)).from_address(address)
    memory.keep = keep  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(sizes)


class StagedImage(SlotImage):
    """One rank's image: made for one plan, filled anew at each save, written by the engine."""

    def __init__(self, plan: Plan, packer: Packer, rank: int) -> None:
        """Allocates and touches the memory: this takes time."""
        self.plan = plan
        self._tensors: list[_Tensor] = []
        self._objects: list[int] = []  # leaves
        self._packer = packer
        specs: list[SlotSpec] = []
        local = plan.local
        for slot, (number, piece) in enumerate(plan.writes):
            item, leaf = local.items[number], local.leaf_of[number]
            if item.dtype is None:
                specs.append(packer.size(leaf))
                self._objects.append(leaf)
            else:
                specs.append((local.signatures[leaf][1], piece.sizes))
                begin = tuple(a - b for a, b in zip(piece.offsets, item.offsets, strict=True))
                whole = piece.sizes == item.sizes
                self._tensors.append(_Tensor(slot, number, leaf, piece, None if whole else begin))
        packer.keep_only(set(self._objects))
        super().__init__(specs, rank)
        if any(local.devices[one.leaf] == "cuda" for one in self._tensors):
            self.pin()
        self.object_slots: str | None = None  # places that differ from those first planned

    def places(self) -> list[Place]:
        """Where each slot lies, in the plan's order."""
        slots = [self.image.slot(i) for i in range(len(self.plan.writes))]
        return [(slot.file, slot.offset, slot.length) for slot in slots]

    def prepare(self, values: Sequence[Any]) -> list[Copy]:
        """Puts into the image all that is not a plain copy of host memory, and returns those copies, for copy().

        Between the two a commit may begin: the engine writes what is copied while the rest is being copied.
        """
        copies = self.place(self._pieces(values))
        if self.image.place_objects([self._packer.pack(leaf, values[leaf]) for leaf in self._objects]):
            self.object_slots = self.image.object_slots()
        self.image.begin_staging()
        return copies

    def _pieces(self, values: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
        """(slot, tensor) of what this rank writes."""
        sharded = [item.shard for item in self.plan.local.items]
        for one in self._tensors:
            tensor = values[one.leaf]
            if sharded[one.item]:
                tensor = self.plan.local.local(one.item, tensor)
            if one.begin is not None:
                for dim, (at, length) in enumerate(zip(one.begin, one.piece.sizes, strict=True)):
                    tensor = tensor.narrow(dim, at, length)
            yield one.slot, tensor

    def close(self) -> None:
        """Gives the memory back. Nothing may be using it."""
        self._tensors.clear()
        self._objects.clear()
        super().close()
