"""What the machine gives a trivial program: the floors that every figure is a ratio to.

Each function does its work once and returns seconds. They use the system calls directly, from Python threads that hold
no GIL while the kernel or memmove works, so the interpreter costs microseconds a block.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


def write(path: Path, source: Memory, threads: int, block: int, ready: Callable[[], None] | None = None) -> float:
    """A new file with the bytes of `source`: fallocate, direct writes, fdatasync, and its directory's entry.

    `ready` is called when the old file is gone and the disk is quiet.
    """
    path.unlink(missing_ok=True)
    settle(path.parent)
    if ready is not None:
        ready()
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


def warm_cache(paths: Iterable[Path]) -> None:
    """Makes the next read of these files come from memory."""
    for path in paths:
        for file_path in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file_path.is_file():
                with file_path.open("rb", buffering=0) as file:
                    while file.read(4 << 20):
                        pass


class Best:
    """The least of several ways to do the same: all are tried in two rounds, then the best two."""

    def __init__(self, measure: Callable[..., float], choices: Sequence[tuple[Any, ...]]) -> None:
        self._measure = measure
        self._choices = list(choices)
        self._found: dict[tuple[Any, ...], float] = {}
        self._rounds = 0

    def __call__(self) -> float:
        if self._rounds == 2:
            self._choices = sorted(self._choices, key=self._found.__getitem__)[:2]
        self._rounds += 1
        seconds = {choice: self._measure(*choice) for choice in self._choices}
        for choice, value in seconds.items():
            self._found[choice] = min(value, self._found.get(choice, value))
        return min(seconds.values())


def best_memcpy(sink: Memory, source: Memory) -> Best:
    return Best(lambda threads: memcpy(sink, source, threads), [(1,), (2,)])


def best_write(path: Path, source: Memory) -> Best:
    return Best(
        lambda threads, block: write(path, source, threads, block),
        [(threads, block) for threads in (1, 2) for block in (4 << 20, 16 << 20)],
    )


def best_read(path: Path, sink: Memory, *, cold: bool) -> Best:
    def measure(threads: int, direct: bool) -> float:
        (drop_cache if cold else warm_cache)([path])
        return read(path, sink, threads, direct=direct)

    return Best(measure, [(threads, direct) for threads in (1, 2) for direct in ((True, False) if cold else (False,))])
