"""The memory that saves through DCP are staged in: one arena a writer, reused from save to save.

`dcp.async_save` stages before it plans. So the first stage() guesses that this rank will write all that it has, in
DCP's order; what a save turns out to write is remembered, and later calls put exactly that into the image, where it is
written from, and the rest beside it. A guess that is wrong costs a second copy, in the background, and nothing else.
"""

from __future__ import annotations

import atexit
import copy
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.tensor import DTensor

from unbroken.checkpoint._image import SlotImage, SlotSpec, tensor_at
from unbroken.checkpoint._plan import check_device, cut, identity, is_raw
from unbroken.checkpoint._tree import key_of
from unbroken.errors import DeadlineError, InvalidArgumentError

__all__ = ["Arena", "Spec", "alone", "borrow", "give_back"]

Spec = tuple[torch.dtype, tuple[int, ...]] | None  # of a slot; None: an object

_LONGEST_SAVE_SECONDS = 1800.0
_ALIGNMENT = 64
# The threads of dcp.async_save end with the save that they are for.
_DCP_THREAD = "AsyncCheckpointExecutor"


class Staged(dict[str, Any]):
    """A state dict whose tensors lie in an arena. For another process it is packed into one piece of shared memory:
    one by one, each tensor would take a descriptor."""

    def __init__(self, values: dict[str, Any], staged: dict[int, torch.Tensor], flight: Flight) -> None:
        super().__init__(values)
        self._staged = staged
        self._flight = flight

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in self._staged.values()]
        memory = torch.empty(max(1, sum(sizes)), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        memo: dict[int, Any] = {}
        at = 0
        for tensor, size in zip(self._staged.values(), sizes, strict=True):
            place = _Place(memory, at, tensor.dtype, tuple(tensor.shape))
            place.view().copy_(tensor)
            memo[id(tensor)] = place
            at += size
        for _, value in _leaves(self):
            if isinstance(value, DTensor):
                memo[id(value)] = _Sharded(value, memo)
            elif isinstance(value, torch.Tensor):
                memo.setdefault(id(value), value)
        packed = copy.deepcopy(dict(self), memo)
        self._flight.freed.set()
        return dict, (packed,)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)


class _Place:
    """A tensor in shared memory, on its way to another process."""

    def __init__(self, memory: torch.Tensor, at: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        self._parts = (memory, at, dtype, sizes)

    def view(self) -> torch.Tensor:
        return _view_of(*self._parts)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        return _view_of, self._parts


def _view_of(memory: torch.Tensor, at: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    if math.prod(sizes) == 0:
        return torch.empty(sizes, dtype=dtype)
    return tensor_at(memory.data_ptr() + at, dtype, sizes, memory)


class _Sharded:
    """A DTensor on its way to another process."""

    def __init__(self, tensor: DTensor, memo: Mapping[int, Any]) -> None:
        self._parts = (memo.get(id(tensor._local_tensor), tensor._local_tensor), tensor._spec)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., DTensor], tuple[Any, ...]]:
        return _dtensor, self._parts


