"""unbroken.UnbrokenWriter: what torch.distributed.checkpoint writes with, in place of its FileSystemWriter."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from unbroken import _engine
from unbroken.checkpoint._archive import DTYPES
from unbroken.checkpoint._dcp_layout import check_box
from unbroken.checkpoint._dcp_stage import Arena, Spec, alone, borrow, give_back
from unbroken.checkpoint._dcp_values import differences, digests_of
from unbroken.checkpoint._foreign import local_path
from unbroken.checkpoint._image import SlotImage, pack
from unbroken.checkpoint._metadata import is_plain, versions, write_metadata
from unbroken.checkpoint._plan import check_device, cut, identity, is_raw
from unbroken.checkpoint._safe import loads
from unbroken.errors import Error, InvalidArgumentError

__all__ = ["UnbrokenWriter"]

_logger = logging.getLogger(__name__)
_OBJECT_BYTES = 2 << 30
_BATCH_BYTES = 256 << 20
_PLAIN_VALUES = MetadataIndex("unbroken/plain_values")  # travels with the results, and is not saved


@dataclass(frozen=True)
class _Cut(WriteItem):
    """A part of an item of the planner's, which knows only the whole."""

    original: WriteItem | None = None


@dataclass
class _Save:
    """One save, as far as this rank has come with it. It has a thread of its own while it lasts."""

    path: str
    identifier: str
    set_up: bool = False
    rank: int = 0
    collectives: bool = True

    @property
    def only_rank(self) -> int | None:
        return None if self.collectives else self.rank


@dataclass
class _Entry:
    """One item of the plan, with what it takes to save it."""

    item: WriteItem
    spec: Spec
    archive: bytes = b""  # where it is no tensor of plain bytes
    address: int = 0
    memory: Any = None  # equal for tensors that may be the same memory
    slot: int = -1

    @property
    def key(self) -> str:
        return self.item.index.fqn


