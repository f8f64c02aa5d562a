"""DCP's `.metadata`: reading it without running what it says."""

from __future__ import annotations

import contextlib
import enum
import gc
import io
import json
import pathlib
import pickle
import platform
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint import filesystem, metadata

from unbroken import _engine
from unbroken.errors import DamagedError, UnsupportedError

__all__ = ["is_plain", "no_collection", "read_metadata", "versions", "write_metadata"]

_CLASSES: dict[tuple[str, str], Any] = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        sharded.TensorProperties,  # what older versions of DCP have in their metadata
        sharded.MEM_FORMAT_ENCODING,
        torch.Size,
        OrderedDict,
    )
}
# DCP notes the path that it saved to. A pure path touches no file.
_CLASSES |= {
    (module, name): pure
    for module in ("pathlib", "pathlib._local")
    for name, pure in (
        ("PosixPath", pathlib.PurePosixPath),
        ("PurePosixPath", pathlib.PurePosixPath),
        ("WindowsPath", pathlib.PureWindowsPath),
        ("PureWindowsPath", pathlib.PureWindowsPath),
    )
}
_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)


def _layout(name: object) -> torch.layout:
    """What torch.serialization._get_layout, by which a layout is pickled, gives for "torch.strided" and the like."""
    value = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(value, torch.layout):
        raise DamagedError(f"read .metadata: there is no layout {name!r}")
    return value


_CLASSES["torch.serialization", "_get_layout"] = _layout


def _member(kind: object, name: object) -> enum.Enum:
    """What getattr, by which Python 3.11.0 to 3.11.3 pickle the member of an enumeration, gives for one."""
    if not (isinstance(kind, enum.EnumMeta) and isinstance(name, str) and name in kind.__members__):
        raise UnsupportedError(f"read .metadata: it wants {name!r} of {kind!r}, which does not belong there; refused")
    return kind.__members__[name]


_CLASSES["builtins", "getattr"] = _CLASSES["__builtin__", "getattr"] = _member  # the latter in old protocols


class _Unpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata and no other: a pickle that names anything else is refused unread."""

    def find_class(self, module: str, name: str) -> Any:
        known = _CLASSES.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), _TORCH_VALUES):
            return getattr(torch, name)
        raise UnsupportedError(f"read .metadata: it names {module}.{name}, which does not belong there; refused")

    def persistent_load(self, pid: Any) -> Any:
        raise UnsupportedError(f"read .metadata: it names the outside object {pid!r}, which does not belong there")


_pauses = 0
_pauses_lock = threading.Lock()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """While it lasts, no search for cycles: among the objects of a large plan there are none, and each search looks at
    all of them anew, with the GIL held. Any thread."""
    global _pauses
    with _pauses_lock:
        ours = _pauses > 0 or gc.isenabled()  # otherwise the user has turned it off, and it stays so
        _pauses += ours
        if ours:
            gc.disable()
    try:
        yield
    finally:
        with _pauses_lock:
            _pauses -= ours
            if ours and _pauses == 0:
                gc.enable()


def read_metadata(raw: bytes) -> metadata.Metadata:
    """The Metadata in `raw`. UnsupportedError when it holds what does not belong there, DamagedError if it is none."""
    try:
        with no_collection():
            found = _Unpickler(io.BytesIO(raw)).load()
    except UnsupportedError:
        raise
    except Exception as error:  # whatever an unpickler stumbles over
        raise DamagedError(f"read .metadata: {type(error).__name__}: {error}") from error
    if type(found) is not metadata.Metadata or not isinstance(found.state_dict_metadata, dict):
        raise DamagedError("read .metadata: it is not the metadata of a DCP checkpoint")
    return found


def write_metadata(value: metadata.Metadata) -> bytes:
    parts: list[bytes] = []

    class Parts:
        # In Python, so that the interpreter looks after each part whether another thread waits for the GIL: the whole
        # takes seconds where there are many ranks.
        def write(self, part: Any) -> int:
            parts.append(bytes(part))
            return len(part)

    pickle.Pickler(Parts()).dump(value)
    return b"".join(parts)


def is_plain(value: Any) -> bool:
    """Whether read_metadata() would read it as part of the metadata."""
    if isinstance(value, dict) and all(
        type(key) is str and type(path) is tuple and all(type(part) in (str, int) for part in path)
        for key, path in value.items()
    ):
        return True  # what DCP's own planner has there
    try:
        _Unpickler(io.BytesIO(pickle.dumps(value))).load()
    except Exception:  # noqa: BLE001  # whatever it is, it cannot be read
        return False
    return True


def versions() -> str:
    """For the manifest: what wrote it, as JSON."""
    return json.dumps({"unbroken": _engine.version, "torch": torch.__version__, "python": platform.python_version()})
