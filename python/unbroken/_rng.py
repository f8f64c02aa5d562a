"""The random number generators of a process, as tensors: python's, numpy's, torch's on the CPU and on every device.

Tensors, because their shape never changes: a save of them needs no planning, and no pickle is read when they are
restored.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "restore", "seed_from"]

_logger = logging.getLogger(__name__)
_PYTHON_VERSION = 3
_MT_WORDS = 624


def _python() -> dict[str, torch.Tensor]:
    version, words, gauss = random.getstate()
    if version != _PYTHON_VERSION:  # a later Python with another generator
        return {}
    return {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
    }


def _numpy() -> dict[str, torch.Tensor]:
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return {}
    words = np.append(state["state"]["key"].astype(np.int64), (state["state"]["pos"], state["has_gauss"]))
    return {
        "numpy": torch.from_numpy(words),
        "numpy_gauss": torch.tensor([state["gauss"]], dtype=torch.float64),
    }


def capture() -> dict[str, torch.Tensor]:
    """The state of all generators, by name. The names and shapes are the same at every call."""
    state = _python() | _numpy() | {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state |= {f"cuda_{i}": one for i, one in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore(state: Mapping[str, torch.Tensor]) -> list[str]:
    """Sets the generators of `state`; returns the names of those that this process does not have."""
    absent = []
    for name, value in state.items():
        if name == "python":
            present, gauss = state["python_gauss"].tolist()
            random.setstate((_PYTHON_VERSION, tuple(value.tolist()), gauss if present else None))
        elif name == "numpy":
            words = value.numpy()
            key, (pos, has_gauss) = words[:_MT_WORDS].astype(np.uint32), words[_MT_WORDS:].tolist()
            np.random.set_state(("MT19937", key, pos, has_gauss, state["numpy_gauss"].item()))
        elif name == "torch":
            torch.set_rng_state(value)
        elif name.startswith("cuda_"):
            index = int(name.removeprefix("cuda_"))
            if torch.cuda.is_available() and index < torch.cuda.device_count():
                torch.cuda.set_rng_state(value, index)
            else:
                absent.append(name)
    return absent


def _hash(seed: int, step: int, rank: int, which: str) -> int:
    digest = hashlib.sha256(f"unbroken rng {seed} {step} {rank} {which}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def seed_from(seed: int, step: int, rank: int) -> None:
    """Seeds all generators from separate hashes of (seed, step, rank): for a world of another size."""
    random.seed(_hash(seed, step, rank, "python"))
    np.random.seed(np.frombuffer(_hash(seed, step, rank, "numpy").to_bytes(8, "little"), dtype=np.uint32))
    torch.default_generator.manual_seed(_hash(seed, step, rank, "torch"))
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(_hash(seed, step, rank, "cuda"))
