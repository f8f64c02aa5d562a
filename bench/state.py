"""The states that are saved and loaded: that of an Adam run, a module's for several ranks, and one of tiny tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

TENSORS = 432
_WIDTH = 256


def _shape(nbytes: int) -> tuple[int, int]:
    return (max(1, nbytes // 4 // TENSORS // _WIDTH), _WIDTH)


def adam(nbytes: int) -> dict[str, Any]:
    """432 float32 tensors of about `nbytes` together, two thirds of them moments, and a few plain values."""
    shape = _shape(nbytes)
    state: dict[str, Any] = {"model": {}, "optim": {"state": {}}, "step": 1}
    generator = torch.Generator().manual_seed(0)
    for i in range(TENSORS // 3):
        state["model"][f"layer{i}.weight"] = torch.randn(shape, generator=generator)
        state["optim"]["state"][f"layer{i}.weight"] = {
            "exp_avg": torch.randn(shape, generator=generator),
            "exp_avg_sq": torch.randn(shape, generator=generator),
        }
    return state


def module(nbytes: int) -> torch.nn.Module:
    """432 float32 parameters of about `nbytes` together; equal on all ranks, as under DDP."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.nn.Module()
    for i in range(TENSORS):
        whole.register_parameter(f"weight{i}", torch.nn.Parameter(torch.randn(_shape(nbytes), generator=generator)))
    return whole


def tiny() -> dict[str, Any]:
    """1000 tensors of 1 KB."""
    return {"model": {f"bias{i}": torch.full((256,), float(i)) for i in range(1000)}, "step": 1}


def leaves(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and values of nested dicts, by their joined keys."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, state


def tensors(state: Any) -> dict[str, torch.Tensor]:
    return {key: value for key, value in leaves(state) if isinstance(value, torch.Tensor)}


def nbytes_of(state: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(state).values())


def copy_into(target: Any, source: Any) -> None:
    """What load_state_dict() does: the bytes go to the tensors that are there."""
    for key, value in source.items():
        if isinstance(value, torch.Tensor):
            target[key].copy_(value)
        elif isinstance(value, dict):
            copy_into(target[key], value)
        else:
            target[key] = value
