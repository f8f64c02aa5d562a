"""The engine's board over torch.distributed's key-value store."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from unbroken import _engine

__all__ = ["AnyBoard", "TorchBoard", "make_board"]


class TorchBoard(_engine.Board):
    """A board over `store`. It polls: a wait that times out inside torch's store blocks its connection and prints.

    Two connections, one for the thread that made the board and one for all others, so that a step in the foreground
    never waits for what a save in the background asks.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        super().__init__()
        self._owner = threading.get_ident()
        self._foreground = PrefixStore(prefix, _clone(store))
        self._background = PrefixStore(prefix, _clone(store))

    def _store(self) -> Any:
        return self._foreground if threading.get_ident() == self._owner else self._background

    def set(self, key: str, value: bytes) -> None:
        self._store().set(key, value)

    def get(self, keys: list[str]) -> list[bytes | None]:
        store = self._store()
        present = _present(store, keys)
        values = iter(store.multi_get(present) if present else [])
        here = set(present)
        return [bytes(next(values)) if key in here else None for key in keys]

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        # An empty expectation is met by a key that is not there, and by no other as no value is empty.
        return bytes(self._store().compare_set(key, b"", value))

    def erase(self, keys: list[str]) -> None:
        store = self._store()
        for key in keys:
            store.delete_key(key)


def _clone(store: Any) -> Any:
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store  # a store of the user's own: one connection has to do


def _present(store: Any, keys: list[str]) -> list[str]:
    """Those of `keys` that are set. Usually all are, or all but a few: halving finds them in few round trips."""
    if not keys or store.check(keys):
        return keys
    if len(keys) == 1:
        return []
    half = len(keys) // 2
    return _present(store, keys[:half]) + _present(store, keys[half:])


AnyBoard = TorchBoard | _engine.MemoryBoard


def make_board(group: dist.ProcessGroup | None) -> AnyBoard:
    """The board of the ranks of `group`; of a world of one without torch.distributed it is memory. A collective call.

    The prefix is new each time and comes by a broadcast. torchrun keeps one store over its restarts, so under any name
    that a rank could work out by itself it might find what a dead one had left there, and follow that.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return _engine.MemoryBoard()
    name = [secrets.token_hex(8)]  # not from a generator that belongs to the run
    dist.broadcast_object_list(name, group=group, group_src=0)
    world = dist.distributed_c10d._get_default_group()
    store = dist.distributed_c10d._get_process_group_store(group if group is not None else world)
    return TorchBoard(store, f"unbroken/{name[0]}")
