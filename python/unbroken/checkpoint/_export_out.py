"""The directory that an export goes to.

1. The directory is locked, and what a killed export has left in it is removed.
2. Every file is written under a temporary name and made durable, the index too: until all are, nothing changes for who
   reads the directory.
3. The index and the single file of an older export are removed, durably; then its shards: no reader can take a mixture
   for a whole.
4. The files get their names, the index last, when the names of what it names are durable.

Hugging Face tools read what model.safetensors or the index names, and nothing else: so a kill at any point leaves the
old export, none, or the new one. A kill within 3 or 4 leaves temporary names, which tell the next export that shards
without an index are of no use to anyone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from unbroken.checkpoint._safetensors import INDEX, SINGLE, is_name_of_export
from unbroken.errors import (
    AlreadyExistsError,
    Error,
    InvalidArgumentError,
    IoError,
    NoSpaceError,
    PermissionDeniedError,
    UnavailableError,
)

__all__ = ["Out", "check_out"]

_TEMPORARY = ".tmp-unbroken-export-"
_CHECKPOINT = (".metadata", "manifest.json")
_KINDS: dict[int | None, type[Error]] = {
    errno.ENOSPC: NoSpaceError,
    errno.EDQUOT: NoSpaceError,
    errno.EACCES: PermissionDeniedError,
    errno.EPERM: PermissionDeniedError,
    errno.EROFS: PermissionDeniedError,
    errno.ENOTDIR: InvalidArgumentError,
}


def _failed(what: str, error: OSError) -> Error:
    return _KINDS.get(error.errno, IoError)(f"export: {what}: {error.strerror}")


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _failed(f"look into {path}", error) from error


def _is_temporary(name: str) -> bool:
    return name.startswith(_TEMPORARY)


def check_out(path: str, *, overwrite: bool) -> None:
    """That an export may go there. Changes nothing."""
    if path.endswith(".safetensors"):
        raise InvalidArgumentError(f"export to {path}: give a directory; the files in it have names of their own")
    names = set(_names(path))
    if not names.isdisjoint(_CHECKPOINT):
        raise InvalidArgumentError(f"export to {path}: it is the directory of a checkpoint; give another one")
    there = sorted(name for name in names if is_name_of_export(name))
    whole = not names.isdisjoint((SINGLE, INDEX))
    left = any(map(_is_temporary, names)) and not whole
    if there and not left and not overwrite:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise AlreadyExistsError(
            f"export to {path}: an export is there already ({there[0]}{more}); give another directory, or "
            "overwrite=True to replace it"
        )


class Out:
    """An export on its way. Used in a with: what is not published by its end is removed."""

    def __init__(self, path: str, *, overwrite: bool) -> None:
        self._path = path
        self._overwrite = overwrite
        self._made: list[str] = []  # directories, the outermost first
        self._directory = -1
        self._written: list[str] = []
        self._named: list[str] = []
        self._mark = f"{_TEMPORARY}{secrets.token_hex(4)}-"

    def __enter__(self) -> Self:
        check_out(self._path, overwrite=self._overwrite)
        try:
            self._make()
            self._directory = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._lock()
            check_out(self._path, overwrite=self._overwrite)  # another may have finished in between
            self._clear()
        except BaseException as error:
            self._end()
            if isinstance(error, OSError):
                raise _failed(f"open {self._path}", error) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @contextlib.contextmanager
    def file(self, name: str, left: int) -> Iterator[Callable[[bytes | memoryview], None]]:
        """A new file that will get this name, durable at the end of the with: what appends to it. left: the bytes of
        the export that are still to be written, for who is told that they have no room."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        what = f"write {name} in {self._path}"
        try:
            file = os.open(self._mark + name, flags, 0o666, dir_fd=self._directory)
        except OSError as error:
            raise _failed(what, error) from error
        self._written.append(name)
        written = 0

        def append(data: bytes | memoryview) -> None:
            nonlocal written
            view = memoryview(data)
            try:
                while view:
                    count = os.write(file, view)
                    written += count
                    view = view[count:]
            except OSError as error:
                raise _failed(what + self._room(error, left - written), error) from error

        try:
            yield append
            try:
                os.fsync(file)
            except OSError as error:
                raise _failed(what + self._room(error, left - written), error) from error
        finally:
            os.close(file)

    def _room(self, error: OSError, left: int) -> str:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return ""
        place = os.statvfs(self._directory)
        return f" ({left} bytes of the export were still to be written, {place.f_bavail * place.f_frsize} are free)"

    def publish(self) -> None:
        """Gives all that was written its name, the last one last."""
        try:
            os.fsync(self._directory)
            old = [name for name in _names(self._path) if is_name_of_export(name)]
            self._remove(*(name for name in old if name in (SINGLE, INDEX)))
            self._remove(*(name for name in old if name not in (SINGLE, INDEX)))
            for name in self._written[:-1]:
                self._name(name)
            os.fsync(self._directory)
            self._name(self._written[-1])
            os.fsync(self._directory)
        except OSError as error:
            raise _failed(f"name the files in {self._path}", error) from error
        self._written, self._named, self._made = [], [], []

    def _name(self, name: str) -> None:
        self._named.append(name)
        os.rename(self._mark + name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def _remove(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._directory)
        os.fsync(self._directory)

    def _clear(self) -> None:
        """Removes what a killed export has left; the temporary names last: they tell that the rest is such."""
        names = _names(self._path)
        left = list(filter(_is_temporary, names))
        if left and SINGLE not in names and INDEX not in names:
            self._remove(*filter(is_name_of_export, names))
        if left:
            self._remove(*left)

    def _make(self) -> None:
        missing = []
        path = os.path.abspath(self._path)
        while not os.path.lexists(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
                self._made.append(path)
            parent = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(parent)
            finally:
                os.close(parent)

    def _lock(self) -> None:
        """Ends with the process. Where a file system knows no locks, two exports at once are the user's to avoid."""
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnavailableError(
                f"export to {self._path}: another export is writing there; wait for its end, or give another directory"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF):
                raise

    def _end(self) -> None:
        """Removes what was not published; what stays for some error is hidden, and the next export removes it."""
        if self._directory >= 0:
            # Of what has its name already the last first: it would make the rest look whole.
            for name in [*reversed(self._named), *(self._mark + name for name in self._written)]:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._directory)
            os.close(self._directory)
            self._directory = -1
        with contextlib.suppress(OSError):
            for path in reversed(self._made):
                os.rmdir(path)