class UnbrokenWriter(StorageWriter, AsyncStager):
    """Writes a checkpoint of torch.distributed.checkpoint into a directory, so that it is there whole or not at all.

        dcp.save(state, storage_writer=unbroken.UnbrokenWriter(path))

    Stock DCP reads what it writes; read by UnbrokenReader, every byte is verified against its checksum. With
    `dcp.async_save` it stages the state itself: the bytes saved are those of the moment of the call. Staging memory is
    kept from save to save (`close()` gives it back). A second async_save waits until the first has ended.

    path: a directory, made when it is absent. overwrite=False: AlreadyExistsError when a checkpoint is there already.
    overwrite=True removes it before the new one is written: a run that is killed in between has neither. Where that
    matters give every save a path of its own.

    Saved are tensors and what torch.save can write, at most 2 GiB each; tensors of plain bytes are cut into pieces and
    may have any size. InvalidArgumentError names the key that cannot be saved.

    DCP keeps one rank's value of a key. Where ranks differ in a plain value (numbers, strings, bytes, None, NumPy
    arrays, containers of them) the save fails on all ranks with an InvalidArgumentError that names keys and ranks: give
    each rank a key of its own. With allow_differing_values=True it is saved with a warning, and holds the value of one
    rank. What is not compared: tensors, other objects, and ranks that never meet. With use_collectives=False each rank
    has a checkpoint of its own in the directory; with no_dist=True each rank needs a path of its own.

    What is wrong before DCP begins to save is raised as it is; what comes later is in DCP's CheckpointException on all
    ranks, for `dcp.async_save` by its future. A failed save leaves no checkpoint; the next one at the path clears away
    what is left.

    Threads: one save at a time through one writer; several threads each take a writer and, where there are ranks, a
    process group of their own.
    """

    _synchronize_after_execute = False  # stage() has copied when it returns

    def __init__(
        self, path: str | os.PathLike[str], *, overwrite: bool = False, allow_differing_values: bool = False
    ) -> None:
        super().__init__()
        self._path = local_path(path)
        self._overwrite = overwrite
        self._allow_differing_values = allow_differing_values
        self._start()

    def _start(self) -> None:
        self._arena: Arena | None = None
        self._local = threading.local()  # .save: the _Save of this thread
        self._checked: set[str] = set()  # objects that have been found to be readable
        self._lock = threading.Lock()  # over _arena

    def __getstate__(self) -> dict[str, Any]:
        names = ("_path", "_overwrite", "_allow_differing_values")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # --- a save, in the order in which DCP calls ---------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and os.fspath(checkpoint_id):
            self._path = local_path(checkpoint_id)
        self._local.save = self._new_save()

    def storage_meta(self) -> StorageMeta | None:
        save = self._current()
        self._open_arena().is_saved_here()
        return StorageMeta(checkpoint_id=save.path, save_id=save.identifier)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:  # noqa: ARG002
        save = self._current()
        if save.set_up:
            save = self._local.save = self._new_save()
        save.set_up = True
        save.rank = kwargs.get("rank") or 0
        save.collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Cuts tensors of over 1 GiB, so that no file passes 2 GiB."""
        items = [part for item in plan.items for part in _parts(item)]
        return plan if len(items) == len(plan.items) else dataclasses.replace(plan, items=items)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes way in the directory. No rank writes before it returns, as DCP hands out the plans after it."""
        save = self._current()
        store = _engine.open_store(save.path, create=True)
        if "generations" in store.list(""):
            raise InvalidArgumentError(
                f"save to {save.path}: it is the root of a run, and unbroken.Checkpointer's; give another directory"
            )
        _engine.prepare_plain(store, overwrite=self._overwrite, only_rank=save.only_rank)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        save = self._current()
        store = _engine.open_store(save.path)
        state = getattr(planner, "state_dict", None)
        known = state if isinstance(state, dict) else {}
        entries = [self._entry(item, planner, known) for item in plan.items]
        slots = _lay_out(entries, planner)
        arena = self._open_arena()
        with arena.lock:
            specs = tuple(entry.spec for entry in slots)
            image = arena.image(save.rank, specs, [len(e.archive) for e in slots], [e.address for e in slots])
            try:
                _fill(image, slots, planner)
                _engine.write_plain_rank(store, image.image)
                results = [_result(entry, image.image.slot(entry.slot)) for entry in entries]
            finally:
                arena.landed(image)
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(_PLAIN_VALUES, 0, digests_of(known))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save = self._current()
        self._compare_values(save, metadata, results)
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {
            one.index: one.storage_data for some in results for one in some if one.index != _PLAIN_VALUES
        }
        metadata.storage_meta = StorageMeta(save_id=save.identifier)  # the path is nobody's business
        if not is_plain(metadata.planner_data):
            _logger.warning(
                "save to %s: the planner's own data is not made of plain values; UnbrokenReader will refuse it, stock "
                "DCP unpickles it",
                save.path,
            )
        _engine.commit_plain(
            _engine.open_store(save.path),
            write_metadata(metadata),
            world_size=len(results) if save.collectives else save.rank + 1,
            only_rank=save.only_rank,
            versions=versions(),
        )
        metadata.storage_meta = StorageMeta(checkpoint_id=save.path, save_id=save.identifier)

    @property
    def checkpoint_id(self) -> str:
        """Where the save goes."""
        return self._current().path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(FileSystem.validate_checkpoint_id(checkpoint_id))

    # --- staging, for dcp.async_save ---------------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state as it is at this moment. InvalidArgumentError names what cannot be saved."""
        return self._open_arena().stage(state_dict, dist.get_rank() if dist.is_initialized() else 0)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: stage() has copied when it returns."""

    def close(self) -> None:
        """Gives the staging memory back. The writer can still be used."""
        with self._lock:
            if self._arena is not None:
                self._arena.close()

    # -----------------------------------------------------------------------------------------------------------------

    def _compare_values(self, save: _Save, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Before the marker is written: DCP has one place for a key, and several ranks may have filled it."""
        digests = {
            rank: one.storage_data for rank, some in enumerate(results) for one in some if one.index == _PLAIN_VALUES
        }
        objects = (k for k, v in metadata.state_dict_metadata.items() if isinstance(v, BytesStorageMetadata))
        differing = differences(objects, digests)
        if not differing:
            return
        what = f"save to {save.path}: ranks have different values under one key, of which DCP keeps one: {differing}"
        if not self._allow_differing_values:
            raise InvalidArgumentError(
                f"{what}. Nothing is saved. Make them equal, or give each rank a key of its own; "
                "UnbrokenWriter(..., allow_differing_values=True) saves one of them"
            )
        _logger.warning("%s. One of them is saved", what)

    def _new_save(self) -> _Save:
        return _Save(self._path, str(uuid.uuid4()))

    def _current(self) -> _Save:
        save: _Save | None = getattr(self._local, "save", None)
        if save is None:
            save = self._local.save = self._new_save()
        return save

    def _open_arena(self) -> Arena:
        with self._lock:
            if self._arena is None:
                self._arena = borrow()
                weakref.finalize(self, give_back, self._arena)
            return self._arena

    def _entry(self, item: WriteItem, planner: SavePlanner, known: Mapping[str, Any]) -> _Entry:
        key = item.index.fqn
        if item.type is WriteItemType.BYTE_IO:
            return _Entry(item, None, self._object(item, planner))
        tensor = _tensor_of(item, planner)
        assert item.tensor_data is not None
        sizes = tuple(item.tensor_data.chunk.sizes)
        if item.type is WriteItemType.SHARD:
            _check_shard(item, tensor, known.get(key))
        if is_raw(tensor) and (tensor.dtype, tuple(tensor.shape)) == (item.tensor_data.properties.dtype, sizes):
            address = tensor.data_ptr() if tensor.is_cpu else 0
            return _Entry(item, (tensor.dtype, sizes), address=address, memory=identity(tensor))
        return _Entry(item, None, self._readable(key, pack(key, alone(key, tensor), check=False)))

    def _object(self, item: WriteItem, planner: SavePlanner) -> bytes:
        key = item.index.fqn
        try:
            data = planner.resolve_data(item)
        except Exception as error:
            raise InvalidArgumentError(f"state {key!r}: it cannot be saved: {type(error).__name__}: {error}") from error
        if not isinstance(data, io.BytesIO):
            raise InvalidArgumentError(f"state {key!r}: the planner gives a {type(data).__name__}, not bytes")
        raw = data.getvalue()
        if len(raw) > _OBJECT_BYTES:
            raise InvalidArgumentError(f"state {key!r}: one object of {len(raw)} bytes; the most is {_OBJECT_BYTES}")
        if raw[-22:-18] != b"PK\5\6" or raw[-2:] != b"\0\0":
            raise InvalidArgumentError(f"state {key!r}: the planner gives bytes that are no archive of torch.save")
        return self._readable(key, raw)

    def _readable(self, key: str, raw: bytes) -> bytes:
        """Says so when UnbrokenReader will refuse it: once, as it takes time to find out."""
        if key not in self._checked:
            self._checked.add(key)
            try:
                loads(key, raw)
            except Error as error:
                _logger.warning("saved, and not to be read by UnbrokenReader: %s", error)
        return raw


