"""Which part of a DTensor's whole a rank holds: boxes of the whole tensor, and where they lie in the local one.

torch describes what a rank holds as one box (`compute_local_shape_and_global_offset`). That is right unless a dimension
is sharded in strides, as FSDP2 does on top of tensor parallelism: what a rank then holds of it can be several stretches
of the whole, and where the sizes do not divide evenly torch's box is of the wrong place or size. So it is worked out
here, per dimension, as a row of stretches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from unbroken.errors import InvalidArgumentError

__all__ = ["Box", "boxes_of", "local_boxes"]


class Box(NamedTuple):
    offsets: tuple[int, ...]  # in the whole tensor
    sizes: tuple[int, ...]
    at: tuple[int, ...]  # in the local tensor

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The part of the local tensor that it stands for."""
        if 0 in self.sizes:
            return local.new_empty(self.sizes)
        for dim, (begin, length) in enumerate(zip(self.at, self.sizes, strict=True)):
            if (begin, length) != (0, local.shape[dim]):
                local = local.narrow(dim, begin, length)
        return local


_Stretch = tuple[int, int]  # begin in the whole tensor, length
_Row = list[_Stretch]  # what is held of a dimension, in the order of the local tensor


def _length(row: _Row) -> int:
    return sum(length for _, length in row)


def _part(row: _Row, begin: int, end: int) -> _Row:
    part, at = [], 0
    for start, length in row:
        low, high = max(begin - at, 0), min(end - at, length)
        if low < high:
            part.append((start + low, high - low))
        at += length
    return part


def _chunk(row: _Row, chunks: int, number: int) -> _Row:
    """As torch.chunk: pieces of equal size, rounded up, then a smaller one, then empty ones."""
    size = -(-_length(row) // chunks)
    return _part(row, size * number, size * (number + 1))


def _in_strides(row: _Row, split_factor: int, chunks: int, number: int) -> _Row:
    return [one for i in range(split_factor) for one in _chunk(_chunk(row, split_factor, i), chunks, number)]


def _joined(row: _Row) -> _Row:
    joined: _Row = []
    for start, length in row:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _rows_by_placement(
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    order: Sequence[Sequence[int]],
) -> list[_Row]:
    """As placements are defined: one mesh dimension after the other, for each tensor dimension in `order`."""
    rows: list[_Row] = [[(0, size)] if size else [] for size in shape]
    for dim, mesh_dims in enumerate(order):
        for i in mesh_dims:
            placement = placements[i]
            if isinstance(placement, _StridedShard):
                rows[dim] = _in_strides(rows[dim], int(placement.split_factor), mesh[i], coordinate[i])
            else:
                rows[dim] = _chunk(rows[dim], mesh[i], coordinate[i])
    return rows


def _right_to_left(
    mesh: Sequence[int], placements: Sequence[Placement], order: Sequence[Sequence[int]]
) -> list[list[int]] | None:
    """The order in which plain shards give what strided ones stand for; None when they stand for nothing of the kind.

    A dimension that is sharded in strides comes after the ones that split it before: their sizes multiply to its
    split factor.
    """
    found: list[list[int]] = []
    for mesh_dims in order:
        sequence: list[int] = []
        for i in reversed(mesh_dims):
            placement = placements[i]
            wanted = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            before = itertools.accumulate((mesh[j] for j in sequence), initial=1, func=lambda a, b: a * b)
            position = next((k for k, product in enumerate(before) if product == wanted), None)
            if position is None:
                return None
            sequence.insert(position, i)
        found.append(sequence)
    return found


def local_boxes(
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    local_shape: Sequence[int],
    order: Sequence[tuple[int, Sequence[int]]] | None = None,
) -> list[Box]:
    """What the rank at `coordinate` of a mesh of shape `mesh` holds of a tensor of `shape`; no box is empty, unless the
    tensor has no elements: then it is one box.

    order: (tensor dimension, mesh dimensions in the order in which they shard it), where that is not from left to
    right. ValueError when placements do not give `local_shape`.
    """
    if 0 in shape:
        return [Box((0,) * len(shape), tuple(shape), (0,) * len(shape))]
    mesh_dims: list[list[int]] = [[] for _ in shape]
    strided = False
    for i, placement in enumerate(placements):
        if isinstance(placement, (Shard, _StridedShard)):
            mesh_dims[placement.dim].append(i)
            strided |= isinstance(placement, _StridedShard)
        elif not isinstance(placement, Replicate):
            raise ValueError(f"{placement!r} does not say which part of it a rank holds; redistribute() it first")
    for dim, sequence in order or ():
        if sorted(sequence) != mesh_dims[dim]:
            raise ValueError(f"its shard order {order} does not belong to its placements {tuple(placements)}")
        mesh_dims[dim] = list(sequence)
    ways = []
    if strided and (decoded := _right_to_left(mesh, placements, mesh_dims)) is not None:
        # What FSDP2 makes of a tensor that was sharded before, and what it means by its strided placement. On uneven
        # sizes that is not what the placement by itself is defined to be.
        plain = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in placements]
        ways.append(_rows_by_placement(shape, mesh, coordinate, plain, decoded))
    ways.append(_rows_by_placement(shape, mesh, coordinate, placements, mesh_dims))
    for rows in ways:
        lengths = tuple(_length(row) for row in rows)
        if lengths == tuple(local_shape) or (0 in lengths and 0 in local_shape):
            return _boxes([_joined(row) for row in rows])
    raise ValueError(
        f"the local tensor has the shape {tuple(local_shape)}, but a {tuple(shape)} with {tuple(placements)} on a mesh "
        f"of {tuple(mesh)} has {tuple(_length(row) for row in ways[0])} at {tuple(coordinate)}"
    )


def _boxes(rows: list[_Row]) -> list[Box]:
    placed = []
    for row in rows:
        starts = itertools.accumulate((length for _, length in row), initial=0)
        placed.append([(begin, length, at) for (begin, length), at in zip(row, starts, strict=False)])
    return [
        Box(tuple(s[0] for s in stretches), tuple(s[1] for s in stretches), tuple(s[2] for s in stretches))
        for stretches in itertools.product(*placed)
    ]


def boxes_of(key: str, tensor: DTensor) -> list[Box]:
    """What this rank holds of `tensor`: nothing, when it is not in its mesh. InvalidArgumentError names the key."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    spec = tensor._spec
    order = None if any(isinstance(p, _StridedShard) for p in tensor.placements) else getattr(spec, "shard_order", None)
    try:
        return local_boxes(
            tuple(tensor.shape),
            tuple(mesh.shape),
            coordinate,
            tensor.placements,
            tuple(tensor._local_tensor.shape),
            None if order is None else [(entry.tensor_dim, entry.mesh_dims) for entry in order],
        )
    except ValueError as error:
        raise InvalidArgumentError(f"state {key!r}: a DTensor that cannot be saved or loaded: {error}") from None
