"""What two ranks save for test_export_ranks.py: `export_world.py DIRECTORY` on each. Rank 0 keeps the whole of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Shard

import unbroken


def whole(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for key, value in state.items()}


def keep(path: Path, state: dict[str, torch.Tensor]) -> None:
    held = whole(state)
    if dist.get_rank() == 0:
        torch.save(held, path)


def save(root: Path, state: dict[str, object]) -> None:
    with unbroken.Checkpointer(root, state, signals=False) as run:
        run.resume()
        run.step()
        run.save().wait()


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    # 7 and 1 do not divide by 2; the second leaves a rank without a part.
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 1)).to(torch.bfloat16)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    keep(directory / "fsdp.pt", get_model_state_dict(model))
    save(directory / "fsdp", {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)})
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=directory / "stock")
    writer = unbroken.UnbrokenWriter(directory / "drop-in")
    dcp.save({"model": get_model_state_dict(model)}, storage_writer=writer)

    # Sharded along each dimension, one of them larger than what the export reads at once.
    wide = torch.arange(2 * 3 * 3_000_000, dtype=torch.float32).reshape(2, 3, 3_000_000)
    small = torch.arange(5 * 7 * 3, dtype=torch.int64).reshape(5, 7, 3)
    spread = {f"small.{dim}": distribute_tensor(small, mesh, [Shard(dim)]) for dim in range(3)}
    spread["wide"] = distribute_tensor(wide, mesh, [Shard(2)])
    keep(directory / "spread.pt", spread)
    save(directory / "spread", {"model": spread})

    rank = dist.get_rank()
    differing = {"own": torch.full((3,), float(rank)), "common": torch.ones(2)}
    save(directory / "differing", {"model": differing})
    dist.barrier()
    dist.destroy_process_group()
    (directory / f"done.{rank}").touch()
    os._exit(0)  # gloo's threads take their time


if __name__ == "__main__":
    main()