def _check_dtype(item: WriteItem) -> None:
    """DCP's planner cannot tell the size of torch's sub-byte dtypes, and does not say of which tensor."""
    try:
        item.tensor_storage_size()
    except TypeError as error:
        assert item.tensor_data is not None
        dtype = item.tensor_data.properties.dtype
        raise InvalidArgumentError(f"state {item.index.fqn!r}: DCP cannot plan a tensor of {dtype}: {error}") from error


def _parts(item: WriteItem) -> Iterator[WriteItem]:
    data = item.tensor_data
    _check_dtype(item)
    plain = data is not None and data.properties.dtype in DTYPES and data.properties.layout is torch.strided
    if data is None or not plain or isinstance(item, _Cut):
        yield item
        return
    chunk = data.chunk
    pieces = cut(tuple(chunk.offsets), tuple(chunk.sizes), data.properties.dtype.itemsize, item.index.fqn)
    if len(pieces) == 1:
        yield item
        return
    for piece in pieces:
        part = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
        yield _Cut(
            index=MetadataIndex(item.index.fqn, piece.offsets),
            type=WriteItemType.SHARD,
            tensor_data=dataclasses.replace(data, chunk=part),
            original=item,
        )


def _tensor_of(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """What an item stands for, now."""
    key = item.index.fqn
    original = item.original if isinstance(item, _Cut) else None
    tensor = planner.resolve_data(original or item)
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"state {key!r}: the planner gives a {type(tensor).__name__}, not a tensor")
    check_device(key, tensor)
    tensor = tensor.detach()
    if original is not None:
        assert original.tensor_data is not None
        assert item.tensor_data is not None
        whole, part = original.tensor_data.chunk, item.tensor_data.chunk
        try:
            for dim, (begin, at, length) in enumerate(zip(whole.offsets, part.offsets, part.sizes, strict=True)):
                tensor = tensor.narrow(dim, at - begin, length)
        except Exception as error:
            raise InvalidArgumentError(
                f"state {key!r}: a {type(tensor).__name__} of {tensor.nbytes} bytes cannot be cut: {error}"
            ) from error
    return tensor


