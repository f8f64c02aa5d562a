"""unbroken.UnbrokenReader: what torch.distributed.checkpoint reads with, in place of its FileSystemReader."""

from __future__ import annotations

import io
import math
import os
import uuid
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from unbroken.checkpoint._dcp_layout import check_box
from unbroken.checkpoint._foreign import local_path, open_directory
from unbroken.checkpoint._reader import Reading, Target
from unbroken.checkpoint._safe import loads

__all__ = ["UnbrokenReader"]

_BATCH_BYTES = 256 << 20


class UnbrokenReader(StorageReader):
    """Reads a checkpoint of torch.distributed.checkpoint from a directory: one of Unbroken or one of stock DCP.

        dcp.load(state, storage_reader=unbroken.UnbrokenReader(path))

    What Unbroken wrote (UnbrokenWriter's directory, or one step of a run) is verified against its checksums. Nothing in
    a checkpoint is run: objects that are more than plain values, tensors and NumPy arrays are refused by name, unless
    torch.serialization.add_safe_globals() allows their class.

    Raises NotFoundError where there is no complete checkpoint, DamagedError where it is not what was written,
    UnsupportedError where it holds what does not belong there, InvalidArgumentError where a tensor does not fit or the
    class of an object is not allowed. DCP wraps them in a CheckpointException, on all ranks. Objects are looked at
    before anything of the state changes; damage found in a tensor leaves the state partly loaded. What the checkpoint
    lacks is an error of DCP's planner, unless that is DefaultLoadPlanner(allow_partial_load=True).

    Threads: one load at a time through one reader.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = local_path(path)
        self._load_id = str(uuid.uuid4())
        self._opened: Reading | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None and os.fspath(checkpoint_id):
            self._path = local_path(checkpoint_id)
        self._load_id = str(uuid.uuid4())
        self._opened = None

    def read_metadata(self, *_: Any, **kwargs: Any) -> Metadata:
        """rank: what this rank has saved alone, with use_collectives=False."""
        self._opened = open_directory(self._path, kwargs.get("rank"))
        metadata = self._opened.metadata
        if not isinstance(metadata.storage_meta, StorageMeta):
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        return metadata

    # DCP looks for the name kwargs before it gives any.
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        reader = self._opened or open_directory(self._path)
        # All objects are looked at before anything of the state changes, and before a planner, which runs what they
        # say, sees one.
        objects = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        archives = reader.archives(list(dict.fromkeys(item.storage_index.fqn for item in objects)))
        for key, raw in archives.items():
            loads(key, raw)
        _check_targets(plan, getattr(planner, "state_dict", None))
        self._read_tensors(reader, plan, planner)
        for item in objects:
            planner.load_bytes(item, io.BytesIO(archives[item.storage_index.fqn]))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensors(self, reader: Reading, plan: LoadPlan, planner: LoadPlanner) -> None:
        """A planner may make the tensors when they are asked for: only so many are held at once."""
        batch: list[Target] = []
        held = 0
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                continue
            target = planner.resolve_tensor(item)
            if target.layout is torch.strided:  # copy_() gives others new memory, which a detached one would not share
                target = target.detach()
            batch.append((item, target))
            held += math.prod(item.lengths) * target.dtype.itemsize
            if held >= _BATCH_BYTES:
                _read_batch(reader, batch, planner)
                batch, held = [], 0
        _read_batch(reader, batch, planner)

    @property
    def checkpoint_id(self) -> str:
        """What is read."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(FileSystem.validate_checkpoint_id(checkpoint_id))


def _check_targets(plan: LoadPlan, state: object) -> None:
    """That DCP's plan puts things where they belong."""
    if not isinstance(state, dict):
        return
    for key in dict.fromkeys(item.dest_index.fqn for item in plan.items):
        tensor = state.get(key)
        if isinstance(tensor, DTensor):
            for chunk in tensor.__create_chunk_list__():  # type: ignore[no-untyped-call]
                check_box(key, tensor, tuple(chunk.offsets), tuple(chunk.sizes))


def _read_batch(reader: Reading, batch: list[Target], planner: LoadPlanner) -> None:
    with torch.no_grad():
        reader.fill(batch)
    for item, target in batch:
        planner.commit_tensor(item, target)
