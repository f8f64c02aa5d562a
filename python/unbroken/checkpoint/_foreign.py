"""Checkpoints in a directory that is named: those of stock DCP, and those of Unbroken without looking at a run.

Stock DCP's have no checksums: what can be checked is that every file is there and long enough, and that nothing in it
is run.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import _create_file_view

from unbroken import _engine
from unbroken.checkpoint._reader import CheckpointReader, Reading, Target, put, tensor_in
from unbroken.errors import DamagedError, NotFoundError, UnsupportedError

__all__ = ["MARKER", "ForeignReader", "local_path", "open_directory"]

MARKER = ".metadata"
_MANIFEST = "manifest.json"
_METADATA_BYTES = 1 << 30


class ForeignReader(Reading):
    """A checkpoint of stock DCP in a local directory."""

    def __init__(self, directory: str, raw_metadata: bytes) -> None:
        super().__init__(directory, raw_metadata)
        self._directory = directory
        self._transforms = _StorageReaderTransforms()

    def archives(self, keys: Sequence[str]) -> dict[str, bytes | memoryview]:
        infos = {key: self._info(MetadataIndex(key)) for key in keys}
        found: dict[str, bytes | memoryview] = {}
        for name, some in _by_file(infos.items()):
            with self._open(name) as file:
                for key, info in some:
                    with self._stream(key, file, info) as stream:
                        found[key] = stream.read(-1)
        return {key: found[key] for key in keys}

    def fill(self, targets: Iterable[Target], *, alone: bool | None = None) -> None:  # noqa: ARG002  # files of Python's
        placed = [(one, self._info(one[0].storage_index)) for one in targets]
        with torch.no_grad():
            for name, some in _by_file(placed):
                with self._open(name) as file:
                    self._fill(file, some)

    def _fill(self, file: IO[bytes], targets: list[tuple[Target, _StorageInfo]]) -> None:
        read: tuple[int, torch.Tensor] | None = None  # the last one: what is cut anew is asked for piece by piece
        for (item, target), info in targets:
            key = item.storage_index.fqn
            if 0 in item.lengths:
                continue
            if read is None or read[0] != info.offset:
                with self._stream(key, file, info) as stream:
                    read = (info.offset, tensor_in(key, stream))
            put(self.attempt, item, target, read[1])

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        """A file of the checkpoint's own directory: no path, no link."""
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise UnsupportedError(
                f"read {self._directory}: .metadata names the file {name!r}, which is none of this directory; refused"
            )
        path = os.path.join(self._directory, name)
        try:
            directory = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # O_NONBLOCK: a pipe must not keep us waiting.
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=directory)
            finally:
                os.close(directory)
        except FileNotFoundError:
            raise DamagedError(f"read {path}: .metadata names it, and it is not there") from None
        except OSError as error:
            link = os.path.islink(path)
            why = "it is a symbolic link, which is not followed" if link else str(error)
            raise UnsupportedError(f"read {path}: {why}") from error
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise UnsupportedError(f"read {path}: it is not a regular file")
        with os.fdopen(file, "rb") as opened:
            yield opened

    @contextmanager
    def _stream(self, key: str, file: IO[bytes], info: _StorageInfo) -> Iterator[IO[bytes]]:
        size = os.fstat(file.fileno()).st_size
        if info.offset + info.length > size:
            raise DamagedError(
                f"read {os.path.join(self._directory, info.relative_path)}: {key!r} is said to end at byte "
                f"{info.offset + info.length}; the file has {size}"
            )
        raw = cast(IO[bytes], _create_file_view(cast(io.IOBase, file), info.offset, info.length))
        descriptors = info.transform_descriptors or ()
        try:
            stream = self._transforms.transform_load_stream(cast(Any, None), descriptors, raw)
        except (ValueError, TypeError, AttributeError) as error:
            raise UnsupportedError(f"read {key!r}: it was saved through {list(descriptors)!r}: {error}") from error
        yield stream if stream.seekable() else io.BytesIO(stream.read(-1))


def _by_file(
    placed: Iterable[tuple[Any, _StorageInfo]],
) -> list[tuple[str, list[tuple[Any, _StorageInfo]]]]:
    files: dict[str, list[tuple[Any, _StorageInfo]]] = {}
    for one, info in placed:
        files.setdefault(info.relative_path, []).append((one, info))
    return [(name, sorted(some, key=lambda pair: pair[1].offset)) for name, some in files.items()]


def local_path(path: str | os.PathLike[str]) -> str:
    return os.fspath(path).removeprefix("file://")


def open_directory(path: str, rank: int | None = None) -> Reading:
    """The checkpoint in a directory. rank: what this rank has saved alone.

    Raises NotFoundError where none is complete, DamagedError, UnsupportedError.
    """
    store = _engine.open_store(path)
    names = set(store.list(""))
    own = "" if rank is None else f"__{rank}"
    if rank is not None and MARKER in names:
        raise DamagedError(
            f"read {path}: {MARKER} is there and cannot be read; what rank {rank} may have saved alone beside it is "
            "another checkpoint"
        )
    if own + MARKER not in names:
        raise NotFoundError(f"read {path}: no checkpoint, as there is no {own}{MARKER}; {_hint(names)}")
    manifest = f"{own}.{_MANIFEST}" if own else _MANIFEST
    if manifest not in names:
        return ForeignReader(store.url, store.read(own + MARKER, _METADATA_BYTES))
    try:
        return CheckpointReader(store, "", only_rank=rank)
    except DamagedError as error:
        raise DamagedError(
            f"{error}. If stock DCP wrote over a checkpoint of Unbroken here, remove {manifest} to read it as stock's"
        ) from error


def _hint(names: set[str]) -> str:
    if "generations" in names:
        return "it is the root of a run: give one of its step directories, or use unbroken.load()"
    if any(name.startswith("__") and name.endswith(MARKER) for name in names):
        return "each rank has saved alone here (use_collectives=False)"
    if any(name.endswith(".distcp") for name in names):
        return "there are shard files, of a save that did not finish"
    return "give the directory that it was saved to"
