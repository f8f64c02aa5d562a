"""What the tests of the export share."""

from __future__ import annotations

import json
import os
import re
import struct
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

import unbroken

__all__ = ["bits", "flip", "header_of", "read_export", "same", "save_drop_in", "save_run", "save_stock", "snapshot"]

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
warnings.filterwarnings("ignore", message="TypedStorage is deprecated")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def save_run(root: Path, state: dict[str, Any], steps: int = 1) -> str:
    """Checkpoints of a run; the directory of the last one."""
    with unbroken.Checkpointer(root, state, signals=False) as run:
        run.resume()
        for _ in range(steps):
            run.step()
            attempt = run.save().wait().attempt
    return attempt


def save_stock(root: Path, state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=root, no_dist=True)


def save_drop_in(root: Path, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=unbroken.UnbrokenWriter(root), no_dist=True)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(
        (one[k].dtype, one[k].shape) == (other[k].dtype, other[k].shape) and bits(one[k]) == bits(other[k]) for k in one
    )


def header_of(path: Path) -> dict[str, Any]:
    """By the format's own rules: nothing is between the tensors, before the first or behind the last."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert header["__metadata__"] == {"format": "pt"}
    at = 0
    for entry in (entry for name, entry in header.items() if name != "__metadata__"):
        begin, end = entry["data_offsets"]
        assert begin == at
        at = end
    assert len(raw) == 8 + length + at
    return header


def read_export(out: Path) -> dict[str, torch.Tensor]:
    """As Hugging Face's tools do: the single file, or else what the index names."""
    if (out / SINGLE).exists():
        assert not (out / INDEX).exists()
        header_of(out / SINGLE)
        return load_file(out / SINGLE)
    index = json.loads((out / INDEX).read_text())
    found: dict[str, torch.Tensor] = {}
    files = set(index["weight_map"].values())
    assert files == {name for name in os.listdir(out) if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)}
    assert sorted(files) == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for name in files:
        header_of(out / name)
        with safe_open(out / name, "pt") as file:
            assert set(file.keys()) == {key for key, where in index["weight_map"].items() if where == name}
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert set(found) == set(index["weight_map"])
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in found.values())}
    return found


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()} if directory.exists() else {}