def _check_shard(item: WriteItem, tensor: torch.Tensor, whole: object) -> None:
    original = item.original if isinstance(item, _Cut) and item.original is not None else item
    assert original.tensor_data is not None
    assert item.tensor_data is not None
    chunk = original.tensor_data.chunk
    check_box(item.index.fqn, whole, tuple(chunk.offsets), tuple(chunk.sizes))
    if tensor.shape != item.tensor_data.chunk.sizes:
        raise InvalidArgumentError(
            f"state {item.index.fqn!r}: this rank's shard is planned as {tuple(item.tensor_data.chunk.sizes)}, and the "
            f"planner gives {tuple(tensor.shape)}"
        )


def _lay_out(entries: Sequence[_Entry], planner: SavePlanner) -> list[_Entry]:
    """Gives every entry its slot; returns, for each slot, the entry that fills it. Tied weights have one slot."""
    slots: list[_Entry] = []
    first: dict[Any, _Entry] = {}
    for entry in entries:
        same = first.setdefault((entry.memory, entry.spec), entry) if entry.memory is not None else entry
        if same is not entry and _are_tied(same.item, entry.item, planner):
            entry.slot = same.slot
        else:
            entry.slot = len(slots)
            slots.append(entry)
    return slots


def _are_tied(one: WriteItem, other: WriteItem, planner: SavePlanner) -> bool:
    """Asked while both tensors live: what a planner makes for each call may get the same memory in turn."""
    a, b = _tensor_of(one, planner), _tensor_of(other, planner)
    return bool(identity(a) == identity(b))


def _fill(image: SlotImage, slots: Sequence[_Entry], planner: SavePlanner) -> None:
    """A planner may make the tensors when they are asked for: only so many are held at once."""
    batch: list[tuple[int, torch.Tensor]] = []
    held = 0
    for entry in slots:
        if entry.spec is None:
            continue
        tensor = _tensor_of(entry.item, planner)
        if not is_raw(tensor) or (tensor.dtype, tuple(tensor.shape)) != entry.spec:
            raise InvalidArgumentError(f"state {entry.key!r}: the planner gives another tensor each time it is asked")
        if tensor.is_cuda:
            image.pin()
        if tensor.numel() and tensor.data_ptr() != image.image.address(entry.slot):
            batch.append((entry.slot, tensor))
            held += tensor.nbytes
        if held >= _BATCH_BYTES:
            image.copy(image.place(batch))
            batch, held = [], 0
    image.copy(image.place(batch))
    image.image.place_objects([entry.archive for entry in slots if entry.spec is None])


def _result(entry: _Entry, slot: _engine.Slot) -> WriteResult:
    return WriteResult(entry.item.index, slot.length, _StorageInfo(slot.file, slot.offset, slot.length))
