"""The image of this rank's files in memory, and the copy of the state into it."""

from __future__ import annotations

import ctypes
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from unbroken import _engine
from unbroken.checkpoint._archive import frame
from unbroken.checkpoint._pack import FILE_BYTES, Packer, is_simple, pack
from unbroken.checkpoint._plan import Piece, Places, Plan

__all__ = ["Copy", "SlotImage", "SlotSpec", "StagedImage", "is_simple", "pack", "tensor_at"]

_logger = logging.getLogger(__name__)
_IS_CPU, _NBYTES = attrgetter("is_cpu"), attrgetter("nbytes")


@dataclass
class _Tensor:
    slot: int
    item: int
    leaf: int
    piece: Piece
    begin: tuple[int, ...] | None  # where the piece lies in the item's memory; None: it is all of it


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
        builder = _engine.ImageBuilder(rank, max_file_bytes=FILE_BYTES)
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
        placed = list(tensors)
        held = [tensor for _, tensor in placed]
        if _are_plain(held):
            found = zip(placed, map(torch.Tensor.data_ptr, held), map(_NBYTES, held), strict=True)
            return [(slot, address, nbytes) for (slot, _), address, nbytes in found if nbytes]
        copies: list[Copy] = []
        on_device: list[tuple[int, torch.Tensor]] = []
        with torch.no_grad():
            for slot, tensor in placed:
                if _are_plain([tensor]):
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


def _are_plain(tensors: list[torch.Tensor]) -> bool:
    """Whether all are contiguous in host memory, as they mostly are: asked of all at once, as there may be many."""
    return (
        all(map(_IS_CPU, tensors))
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and not any(map(torch.Tensor.is_conj, tensors))
    )


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
        packer.keep_only({local.leaf_of[number] for number, _ in plan.writes})
        if not plan.alone:
            specs.append(packer.own.size)  # the last slot, which no item of the plan stands for
        super().__init__(specs, rank)
        if any(local.devices[one.leaf] == "cuda" for one in self._tensors):
            self.pin()
        self._slots: dict[str, Any] = {}  # places that differ from those first planned
        self._digest = ""

    @property
    def object_slots(self) -> str | None:
        """For the vote, what is of this save alone: see Arena.metadata()."""
        told = {"slots": self._slots, "values": self._digest}
        return json.dumps(told) if any(told.values()) else None

    def places(self) -> Places:
        """Where each slot lies, in the plan's order; then that of its own values, where there are other ranks."""
        slots = [self.image.slot(i) for i in range(len(self._specs))]
        return Places([slot.file for slot in slots], [slot.offset for slot in slots], [slot.length for slot in slots])

    def prepare(self, values: Sequence[Any]) -> list[Copy]:
        """Puts into the image all that is not a plain copy of host memory, and returns those copies, for copy().

        Between the two a commit may begin: the engine writes what is copied while the rest is being copied.
        """
        copies = self.place(self._pieces(values))
        objects = [self._packer.pack(leaf, values[leaf]) for leaf in self._objects]
        if not self.plan.alone:
            self._digest = self._packer.own.digest(values)
            objects.append(self._packer.own.archive(self._digest, values))
        if self.image.place_objects(objects):
            self._slots = json.loads(self.image.object_slots())
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
