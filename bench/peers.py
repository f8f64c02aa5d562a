"""The peers: what people save and load checkpoints with today, each as it comes and, where that differs, at its best.

All are driven with one directory or file that is replaced by the next save. A save counts as durable when its files are
synced: what does not sync by itself is synced here, on its time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ours import FINISHED, Flight, measure_save
from rows import available_bytes, say
from state import copy_into, nbytes_of, tensors
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

_WRITERS = 2


def sync(path: Path) -> None:
    """Makes a file, or all that is below a directory, survive a loss of power."""
    inside = [*path.rglob("*"), path] if path.is_dir() else [path]
    for one in [*inside, path.parent]:
        handle = os.open(one, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


class Peer:
    """One way to save and load. `name` is the column."""

    name = ""
    copies = 0  # of the state, that it holds in memory between saves or makes during one

    def __init__(self, place: Path) -> None:
        self.path = place / self.name.replace(" ", "-").replace(",", "")

    def clear(self) -> None:
        """Removes the save before, which is no part of the next one's time."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)

    def prepare(self, state: dict[str, Any]) -> None:
        """What it does once before its first save."""

    def begin(self, state: dict[str, Any]) -> Flight:
        """Returns when the state may change again."""
        raise NotImplementedError

    def load(self, target: dict[str, Any]) -> None:
        """Into the tensors of `target`."""
        raise NotImplementedError

    def save(self, state: dict[str, Any]) -> tuple[float, float]:
        self.clear()
        return measure_save(lambda: self.begin(state), self.path.parent)

    def close(self) -> None:
        """Gives back what it holds."""


class TorchSave(Peer):
    name = "torch.save"

    def begin(self, state: dict[str, Any]) -> Flight:
        torch.save(state, self.path)
        sync(self.path)
        return FINISHED

    def load(self, target: dict[str, Any]) -> None:
        copy_into(target, torch.load(self.path, weights_only=True))


class Safetensors(Peer):
    name = "safetensors"
    copies = 1

    def begin(self, state: dict[str, Any]) -> Flight:
        from safetensors.torch import save_file

        save_file(tensors(state), self.path)
        sync(self.path)
        return FINISHED

    def load(self, target: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        found = load_file(self.path)
        for key, tensor in tensors(target).items():
            tensor.copy_(found[key])


class Dcp(Peer):
    """dcp.save and dcp.load with two writer threads; its writer syncs each file."""

    name = "dcp"
    no_dist = True

    def writer(self) -> Any:
        return dcp.FileSystemWriter(self.path, thread_count=_WRITERS)

    def begin(self, state: dict[str, Any]) -> Flight:
        dcp.save(state, storage_writer=self.writer(), no_dist=self.no_dist)
        return FINISHED

    def load(self, target: dict[str, Any]) -> None:
        dcp.load(target, storage_reader=dcp.FileSystemReader(self.path), no_dist=self.no_dist)


class DcpAsync(Dcp):
    """dcp.async_save as it comes: a new copy of the state for every save."""

    name = "dcp async"
    copies = 1

    def begin(self, state: dict[str, Any]) -> Flight:
        future = dcp.async_save(state, storage_writer=self.writer(), no_dist=self.no_dist)
        assert isinstance(future, Future)
        return Flight(wait=future.result, done=future.done)


class DcpReused(Dcp):
    """dcp.async_save with one DefaultStager for all saves, which stages in a thread of its own."""

    name = "dcp async reused"
    copies = 1
    shared = False
    kind = AsyncCheckpointerType.THREAD

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.shared,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )

    def begin(self, state: dict[str, Any]) -> Flight:
        response = dcp.async_save(
            state,
            storage_writer=self.writer(),
            async_stager=self._stager,
            async_checkpointer_type=self.kind,
            no_dist=self.no_dist,
        )
        assert isinstance(response, AsyncSaveResponse)
        response.staging_completion.result()
        return Flight(wait=response.upload_completion.result, done=response.upload_completion.done)

    def close(self) -> None:
        self._stager.close()


class DcpProcess(DcpReused):
    """The same, staged in shared memory and written by a process of its own."""

    name = "dcp async process"
    shared = True
    kind = AsyncCheckpointerType.PROCESS

    def prepare(self, state: dict[str, Any]) -> None:
        del state
        # The process is started by the first save, which needs a process group; later ones do not.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        try:
            with _quiet():
                self.begin({"step": torch.zeros(1)}).wait()
        finally:
            dist.destroy_process_group()


class TorchCheckpointing(Peer):
    """torch_checkpointing with prewarmed staging in shared memory, two threads, and a process that writes.

    Its direct I/O fails on ext4 (EINVAL at a file's unaligned end), so it writes through the page cache; it syncs
    nothing, so its files are synced when it has written them.
    """

    name = "torch_checkpointing"
    copies = 1

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._manager = CheckpointManager(
            CheckpointManager.Config(
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                save=AsyncCheckpointSaverConfig(writer_config=CheckpointWriterConfig(file_write_max_threads=_WRITERS)),
            )
        )

    def prepare(self, state: dict[str, Any]) -> None:
        self._manager.prewarm_staging(state)

    def begin(self, state: dict[str, Any]) -> Flight:
        future = self._manager.save(str(self.path), state)
        assert future is not None
        with self._manager.lock():  # free when the state may change again
            pass

        def wait() -> None:
            future.result()
            sync(self.path)

        return Flight(wait=wait, done=future.done)

    def load(self, target: dict[str, Any]) -> None:
        self._manager.load(str(self.path), into=target)

    def close(self) -> None:
        self._manager.close()


_NEEDS = {Safetensors: "safetensors", TorchCheckpointing: "torch_checkpointing"}
SYNCHRONOUS: tuple[type[Peer], ...] = (TorchSave, Safetensors, Dcp)
ASYNCHRONOUS: tuple[type[Peer], ...] = (DcpAsync, DcpReused, DcpProcess, TorchCheckpointing)
# One per way to read: the asynchronous ones of DCP write what DCP writes.
LOADING: tuple[type[Peer], ...] = (TorchSave, Safetensors, Dcp, TorchCheckpointing)


def open_peers(kinds: tuple[type[Peer], ...], place: Path, state: dict[str, Any], notes: list[str]) -> list[Peer]:
    """Those that can be measured here; for each that cannot, a line in `notes` and to whoever waits says why."""
    peers: list[Peer] = []
    room = available_bytes() - (2 << 30)
    for kind in kinds:
        needed = kind.copies * nbytes_of(state)
        module = _NEEDS.get(kind)
        problem = ""
        if module is not None and importlib.util.find_spec(module) is None:
            problem = f"{module} is not installed (pip install '.[bench]')"
        elif needed > room:
            problem = f"it needs {needed / 2**30:.1f} GiB more memory and {max(room, 0) / 2**30:.1f} GiB can be spared"
        else:
            try:
                peer = kind(place)
                peer.prepare(state)
                peers.append(peer)
                room -= needed
            except Exception as error:  # noqa: BLE001  # a peer that does not work here is no reason to measure nothing
                problem = f"{type(error).__name__}: {error}"
        if problem:
            note(notes, f"peer {kind.name} is left out at {nbytes_of(state) / 2**20:.0f} MiB: {problem}")
    return peers


def drop_failed(peers: list[Peer], peer: Peer, error: Exception, notes: list[str]) -> None:
    """A peer that fails in a round is measured no more."""
    peers.remove(peer)
    note(notes, f"peer {peer.name} is left out from here on: {type(error).__name__}: {error}")


def note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)
        say(text)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A process that is started here does not write its log over the bench's progress."""
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
