"""Who writes what: DCP's local plan of each rank, made one global plan by the coordinator, over the board.

A plan is made once for a structure of the state. The ranks say what they have (`plan/<n>/...` on the board, where n
counts the plans of this life); replicated parameters and optimizer state go to the ranks by size, other replicated
state to the lowest rank that has it, and every rank keeps its own random number generators. Tensors of over 1 GiB are
cut along the first dimension that makes the pieces small enough.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from unbroken import _engine
from unbroken._board import AnyBoard
from unbroken.checkpoint._archive import DTYPES
from unbroken.checkpoint._layout import Box, boxes_of
from unbroken.checkpoint._metadata import no_collection
from unbroken.checkpoint._state import Leaf, Role, StructureChanged, rng_prefix
from unbroken.checkpoint._tree import Path
from unbroken.errors import InvalidArgumentError, SaveFailedError

__all__ = [
    "Item",
    "LocalPlan",
    "Piece",
    "Places",
    "Plan",
    "agree",
    "check_device",
    "cut",
    "describe",
    "dtype_of",
    "identity",
    "is_raw",
    "owned_pieces",
    "ties_of",
]

_PIECE_BYTES = 1 << 30
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_KIND_OF = attrgetter("dtype", "shape")
_ROLES = {str(role): role for role in Role}
_ANY_RANK = "rng/rank_*/"  # stands for rng_prefix(rank) in what is compared between ranks


class Item(NamedTuple):
    """What one rank has of one leaf: an object, a tensor, or a shard of one."""

    key: str
    path: Path
    role: Role
    dtype: str | None  # None: an object
    size: tuple[int, ...] = ()  # of the whole tensor
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    shard: bool = False
    same_as: int = -1  # the item of this rank that is the same memory under another name (tied weights)

    def pieces(self) -> list[Piece]:
        """What is written for it: one piece, or several of at most 1 GiB."""
        if self.dtype is None:
            return _OBJECT
        itemsize = _itemsize_of(self.dtype)
        if math.prod(self.sizes) * itemsize <= _PIECE_BYTES:  # most are asked several times, and large plans have many
            return [Piece(self.offsets, self.sizes)]
        return cut(self.offsets, self.sizes, itemsize, self.key)

    @staticmethod
    def from_json(raw: list[Any]) -> Item:
        key, path, role, dtype, size, offsets, sizes, shard, same_as = raw
        return Item(key, tuple(path), _ROLES[role], dtype, tuple(size), tuple(offsets), tuple(sizes), shard, same_as)

    def of_rank(self, rank: int) -> Item:
        if self.role is not Role.RANK:
            return self
        key = self.key.replace(_ANY_RANK, rng_prefix(rank), 1)
        return self._replace(key=key, path=(key,))


class Piece(NamedTuple):
    offsets: tuple[int, ...]  # in the whole tensor
    sizes: tuple[int, ...]


_OBJECT = [Piece((), ())]


@cache
def dtype_of(name: str) -> torch.dtype:
    """By the name that str() gives it."""
    value = getattr(torch, name.removeprefix("torch."))
    assert isinstance(value, torch.dtype)
    return value


@cache
def _itemsize_of(name: str) -> int:
    return dtype_of(name).itemsize


def cut(offsets: tuple[int, ...], sizes: tuple[int, ...], itemsize: int, key: str) -> list[Piece]:
    nbytes = math.prod(sizes) * itemsize
    if nbytes <= _PIECE_BYTES:
        return [Piece(offsets, sizes)]
    for dim, length in enumerate(sizes):
        row = nbytes // length
        if row <= _PIECE_BYTES:
            step = _PIECE_BYTES // row
            return [
                Piece(
                    (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]),
                    (*sizes[:dim], min(step, length - at), *sizes[dim + 1 :]),
                )
                for at in range(0, length, step)
            ]
    raise InvalidArgumentError(f"state {key!r}: a tensor of {tuple(sizes)} cannot be cut into pieces of 1 GiB")


# --- what a rank has -------------------------------------------------------------------------------------------------


def is_raw(tensor: torch.Tensor) -> bool:
    """Its bytes alone, with dtype and shape, are all of it."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.dtype in DTYPES
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def check_device(key: str, tensor: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidArgumentError(f"state {key!r}: a lazy parameter that has no shape yet; run the module once first")
    if tensor.device.type == "meta":
        raise InvalidArgumentError(f"state {key!r}: a tensor on the meta device has no bytes; give it a device first")


def _signature(value: Any) -> Any:
    """What must not change without a new plan."""
    if not isinstance(value, torch.Tensor):
        return None
    if isinstance(value, DTensor):
        order = getattr(value._spec, "shard_order", None)
        local = value._local_tensor.shape
        return (DTensor, value.dtype, value.shape, value.device_mesh, value.placements, order, local)
    return (None, value.dtype, value.shape) if is_raw(value) else None


@dataclass
class LocalPlan:
    """The items of this rank, with what it takes to find their bytes again at each save."""

    items: list[Item]
    leaf_of: list[int]  # for each item, the leaf that it comes from
    boxes: list[Box | None]  # for each item, the part of the local tensor that it is; None: no DTensor
    signatures: list[Any]  # for each leaf
    devices: list[str]  # for each leaf, the kind of its device; "" for an object
    leaves: list[Leaf]
    text: str  # the items as JSON, equal on ranks that have the same
    digest: str

    def __post_init__(self) -> None:
        # Plain tensors are looked at all at once, as most are, and this is done in every save.
        plain = [planned is not None and planned[0] is None for planned in self.signatures]
        self._plain = [number for number, one in enumerate(plain) if one]
        self._plain_kinds = [self.signatures[number][1:] for number in self._plain]
        self._others = [number for number, one in enumerate(plain) if not one]
        self._tied = [(i, item.same_as) for i, item in enumerate(self.items) if item.same_as >= 0]

    def check(self, values: Sequence[Any]) -> None:
        """Raises StructureChanged when the values are not of the planned kind."""
        if not self._has_plain_tensors(values):
            for number in self._plain:
                if _signature(values[number]) != self.signatures[number]:
                    raise StructureChanged(f"{self.leaves[number].key} is another kind of tensor now")
        for number in self._others:
            found, planned = _signature(values[number]), self.signatures[number]
            if found != planned:
                what = "a tensor" if planned is None else "sharded in another way"
                raise StructureChanged(f"{self.leaves[number].key} is {what} now")
        for i, first in self._tied:
            if identity(values[self.leaf_of[i]]) != identity(values[self.leaf_of[first]]):
                raise StructureChanged(f"{self.items[i].key} is not tied to {self.items[first].key} any more")

    def _has_plain_tensors(self, values: Sequence[Any]) -> bool:
        tensors = [values[number] for number in self._plain]
        return {*map(type, tensors)} <= _PLAIN and list(map(_KIND_OF, tensors)) == self._plain_kinds

    def local(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """The memory that item `number` stands for."""
        box = self.boxes[number]
        if box is None:
            return value
        assert isinstance(value, DTensor)
        return box.of(value.to_local())


def identity(value: Any) -> Any:
    """What is equal for tensors that are the same memory; None where that does not matter."""
    if not isinstance(value, torch.Tensor):
        return None
    local = value.to_local() if isinstance(value, DTensor) else value
    if local.layout is not torch.strided or local.numel() == 0:
        return None
    return (local.data_ptr(), local.device, local.dtype, tuple(local.shape), local.stride(), type(value) is DTensor)


def describe(leaves: list[Leaf], values: list[Any], rank: int) -> LocalPlan:
    """The local plan for what the leaves hold. InvalidArgumentError names a leaf that cannot be saved."""
    signatures = [_signature(value) for value in values]
    items: list[Item] = []
    leaf_of: list[int] = []
    boxes: list[Box | None] = []
    first_of: dict[Any, int] = {}
    for number, (leaf, value, signature) in enumerate(zip(leaves, values, signatures, strict=True)):
        if isinstance(value, torch.Tensor):
            check_device(leaf.key, value)
        for item, box in _items(leaf, value, signature, rank):
            if item.dtype is not None and item.role is not Role.RANK:
                memory = identity(value)
                if memory is not None:
                    first = first_of.setdefault((memory, item.offsets), len(items))
                    item = item._replace(same_as=first if first != len(items) else -1)
            items.append(item)
            leaf_of.append(number)
            boxes.append(box)
    text = json.dumps(items, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    devices = [value.device.type if isinstance(value, torch.Tensor) else "" for value in values]
    return LocalPlan(items, leaf_of, boxes, signatures, devices, list(leaves), text, digest)


def _items(leaf: Leaf, value: Any, signature: Any, rank: int) -> Iterator[tuple[Item, Box | None]]:
    """What this rank has of a leaf: nothing of a DTensor of which it holds no element."""
    key, path = leaf.key, leaf.path
    if leaf.role is Role.RANK:
        key = key.replace(rng_prefix(rank), _ANY_RANK, 1)
        path = (key,)
    if signature is None:  # other tensors (subclasses, sparse, quantised, ...) are saved as objects, by torch.save
        yield Item(key, path, leaf.role, None), None
        return
    dtype, size = str(value.dtype), tuple(value.shape)
    if not isinstance(value, DTensor):
        yield Item(key, path, leaf.role, dtype, size, (0,) * len(size), size), None
        return
    if not is_raw(value._local_tensor):
        raise InvalidArgumentError(
            f"state {leaf.key!r}: a DTensor whose local tensor is a {type(value._local_tensor).__name__} of "
            f"{value.dtype} cannot be saved; give the tensors that it is made of"
        )
    for box in boxes_of(leaf.key, value):
        yield Item(key, path, leaf.role, dtype, size, box.offsets, box.sizes, shard=True), box


# --- who writes it ---------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """The plan as one rank has it."""

    number: int
    digest: str  # of the whole plan, equal on all ranks
    local: LocalPlan
    writes: list[tuple[int, Piece]]  # (item, piece) that this rank writes, in the order of the image's slots
    alone: bool  # there is no other rank
    everything: list[list[Item]] | None  # coordinator: the items of each rank
    owners: list[list[tuple[int, int]]] | None  # coordinator: (item, piece number) that each rank writes


def _kind(item: Item) -> str:
    return "no tensor" if item.dtype is None else f"a {item.dtype} of {item.size}"


def _assign(ranks: list[list[Item]]) -> list[list[tuple[int, int]]]:
    """For each rank the (item, piece) that it writes. A function of what the ranks have, so it never varies."""
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    kinds: dict[str, tuple[int, Item]] = {}
    for rank, items in enumerate(ranks):
        for number, item in enumerate(items):
            first, like = kinds.setdefault(item.key, (rank, item))
            if like.dtype != item.dtype or like.size != item.size:
                raise SaveFailedError(
                    f"plan a save: state {item.key!r} is {_kind(like)} on rank {first} and {_kind(item)} on rank {rank}"
                )
            if item.same_as < 0:
                holders.setdefault((item.key, item.offsets), []).append((rank, number))
    owned: list[list[tuple[int, int]]] = [[] for _ in ranks]
    load = [0] * len(ranks)
    spread: list[tuple[int, str, int, list[tuple[int, int]]]] = []
    for (key, _), have in holders.items():
        first_rank, first_number = have[0]
        item = ranks[first_rank][first_number]
        for piece_number, piece in enumerate(item.pieces()):
            nbytes = math.prod(piece.sizes) * dtype_of(item.dtype).itemsize if item.dtype is not None else 0
            if len(have) == 1 or item.role is not Role.SPREAD or item.dtype is None:
                owned[first_rank].append((first_number, piece_number))
                load[first_rank] += nbytes
            else:
                spread.append((nbytes, key, piece_number, have))
    for nbytes, _, piece_number, have in sorted(spread, key=lambda one: (-one[0], one[1], one[2])):
        rank, number = min(have, key=lambda holder: (load[holder[0]], holder[0]))
        owned[rank].append((number, piece_number))
        load[rank] += nbytes
    return [sorted(one) for one in owned]


def agree(
    local: LocalPlan | Exception, board: AnyBoard, number: int, rank: int, world_size: int, timeout: float
) -> Plan:
    """Makes the ranks' local plans one plan. Every rank calls it; the coordinator is rank 0.

    `local` may be the error that kept this rank from one: then all ranks learn of it and none waits. SaveFailedError
    names the ranks that have no plan or did not say in time what they have.
    """
    base = f"plan/{number}"
    if rank == 0:
        ranks, owned, digest = _coordinate(local, board, base, number, world_size, timeout)
        assert isinstance(local, LocalPlan)
        return _finish(local, number, digest, owned[0], ranks, owned)
    # What the coordinator has, too, need not be sent: with replicated state that is all of it.
    theirs = _engine.board_wait(board, f"{base}/digest", timeout).decode()
    if isinstance(local, Exception):
        board.set(f"{base}/local/{rank}", f"!{local}".encode())
        raise local
    board.set(f"{base}/local/{rank}", b"=" if theirs == local.digest else local.text.encode())
    answer = json.loads(_engine.board_wait(board, f"{base}/global/{rank}", timeout))
    if "error" in answer:
        raise SaveFailedError(answer["error"])
    return _finish(local, number, answer["plan"], [tuple(one) for one in answer["write"]], None, None)


def _finish(
    local: LocalPlan,
    number: int,
    digest: str,
    owned: list[tuple[int, int]],
    everything: list[list[Item]] | None,
    owners: list[list[tuple[int, int]]] | None,
) -> Plan:
    pieces = {item: local.items[item].pieces() for item, _ in owned}
    writes = [(item, pieces[item][piece]) for item, piece in owned]
    alone = everything is not None and len(everything) == 1
    return Plan(number, digest, local, writes, alone, everything, owners)


def _coordinate(
    local: LocalPlan | Exception, board: AnyBoard, base: str, number: int, world_size: int, timeout: float
) -> tuple[list[list[Item]], list[list[tuple[int, int]]], str]:
    others = range(1, world_size)
    if number > 0:
        old = f"plan/{number - 1}"
        names = [f"{old}/digest", *(f"{old}/{part}/{r}" for part in ("local", "global", "stale") for r in others)]
        board.erase([*names, *(f"places/{number - 1}/{r}" for r in others)])
    try:
        if isinstance(local, Exception):
            board.set(f"{base}/digest", b"none")
            raise local
        board.set(f"{base}/digest", local.digest.encode())
        told = _engine.board_collect(board, [f"{base}/local/{r}" for r in others], timeout) if world_size > 1 else []
        own = local.text.encode()
        texts = [own, *_hear(own, told, timeout)]
        parsed = {own: local.items}
        with no_collection():
            for text in texts:
                if text not in parsed:
                    parsed[text] = [Item.from_json(one) for one in json.loads(text)]
            ranks = _agree_on_ties([[item.of_rank(r) for item in parsed[text]] for r, text in enumerate(texts)])
            owned = _assign(ranks)
            _validate(ranks, owned)
    except Exception as error:
        for r in others:
            board.set(f"{base}/global/{r}", json.dumps({"error": str(error)}).encode())
        raise
    digests = {text: hashlib.sha256(text).hexdigest() for text in parsed}
    digest = _digest_of((digests[text], json.dumps(writes)) for text, writes in zip(texts, owned, strict=True))
    for r in others:
        board.set(f"{base}/global/{r}", json.dumps({"plan": digest, "write": owned[r]}).encode())
    return ranks, owned, digest


def _digest_of(ranks: Iterable[tuple[str, str]]) -> str:
    whole = hashlib.sha256()
    for has, writes in ranks:
        whole.update(f"{has} {writes} ".encode())
    return whole.hexdigest()


def _hear(own: bytes, told: Sequence[bytes | None], timeout: float) -> list[bytes]:
    """What the other ranks have, as JSON."""
    missing = [str(r) for r, text in enumerate(told, 1) if text is None]
    if missing:
        raise SaveFailedError(f"plan a save: rank {', '.join(missing)} did not say within {timeout:g} s what it has")
    failed = [
        f"rank {r}: {text[1:].decode()}" for r, text in enumerate(told, 1) if text is not None and text[:1] == b"!"
    ]
    if failed:
        raise SaveFailedError(f"plan a save: {'; '.join(failed)}")
    return [own if text == b"=" else text for text in told if text is not None]


def _agree_on_ties(ranks: list[list[Item]]) -> list[list[Item]]:
    """What is tied on some ranks only is not tied."""
    loose = {item.key for items in ranks for item in items if item.same_as < 0}
    return [
        [item._replace(same_as=-1) if item.same_as >= 0 and item.key in loose else item for item in items]
        for items in ranks
    ]


def _validate(ranks: list[list[Item]], owned: list[list[tuple[int, int]]]) -> None:
    """DCP's own check: the pieces of each tensor fill it and do not overlap."""
    sizes = cache(torch.Size)  # most are those of many
    tensors: dict[str, TensorStorageMetadata] = {}
    ties = ties_of(ranks)
    for _, _, item, piece in owned_pieces(ranks, owned):
        if item.dtype is None:
            continue
        chunk = ChunkStorageMetadata(sizes(piece.offsets), sizes(piece.sizes))
        for name in (item, *ties.get(item.key, ())):
            tensor = tensors.get(name.key)
            if tensor is None:
                properties = TensorProperties(dtype=dtype_of(item.dtype))
                tensor = tensors[name.key] = TensorStorageMetadata(properties, sizes(name.size), [])
            tensor.chunks.append(chunk)
    errors = _validate_global_plan([SavePlan([])] * max(2, len(ranks)), Metadata(dict(tensors)))
    if errors:
        raise SaveFailedError(f"plan a save: {'; '.join(errors[:5])}")


class Places(NamedTuple):
    """Where a rank has its slots: a column of each kind, as each object of a large world's burdens the collector."""

    files: list[str]
    offsets: list[int]
    lengths: list[int]

    def at(self, slot: int) -> tuple[str, int, int]:
        return self.files[slot], self.offsets[slot], self.lengths[slot]

    def moved(self, changed: dict[str, tuple[int, int]]) -> Places:
        """With other (offset, length) of the slots of these numbers."""
        if not changed:
            return self
        moved = Places(self.files, list(self.offsets), list(self.lengths))
        for number, (offset, length) in changed.items():
            moved.offsets[int(number)], moved.lengths[int(number)] = offset, length
        return moved


def owned_pieces(
    ranks: list[list[Item]], owned: list[list[tuple[int, int]]], only: Iterable[int] | None = None
) -> Iterator[tuple[int, int, Item, Piece]]:
    """(rank, slot, item, piece) of all that is written, or of what the ranks in `only` write."""
    for rank in range(len(owned)) if only is None else only:
        items = ranks[rank]
        pieces: list[Piece] = []
        last = -1
        for slot, (number, piece) in enumerate(owned[rank]):
            if number != last:  # what is written of an item stands together
                pieces, last = items[number].pieces(), number
            yield rank, slot, items[number], pieces[piece]


def ties_of(ranks: list[list[Item]]) -> dict[str, list[Item]]:
    """By the key under which it is written, the other names of a tensor."""
    ties: dict[str, dict[str, Item]] = {}
    for items in ranks:
        for item in items:
            if item.same_as >= 0:
                ties.setdefault(items[item.same_as].key, {}).setdefault(item.key, item)
    return {key: list(names.values()) for key, names in ties.items()}