def _dtensor(local: torch.Tensor, spec: Any) -> DTensor:
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _leaves(state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    traverse_state_dict(dict(state), lambda path, value: leaves.append((key_of(path), value)))
    return leaves


def own_copy(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU of a tensor that is not just its bytes; no more than the tensor is of its storage."""
    try:
        tensor = tensor.detach()
        made = tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
        if type(made) is not type(tensor):
            made = made.as_subclass(type(tensor))
        for name, value in tensor.__dict__.items():
            if name not in made.__dict__:
                made.__dict__[name] = copy.deepcopy(value)
    except Exception as error:
        kind = f"a {type(tensor).__name__} of {tensor.dtype}"
        raise InvalidArgumentError(f"state {key!r}: {kind} cannot be copied: {error}") from error
    return made


def alone(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, with a storage that holds nothing else."""
    tensor = tensor.detach()
    try:
        shares = tensor.untyped_storage().size() != tensor.nbytes
    except (NotImplementedError, RuntimeError):  # it has none of its own
        shares = False
    return own_copy(key, tensor) if shares or tensor.device.type != "cpu" else tensor


Recipe = Callable[[Sequence[torch.Tensor]], Any]  # makes a leaf of the staged raw tensors


@dataclass
class _Found:
    """What stage() has to copy."""

    raw: list[torch.Tensor] = field(default_factory=list)
    guess: list[Spec] = field(default_factory=list)  # the slots, if this rank writes everything
    place: dict[int, int] = field(default_factory=dict)  # by raw tensor: its slot in that case
    _known: dict[Any, int] = field(default_factory=dict)

    def recipe(self, key: str, value: torch.Tensor) -> Recipe:
        if isinstance(value, ShardedTensor):
            shards = [(self.recipe(key, shard.tensor), shard.metadata) for shard in value.local_shards()]
            return lambda staged: ShardedTensor._init_from_local_shards_and_global_metadata(
                [Shard(make(staged), metadata) for make, metadata in shards],
                sharded_tensor_metadata=value.metadata(),
                process_group=value._process_group,
            )
        if value.is_nested:
            raise InvalidArgumentError(
                f"state {key!r}: DCP cannot save a nested tensor; save its values() and offsets()"
            )
        check_device(key, value)
        if isinstance(value, DTensor):
            if any(placement.is_partial() for placement in value.placements):
                raise InvalidArgumentError(f"state {key!r}: a DTensor of partial sums; redistribute() it first")
            local, spec = self.recipe(key, value._local_tensor), value._spec
            return lambda staged: _dtensor(local(staged), spec)
        if is_raw(value):
            number = self._number(key, value)
            return lambda staged: staged[number]
        self.guess.append(None)
        return lambda _: own_copy(key, value)

    def _number(self, key: str, tensor: torch.Tensor) -> int:
        memory = identity(tensor)
        number = self._known.get(memory) if memory is not None else None
        if number is not None:
            return number
        number = len(self.raw)
        self.raw.append(tensor.detach())
        if memory is not None:
            self._known[memory] = number
        pieces = cut((0,) * tensor.dim(), tuple(tensor.shape), tensor.dtype.itemsize, key)
        if len(pieces) == 1:
            self.place[number] = len(self.guess)
        self.guess += [(tensor.dtype, piece.sizes) for piece in pieces]
        return number

    def specs(self) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        return tuple((tensor.dtype, tuple(tensor.shape)) for tensor in self.raw)


class Flight:
    """From stage() until the staged bytes are written, or copied elsewhere, or nobody has them any more."""

    def __init__(self, signature: Any, views: Sequence[torch.Tensor]) -> None:
        self.signature = signature
        self.numbers = {view.data_ptr(): number for number, view in enumerate(views) if view.nbytes}
        self.freed = threading.Event()
        self._caller = threading.get_ident()
        self._thread: threading.Thread | None = None
        self._staged: Callable[[], object] = lambda: None
        if not self.numbers:
            self.freed.set()

    def takes_off(self, staged: Staged) -> None:
        self._staged = weakref.ref(staged)

    def is_saved_here(self) -> None:
        """A save begins in this thread. It is this one's unless it is the thread that staged, in which another save can
        come in between."""
        if self._thread is None and threading.get_ident() != self._caller:
            self._thread = threading.current_thread()

    def over(self) -> bool:
        ended = self._thread is not None and not self._thread.is_alive()
        return self.freed.is_set() or ended or self._staged() is None

    def wait(self, seconds: float) -> None:
        """Until the save is over, and its collectives are: those of two saves at once would get mixed up."""
        deadline = time.monotonic() + seconds
        while not self.over():
            if time.monotonic() > deadline:
                raise DeadlineError(f"stage a save: the one before it has not ended after {seconds:g} s")
            self.freed.wait(0.02)
        thread = self._thread
        if thread is not None and thread.name.startswith(_DCP_THREAD) and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise DeadlineError(f"stage a save: the one before it has not ended after {seconds:g} s")


class Arena:
    """Threads: stage() one at a time; image() and what follows under `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # over all below
        self._staging = threading.Lock()
        self._pid = os.getpid()
        self._image: SlotImage | None = None  # what is written
        self._specs: tuple[Spec, ...] = ()
        self._rank = -1
        self._side: SlotImage | None = None  # what is staged and not written from here
        self._side_specs: tuple[Spec, ...] = ()
        self._signature: Any = None  # of the state that _slot_of belongs to
        self._slot_of: dict[int, int] = {}  # by number of the raw tensor
        self._flight: Flight | None = None

    def usable(self) -> bool:
        """Whether another writer may have it."""
        return self._pid == os.getpid() and (self._flight is None or self._flight.over())

    def is_saved_here(self) -> None:
        if self._flight is not None:
            self._flight.is_saved_here()

    # --- staging -----------------------------------------------------------------------------------------------------

    def stage(self, state: Mapping[str, Any], rank: int) -> Staged:
        """A copy of the state as it is now. Waits for the save before."""
        with self._staging:
            if self._flight is not None:
                self._flight.wait(_LONGEST_SAVE_SECONDS)
            return self._stage(state, rank)

    def _stage(self, state: Mapping[str, Any], rank: int) -> Staged:
        leaves = _leaves(state)
        found = _Found()
        recipes: dict[int, Recipe] = {}
        for key, value in leaves:
            if isinstance(value, torch.Tensor):
                recipes[id(value)] = recipes.get(id(value)) or found.recipe(key, value)
            else:
                found.guess.append(None)
        with self.lock:
            views = self._copy(found, rank)
            flight = Flight((found.specs(), tuple(found.guess)), views)
            memo = {identifier: make(views) for identifier, make in recipes.items()}
            staged = Staged(_copy_of(state, leaves, memo), dict(enumerate(views)), flight)
            flight.takes_off(staged)
            self._flight = flight
        return staged

    def _copy(self, found: _Found, rank: int) -> list[torch.Tensor]:
        signature = (found.specs(), tuple(found.guess))
        if self._image is None or self._signature != signature:
            self._make(rank, tuple(found.guess), [0] * len(found.guess))
            self._signature, self._slot_of = signature, found.place
        assert self._image is not None
        beside = [number for number in range(len(found.raw)) if number not in self._slot_of]
        specs = tuple(found.specs()[number] for number in beside)
        if self._side is None or self._side_specs != specs:
            self._close_side()
            self._side, self._side_specs = SlotImage(specs, 0), specs
        on_device = any(tensor.is_cuda for tensor in found.raw)
        views: dict[int, torch.Tensor] = {}
        for image, slots in ((self._image, self._slot_of), (self._side, {n: slot for slot, n in enumerate(beside)})):
            if on_device:
                image.pin()
            image.copy(image.place((slot, found.raw[number]) for number, slot in slots.items()))
            # New ones each time: who sends one to another process moves it to other memory.
            views |= {number: image.new_view(slot) for number, slot in slots.items()}
        return [views[number] for number in range(len(found.raw))]

    # --- writing -----------------------------------------------------------------------------------------------------

    def image(self, rank: int, specs: tuple[Spec, ...], lengths: Sequence[int], addresses: Sequence[int]) -> SlotImage:
        """The image of these slots. addresses: for each slot, where its tensor lies now.

        Where another save's bytes lie in the arena, the image is one of its own, for the caller to close.
        """
        flight = self._flight if self._flight is not None and not self._flight.over() else None
        mine = flight is not None and any(address in flight.numbers for address in addresses)
        if flight is not None and not mine:
            return SlotImage(_with(specs, lengths), rank)
        self._make(rank, specs, lengths)
        assert self._image is not None
        if flight is not None:
            numbers = ((flight.numbers.get(address), slot) for slot, address in enumerate(addresses))
            self._signature = flight.signature
            staged_specs = flight.signature[0]
            self._slot_of = {n: slot for n, slot in numbers if n is not None and staged_specs[n] == specs[slot]}
        return self._image

    def landed(self, image: SlotImage) -> None:
        """The image is written, or will not be."""
        if image is not self._image:
            image.close()
        elif self._flight is not None:
            self._flight.freed.set()

    def _make(self, rank: int, specs: tuple[Spec, ...], lengths: Sequence[int]) -> None:
        if self._image is not None and (self._rank, self._specs) == (rank, specs):
            return
        if self._image is not None:
            self._image.close()
        self._image, self._signature, self._slot_of = None, None, {}
        self._image, self._rank, self._specs = SlotImage(_with(specs, lengths), rank), rank, specs

    def _close_side(self) -> None:
        if self._side is not None:
            self._side.close()
        self._side, self._side_specs = None, ()

    def close(self) -> None:
        """Gives the memory back, when nothing is in flight."""
        with self.lock:
            if self.usable():
                self._close_side()
                if self._image is not None:
                    self._image.close()
                self._image, self._signature, self._slot_of = None, None, {}


def _with(specs: Sequence[Spec], lengths: Sequence[int]) -> list[SlotSpec]:
    return [length if spec is None else spec for spec, length in zip(specs, lengths, strict=True)]


def _copy_of(state: Mapping[str, Any], leaves: Iterable[tuple[str, Any]], memo: dict[int, Any]) -> dict[str, Any]:
    """A deep copy, with the tensors of `memo` in their places."""
    try:
        return copy.deepcopy(dict(state), dict(memo))
    except Exception as error:
        for key, value in leaves:
            if not isinstance(value, torch.Tensor):
                _check_copy(key, value)
        raise InvalidArgumentError(f"stage a save: the state cannot be copied: {error}") from error


def _check_copy(key: str, value: Any) -> None:
    try:
        copy.deepcopy(value)
    except Exception as error:
        raise InvalidArgumentError(f"state {key!r}: a {type(value).__name__} cannot be copied: {error}") from error


# An arena takes long to make, and a new writer for each save is the usual way: the last one's is kept for the next.
# It is given back by a finalizer, which runs at any place of any thread, inside of `threading` with its locks held too;
# so by list operations alone, and whether it may be used is asked when it is wanted.
_spare: list[Arena] = []
_exiting = False


def borrow() -> Arena:
    try:
        arena = _spare.pop()
    except IndexError:
        return Arena()
    return arena if arena.usable() else Arena()


def give_back(arena: Arena) -> None:
    if _exiting:
        arena.close()
    else:
        _spare.append(arena)
        del _spare[:-1]


@atexit.register
def _close_spare() -> None:
    """The engine's objects must be gone before the interpreter is."""
    global _exiting
    _exiting = True
    for arena in _spare:
        arena.close()
