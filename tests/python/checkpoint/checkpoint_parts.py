"""What the tests of checkpoints share: a small training, and comparison bit by bit."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adamw-amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "adamw-lr-tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2)),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=1e-1, max_iter=2, history_size=3),
}


class Net(nn.Module):
    """BatchNorm, dropout, a tied weight and a buffer that is not saved."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width, bias=False)
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3))
        self.out = nn.Linear(width, 8, bias=False)
        self.head = nn.Linear(8, width, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(self.embed(x) + self.head(x)))


class Training:
    """All that a run has: the state names it, one step changes it all and draws from every generator."""

    def __init__(self, optimizer: str = "adamw", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = Net().to(dtype)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 4], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        self.dtype = dtype
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "average": self.average,
            "notes": {"losses": [], "best": math.inf, 3: "three"},
        }

    def step(self) -> None:
        inputs = torch.randn(6, 8, dtype=self.dtype) + random.random() + np.random.rand()
        if isinstance(self.optimizer, torch.optim.LBFGS):

            def closure() -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = self.model(inputs).float().square().mean()
                loss.backward()
                return loss

            loss = self.optimizer.step(closure)
        else:
            self.optimizer.zero_grad()
            loss = self.model(inputs).float().square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        notes = self.state["notes"]
        notes["losses"].append(loss.item())
        notes["best"] = min(notes["best"], loss.item())

    def everything(self) -> dict[str, Any]:
        """A copy of all state, the random numbers to come included."""
        return copy.deepcopy(
            {
                "model": dict(self.model.state_dict()),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "scaler": self.scaler.state_dict(),
                "average": dict(self.average.state_dict()),
                "notes": self.state["notes"],
                "python": random.getstate(),
                "numpy": np.random.get_state(),
                "torch": torch.get_rng_state(),
            }
        )


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Where two nested values are not the same bits of the same types. Containers compare by kind and order of keys."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return [] if same_tensor(a, b) else [f"{at}: {a} is not {b}"]
    if isinstance(a, np.ndarray):
        return [] if a.dtype == b.dtype and a.tobytes() == b.tobytes() else [at]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if list(map(repr, a)) != list(map(repr, b)) or type(a) is not type(b):
            return [f"{at}: {type(a).__name__} {list(a)} is not {type(b).__name__} {list(b)}"]
        return [d for k in a for d in differences(a[k], b[k], f"{at}.{k}")]
    if type(a) is not type(b):
        return [f"{at}: {type(a).__name__} {a!r} is not {type(b).__name__} {b!r}"]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{at}: {len(a)} is not {len(b)} long"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{at}[{i}]")]
    if isinstance(a, float):
        return [] if struct.pack("d", a) == struct.pack("d", b) else [f"{at}: {a!r} is not {b!r}"]
    return [] if a == b else [f"{at}: {a!r} is not {b!r}"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def same_tensor(a: Any, b: Any) -> bool:
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(bits(a), bits(b))
    )


def crc32c(data: bytes) -> int:
    """Bit by bit, from RFC 3720, so that the tests do not trust the engine's."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def reseal(path: Path, **changes: object) -> None:
    """Changes fields of a manifest or a record, and its checksum with them."""
    body = json.loads(path.read_bytes())["body"]
    assert changes.keys() <= body.keys()
    text = json.dumps(body | changes, separators=(",", ":")).encode()
    path.write_bytes(b'{"crc32c":"%08x","body":%s}\n' % (crc32c(text), text))
