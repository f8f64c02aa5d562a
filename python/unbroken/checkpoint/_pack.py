"""The archives of what is no tensor, and values that ranks have under one key and that are not equal.

A value has one place in a checkpoint, and the lowest rank that has it writes it. Besides, every rank writes its own
values, and the keys that it has, as one more object. Digests in the votes tell the coordinator which ranks hold
something else than rank 0; if any do, `.metadata` names the objects of those and of rank 0, as
`unbroken/rank_00001/values`. So usually none is named, and no rank's value is silently replaced by another's.

Values are all objects, and in plain mappings, in objects with state_dict() and in the extra state of modules also CPU
tensors of up to 64 KiB (a generator's state, say). Larger tensors and buffers are the lowest rank's.
"""

from __future__ import annotations

import hashlib
import io
import marshal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unbroken.checkpoint._plan import Item, LocalPlan
from unbroken.checkpoint._safe import loads
from unbroken.checkpoint._state import Role, values_key
from unbroken.errors import InvalidArgumentError

__all__ = ["FILE_BYTES", "OwnValues", "Packer", "fingerprint", "is_simple", "pack"]

FILE_BYTES = 2 << 30  # the most that one file holds
_SIMPLE = (int, float, str, bool, bytes, type(None))
_VALUE_BYTES = 64 << 10


@dataclass
class _Object:
    key: str
    fingerprint: bytes | None = None
    archive: bytes = b""
    checked: type | None = None


def is_simple(value: Any) -> bool:
    return type(value) in _SIMPLE or (type(value) in (list, tuple) and all(map(is_simple, value)))


def pack(key: str, value: Any, *, check: bool) -> bytes:
    """`value` as torch.save writes it. InvalidArgumentError names the key when that cannot be done or, with `check`,
    when it could not be read again."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        raise InvalidArgumentError(f"state {key!r}: a {type(value).__name__} cannot be saved: {error}") from error
    raw = buffer.getvalue()
    if check:
        loads(key, raw)
    if len(raw) > FILE_BYTES:
        raise InvalidArgumentError(f"state {key!r}: a single object of {len(raw)} bytes; the most is {FILE_BYTES}")
    return raw


class Packer:
    """The archives of the objects in the state. One whose value is the same as last time is not made again."""

    def __init__(self, local: LocalPlan, values: Sequence[Any], rank: int) -> None:
        self._objects: dict[int, _Object] = {}
        for item, leaf in zip(local.items, local.leaf_of, strict=True):
            if item.dtype is None:
                self._objects[leaf] = _Object(item.of_rank(rank).key)
                self.pack(leaf, values[leaf])
        self.own = OwnValues(local, values, rank)

    def pack(self, leaf: int, value: Any) -> bytes:
        kept = self._objects[leaf]
        # marshal writes the exact value and type of simple ones, so equal bytes are equal values.
        fingerprint = marshal.dumps(value, 2) if is_simple(value) else None
        if fingerprint is None or fingerprint != kept.fingerprint:
            check = fingerprint is None and kept.checked is not type(value)
            kept.archive = pack(kept.key, value, check=check)
            kept.checked = type(value)
        kept.fingerprint = fingerprint
        return kept.archive

    def size(self, leaf: int) -> int:
        return len(self._objects[leaf].archive)

    def keep_only(self, leaves: set[int]) -> None:
        """Forgets objects that another rank writes, but for what is this rank's own."""
        self._objects = {leaf: kept for leaf, kept in self._objects.items() if leaf in leaves}
        self.own.leave_out(leaves)


def fingerprint(key: str, value: Any) -> bytes:
    """Equal for equal values; for some equal ones it differs (the pickle of one object is not always the same)."""
    if is_simple(value):
        return marshal.dumps(value, 2)
    if type(value) is torch.Tensor:
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return f"{plain.dtype} {tuple(plain.shape)} ".encode() + raw
    return pack(key, value, check=False)


def _is_value(item: Item, value: Any) -> bool:
    if item.role is Role.RANK:
        return False
    if isinstance(value, torch.Tensor):
        raw = item.dtype is not None and item.role is Role.OWN and not item.shard
        return raw and value.device.type == "cpu" and value.nbytes <= _VALUE_BYTES
    return not isinstance(value, np.ndarray) or value.nbytes <= _VALUE_BYTES


class OwnValues:
    """The values of one rank, for one plan."""

    def __init__(self, local: LocalPlan, values: Sequence[Any], rank: int) -> None:
        self._key = values_key(rank)
        # Of the leaves, not of the items: a rank has no item of a tensor of which it holds nothing.
        self._all_keys = [leaf.key for leaf in local.leaves if leaf.role is not Role.RANK]
        self._hash_of_keys = hashlib.sha256(repr(self._all_keys).encode()).digest()
        self._keys: dict[int, str] = {}  # of the values, by leaf
        for item, leaf in zip(local.items, local.leaf_of, strict=True):
            if _is_value(item, values[leaf]):
                self._keys[leaf] = item.key
        self._others = list(self._keys)  # those that another rank writes
        self._digest, self._archive = "", b""
        self.size = len(self.archive("first", values))

    def leave_out(self, written: set[int]) -> None:
        """What this rank writes anyway need not be kept apart."""
        self._others = [leaf for leaf in self._others if leaf not in written]

    def digest(self, values: Sequence[Any]) -> str:
        """Of all its values and keys: another one when any differs."""
        whole = hashlib.sha256(self._hash_of_keys)
        simple: list[tuple[str, Any]] = []
        for leaf, key in self._keys.items():
            value = values[leaf]
            if is_simple(value):
                simple.append((key, value))
            else:
                whole.update(f"{key} ".encode())
                whole.update(hashlib.sha256(fingerprint(key, value)).digest())
        whole.update(marshal.dumps(simple, 2))
        return whole.hexdigest()[:32]

    def archive(self, digest: str, values: Sequence[Any]) -> bytes:
        """The object to keep apart, for values of `digest`."""
        if digest != self._digest or not self._archive:
            own = {self._keys[leaf]: _alone(values[leaf]) for leaf in self._others}
            self._archive = pack(self._key, {"values": own, "keys": self._all_keys}, check=False)
            self._digest = digest
        return self._archive


def _alone(value: Any) -> Any:
    """torch.save writes the whole memory that a tensor is a view of."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
