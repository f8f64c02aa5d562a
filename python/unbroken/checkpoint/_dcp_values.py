"""Plain values that ranks have under one key and that are not equal.

DCP keeps one rank's value of a key, and a StorageWriter is shown no other. But a planner that is made like DCP's keeps
its rank's state, so digests of the plain values in it can go to the coordinator with what the rank has written. Only
what has equal digests whenever it is equal is compared: a difference fails the save.
"""

from __future__ import annotations

import hashlib
import marshal
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from unbroken.checkpoint._pack import is_simple

__all__ = ["Digests", "differences", "digests_of"]

Digests = tuple[bytes, bytes]  # of the keys, and of their values; 8 bytes each
_SHOWN = 20


def _digest(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def _plain_bytes(value: Any) -> bytes | None:
    """Equal for equal values of equal types and only for those. None: it cannot be told."""
    if is_simple(value):
        return marshal.dumps(value, 2)
    kind = type(value)
    if kind is complex or isinstance(value, (torch.Size, torch.dtype, torch.device)):
        return f"{kind.__name__} {value!r}".encode()
    if isinstance(value, (np.generic, np.ndarray)):
        return None if value.dtype.hasobject else f"{value.dtype.str} {value.shape} ".encode() + value.tobytes()
    if kind is dict:
        parts = [_plain_bytes((key, held)) for key, held in value.items()]
    elif kind in (list, tuple, set, frozenset):
        parts = [_plain_bytes(held) for held in value]
    else:
        return None
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if kind in (dict, set, frozenset):
        known.sort()
    return kind.__name__.encode() + marshal.dumps(known, 2)


def digests_of(state: Mapping[str, Any]) -> Digests:
    """Of this rank's values, for the coordinator."""
    keys, values = array("Q"), array("Q")
    for key, value in state.items():
        if isinstance(key, str) and not isinstance(value, torch.Tensor):
            raw = _plain_bytes(value)
            if raw is None:  # of such, one class is not the other
                raw = f"a {type(value).__module__}.{type(value).__qualname__}".encode()
            keys.append(_digest(key.encode()))
            values.append(_digest(raw))
    return keys.tobytes(), values.tobytes()


def differences(saved: Iterable[str], digests: Mapping[int, Digests]) -> str:
    """Which of the keys that are saved have several values, and on which ranks; empty when none has."""
    if len(set(digests.values())) < 2:
        return ""
    names = {_digest(key.encode()): key for key in saved}
    first: dict[int, tuple[int, int]] = {}  # by key: the lowest rank that has it, and its value
    others: dict[int, list[int]] = {}  # the ranks that have another value
    for rank, (raw_keys, raw_values) in sorted(digests.items()):
        for key, value in zip(array("Q", raw_keys), array("Q", raw_values), strict=True):
            if key in names and first.setdefault(key, (rank, value))[1] != value:
                others.setdefault(key, []).append(rank)
    told = sorted((names[key], first[key][0], ranks) for key, ranks in others.items())
    text = ", ".join(f"{name!r} ({_ranks(ranks)} not as rank {lowest})" for name, lowest, ranks in told[:_SHOWN])
    return text + (f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else "")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"
