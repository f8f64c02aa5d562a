"""A small model and its optimizer under each way of spreading them over ranks, and what they hold as whole tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Sizes that 2 and 4 do not divide, some that leave ranks of 4 empty (6, 5), one of 1; a buffer."""

    WIDTH = 6

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(self.WIDTH, 10), Block(self.WIDTH, 5)])
        self.head = nn.Linear(self.WIDTH, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Between the two the activations stay DTensors: torch takes sizes that do not divide evenly only so.
TP = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}


def spread_over_tp(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, TP)


def shard(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@dataclass(frozen=True)
class Layout:
    ranks: int
    mesh: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


LAYOUTS = {
    "plain": Layout(1),
    "ddp2": Layout(2),
    "ddp4": Layout(4),
    "fsdp2": Layout(2, (2,), ("dp",)),
    "fsdp4": Layout(4, (4,), ("dp",)),
    "hsdp": Layout(4, (2, 2), ("replicate", "dp")),
    "tp2": Layout(2, (2,), ("tp",)),
    "tp4": Layout(4, (4,), ("tp",)),
    "fsdp2-tp2": Layout(4, (2, 2), ("dp", "tp")),
}


class Groups:
    """The process groups and meshes of the layouts in a world of four: every rank makes them all, in one order."""

    def __init__(self, wanted: list[str]) -> None:
        self.rank = dist.get_rank()
        self._groups: dict[int, Any] = {4: None}
        for ranks in (1, 2):
            self._groups[ranks] = dist.new_group(list(range(ranks)))
        self._meshes: dict[str, DeviceMesh] = {}
        for name in wanted:
            layout = LAYOUTS[name]
            if layout.mesh:
                ranks = torch.arange(layout.ranks).view(layout.mesh)
                self._meshes[name] = DeviceMesh("cpu", ranks, mesh_dim_names=layout.names)

    def inside(self, name: str) -> bool:
        return self.rank < LAYOUTS[name].ranks

    def group(self, name: str) -> Any:
        return self._groups[LAYOUTS[name].ranks]

    def mesh(self, name: str) -> DeviceMesh | None:
        return self._meshes.get(name)

    def barrier(self, name: str) -> None:
        dist.barrier(self.group(name))


Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


class Training:
    """Model, optimizer with two groups and scheduler in the layout `name`. Every rank sees the same batches."""

    def __init__(self, groups: Groups, name: str, seed: int = 0, make: Make = adamw) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        model = Model()
        mesh = groups.mesh(name)
        if mesh is not None and "tp" in LAYOUTS[name].names:
            spread_over_tp(model, mesh["tp"])
        if mesh is not None and "dp" in LAYOUTS[name].names:
            shard(model, mesh["replicate", "dp"] if name == "hsdp" else mesh["dp"])
        self.model = model
        self.run = DistributedDataParallel(model, process_group=groups.group(name)) if "ddp" in name else model
        named = list(model.named_parameters())
        self.optimizer = make(
            [
                {"params": [p for n, p in named if "norm" not in n]},
                {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.5},
            ]
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, [lambda n: 1 / (n + 1), lambda n: 0.9**n])
        self.state: dict[str, Any] = {"model": self.run, "optim": self.optimizer, "sched": self.scheduler}

    def step(self) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(int(self.model.steps))
        self.run(torch.randn(4, Model.WIDTH, generator=generator)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.model.steps += 1


def whole(value: Any) -> Any:
    """The same nested value with whole tensors for sharded ones: for all ranks of the layout to call."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    return [whole(one) for one in value] if isinstance(value, list) else value


def everything(training: Training) -> dict[str, Any]:
    """All that a training holds, under the names of its parameters; not how it is spread."""
    names = {p: name for name, p in training.model.named_parameters()}
    return {
        "model": whole(dict(training.model.state_dict())),
        "state": {names[p]: whole(dict(state)) for p, state in training.optimizer.state.items()},
        "groups": [
            {**whole({k: v for k, v in group.items() if k != "params"}), "params": [names[p] for p in group["params"]]}
            for group in training.optimizer.param_groups
        ],
        "sched": training.scheduler.state_dict(),
    }


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Where two nested values are not the same bits."""
    if type(a) is not type(b):
        return [f"{at}: {type(a).__name__} is not {type(b).__name__}"]
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
        return [] if same else [f"{at}: {a} is not {b}"]
    if isinstance(a, dict):
        if set(a) != set(b):
            return [f"{at}: only here {sorted(set(a) - set(b))}, only there {sorted(set(b) - set(a))}"]
        return [one for key in a for one in differences(a[key], b[key], f"{at}.{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{at}: {len(a)} is not {len(b)} long"]
        return [one for i, pair in enumerate(zip(a, b, strict=True)) for one in differences(*pair, f"{at}[{i}]")]
    return [] if a == b else [f"{at}: {a!r} is not {b!r}"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
