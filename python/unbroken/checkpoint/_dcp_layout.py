"""Whether what DCP plans for a DTensor is what this rank holds of it."""

from __future__ import annotations

from torch.distributed.tensor import DTensor, Replicate, Shard

from unbroken.checkpoint._layout import boxes_of
from unbroken.errors import InvalidArgumentError

__all__ = ["check_box"]


def _is_plain(tensor: DTensor) -> bool:
    """torch's one box is right: no dimension is sharded in strides, or twice."""
    placements = tensor.placements
    sharded = [p.dim for p in placements if type(p) is Shard]
    return all(type(p) in (Shard, Replicate) for p in placements) and len(sharded) == len(set(sharded))


def check_box(key: str, tensor: object, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """`tensor`, if it is a DTensor, is planned as this box on this rank. InvalidArgumentError when it is not that.

    torch's one box is wrong where a rank holds several stretches of a dimension that is sharded in strides, and for
    partial sums it is that of the whole.
    """
    if not isinstance(tensor, DTensor) or 0 in tensor.shape or _is_plain(tensor):
        return
    boxes = [(box.offsets, box.sizes) for box in boxes_of(key, tensor)]
    if boxes != [(offsets, sizes)] and not (0 in sizes and not boxes):
        raise InvalidArgumentError(
            f"state {key!r}: DCP takes this rank's shard for {sizes} at {offsets}, and it is {boxes} (offsets, sizes): "
            "DCP cannot handle a tensor that is sharded in such strides; unbroken.Checkpointer can"
        )
