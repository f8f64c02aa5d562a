"""What the machine gives a trivial program: the floors that every figure is a ratio to.

Each function does its work once and returns seconds. They use the system calls directly, from Python threads that hold
no GIL while the kernel or memmove works, so the interpreter costs microseconds a block.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_HUGE = 2 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)


class Memory:
    """Anonymous memory, faulted in, with huge pages where they are to be had."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, (nbytes + _HUGE - 1) // _HUGE * _HUGE)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        ctypes.memset(self.address, 1, len(self._map))
        self.view = memoryview(self._map)


def _split(nbytes: int, threads: int, block: int) -> list[range]:
    """Ranges of [0, nbytes), one a thread, at multiples of `block`."""
    share = (nbytes // threads + block - 1) // block * block
    return [range(at, min(at + share, nbytes), block) for at in range(0, nbytes, share)]


def _in_threads(work: Callable[[range], None], parts: Iterable[range]) -> None:
    parts = list(parts)
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(work, parts))


def memcpy(target: Memory, source: Memory, threads: int) -> float:
    """Copies `source` over `target`; both are faulted in."""
    block = 8 << 20

    def copy(part: range) -> None:
        for at in part:
            ctypes.memmove(target.address + at, source.address + at, min(block, source.nbytes - at))

    begin = time.perf_counter()
    _in_threads(copy, _split(source.nbytes, threads, block))
    return time.perf_counter() - begin


def settle(place: Path) -> None:
    """Waits until what others left to the disk is done: writes, and discards of what was removed."""
    os.sync()
    device = place.stat().st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    before = ""
    for _ in range(100):
        now = stat.read_text() if stat.exists() else ""
        if now == before:
            return
        before = now
        time.sleep(0.2)


def write(path: Path, source: Memory, threads: int, block: int) -> float:
    """A new file with the bytes of `source`: fallocate, direct writes, fdatasync, and its directory's entry."""
    path.unlink(missing_ok=True)
    settle(path.parent)
    begin = time.perf_counter()
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _DIRECT, 0o644)
    os.posix_fallocate(file, 0, source.nbytes)

    def put(part: range) -> None:
        for at in part:
            end = min(at + block, source.nbytes)
            while at < end:
                at += os.pwrite(file, source.view[at : (end + 4095) // 4096 * 4096], at)

    _in_threads(put, _split(source.nbytes, threads, block))
    os.ftruncate(file, source.nbytes)
    os.fdatasync(file)
    os.close(file)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    return time.perf_counter() - begin


def read(path: Path, target: Memory, threads: int, *, direct: bool) -> float:
    """Reads the file into memory that is faulted in."""
    block = 4 << 20
    size = path.stat().st_size
    begin = time.perf_counter()
    file = os.open(path, os.O_RDONLY | (_DIRECT if direct else 0))

    def get(part: range) -> None:
        for at in part:
            end = min(at + block, size)
            while at < end:
                at += os.preadv(file, [target.view[at : (end + 4095) // 4096 * 4096]], at)

    _in_threads(get, _split(size, threads, block))
    os.close(file)
    return time.perf_counter() - begin


def drop_cache(paths: Iterable[Path]) -> None:
    """Makes the next read of these files come from the disk."""
    for path in paths:
        for file_path in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file_path.is_file():
                continue
            file = os.open(file_path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
