"""Which data-parallel rank this process is. Peers that hold parts of one model replica share one."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Ranks", "resolve"]

_WHOLE = ("dp",)
_HYBRID = ("dp_replicate", "dp_shard")  # as torch's own recipes name the two dimensions of hybrid sharding


@dataclass(frozen=True)
class Ranks:
    """Data-parallel rank ``rank`` of ``size``."""

    rank: int
    size: int


def _of_mesh(mesh: DeviceMesh) -> Ranks:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"mesh={mesh}: this process is not part of it; only ranks of the mesh read data")
    if mesh.ndim == 1:
        return Ranks(coordinate[0], mesh.size())
    names = mesh.mesh_dim_names or ()
    wanted = _WHOLE if "dp" in names else _HYBRID
    rank, size = 0, 1
    for dimension, name in enumerate(names):
        if name in wanted:
            rank = rank * mesh.size(dimension) + coordinate[dimension]
            size *= mesh.size(dimension)
    if not set(wanted) & set(names):
        raise ValueError(
            f"mesh with dimensions {names or mesh.ndim}: none is named 'dp', 'dp_replicate' or 'dp_shard', so which of "
            "them are data-parallel is not known; pass that part of it, as mesh=mesh['name'], or dp_rank= and dp_size="
        )
    return Ranks(rank, size)


def _of_process() -> Ranks:
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        raise ValueError(
            f"WORLD_SIZE={world}, but torch.distributed is not initialised, so every process would read the same "
            "samples; call torch.distributed.init_process_group() before, or pass dp_rank= and dp_size="
        )
    return Ranks(0, 1)


def resolve(mesh: DeviceMesh | None, dp_rank: int | None, dp_size: int | None) -> Ranks:
    """The data-parallel rank of this process: from the mesh, from the numbers, or from torch.distributed.

    Raises:
        ValueError: the mesh has no data-parallel dimension, only one of the numbers is given, or processes were
            started that do not know of each other.
    """
    if mesh is not None and (dp_rank is not None or dp_size is not None):
        raise ValueError("mesh= and dp_rank=, dp_size= say the same thing; pass one of them")
    if mesh is not None:
        return _of_mesh(mesh)
    if dp_rank is None and dp_size is None:
        return _of_process()
    if dp_rank is None or dp_size is None:
        raise ValueError(f"dp_rank={dp_rank}, dp_size={dp_size}: pass both, or neither")
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank={dp_rank}, dp_size={dp_size}: ranks count from 0 and are fewer than dp_size")
    return Ranks(dp_rank, dp_size)
