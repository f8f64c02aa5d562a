"""The engine's board over torch.distributed's key-value store."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from unbroken import _engine
from unbroken.errors import InvalidArgumentError

__all__ = ["AnyBoard", "TorchBoard", "make_board"]

_PIECE_BYTES = 4 << 20
_WHOLE, _PIECES = b"=", b"+"  # how a value begins


class TorchBoard(_engine.Board):
    """A board over `store`. It polls: a wait that times out inside torch's store blocks its connection and prints.

    Two connections, one for the thread that made the board and one for all others, so that a step in the foreground
    never waits for what a save in the background asks.

    TCPStore drops a connection that sends more than some MiB at once, and the plan of a rank with many tensors is that
    long. So a long value is set in pieces, under names of their own, before its name is set to say how many there are.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        super().__init__()
        self._owner = threading.get_ident()
        self._foreground = PrefixStore(prefix, _clone(store))
        self._background = PrefixStore(prefix, _clone(store))
        self._pieces: dict[str, int] = {}  # of the long values that this rank has set or seen

    def _store(self) -> Any:
        return self._foreground if threading.get_ident() == self._owner else self._background

    def set(self, key: str, value: bytes) -> None:
        store = self._store()
        if len(value) <= _PIECE_BYTES:
            store.set(key, _WHOLE + value)
            return
        names = self._names(key, -(-len(value) // _PIECE_BYTES))
        for i, name in enumerate(names):
            store.set(name, value[i * _PIECE_BYTES : (i + 1) * _PIECE_BYTES])
        store.set(key, _PIECES + str(len(names)).encode())

    def get(self, keys: list[str]) -> list[bytes | None]:
        store = self._store()
        present = _present(store, keys)
        values = iter(store.multi_get(present) if present else [])
        here = set(present)
        return [self._joined(store, key, bytes(next(values))) if key in here else None for key in keys]

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        # An empty expectation is met by a key that is not there, and by no other as no value is empty.
        return self._joined(self._store(), key, bytes(self._store().compare_set(key, b"", _WHOLE + value)))

    def erase(self, keys: list[str]) -> None:
        store = self._store()
        for key in keys:
            store.delete_key(key)
            for i in range(self._pieces.pop(key, 0)):
                store.delete_key(_piece(key, i))

    def _joined(self, store: Any, key: str, value: bytes) -> bytes:
        if value.startswith(_WHOLE):
            return value[len(_WHOLE) :]
        return b"".join(store.get(name) for name in self._names(key, int(value[len(_PIECES) :])))

    def _names(self, key: str, count: int) -> list[str]:
        if count:
            self._pieces[key] = count
        return [_piece(key, i) for i in range(count)]


def _piece(key: str, number: int) -> str:
    return f"{key}#{number}"


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


def make_board(
    group: dist.ProcessGroup | None, problem: Exception | None = None, settings: dict[str, object] | None = None
) -> AnyBoard:
    """The board of the ranks of `group`; of a world of one without torch.distributed it is memory. A collective call.

    The prefix is new each time and comes from the first rank. torchrun keeps one store over its restarts, so under any
    name that a rank could work out by itself it might find what a dead one had left there, and follow that.

    On the way the ranks compare notes, so that none waits for one that cannot start. Raises `problem`; on the other
    ranks InvalidArgumentError names the rank that has one. `settings` must be equal on all.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if problem is not None:
            raise problem
        return _engine.MemoryBoard()
    note = _Note(secrets.token_hex(8), "" if problem is None else str(problem), settings or {})
    notes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(notes, note, group=group)
    if problem is not None:
        raise problem
    _compare(notes)
    world = dist.distributed_c10d._get_default_group()
    store = dist.distributed_c10d._get_process_group_store(group if group is not None else world)
    return TorchBoard(store, f"unbroken/{notes[0].name}")


@dataclass(frozen=True)
class _Note:
    name: str  # not from a generator that belongs to the run
    problem: str
    settings: dict[str, object]


def _compare(notes: list[_Note]) -> None:
    problems = [f"rank {rank}: {note.problem}" for rank, note in enumerate(notes) if note.problem]
    if problems:
        raise InvalidArgumentError(f"start: not every rank can: {'; '.join(problems)}")
    for rank, note in enumerate(notes):
        for name, value in note.settings.items():
            first = notes[0].settings.get(name)
            if value != first:
                raise InvalidArgumentError(
                    f"start: {name} is {first} on rank 0 and {value} on rank {rank}; use one value"
                )
