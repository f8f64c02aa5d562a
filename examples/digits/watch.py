"""Sees a run from outside: its root by inotify, its ledgers as they grow, its processes in /proc. Linux only."""

import ctypes
import errno
import json
import os
import re
import select
import signal
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Attempt", "LedgerTail", "RootWatch", "alive", "descendants", "kill", "ranks_of"]

_NAME = re.compile(r"step-(\d+)-g(\d+)-[0-9a-f]{8}")
_IN_MOVED_TO, _IN_CREATE, _IN_DELETE, _IN_Q_OVERFLOW = 0x80, 0x100, 0x200, 0x4000
_HEADER = struct.Struct("iIII")


@dataclass
class Attempt:
    """One try to save one step, as its directory shows it."""

    name: str
    step: int
    generation: int
    began: float  # seconds, time.monotonic
    files: set[str] = field(default_factory=set)  # all names that ever appeared in it
    committed: float | None = None  # when `.metadata` appeared
    removed: bool = False  # the directory is gone again: given up, or retired

    @property
    def seconds(self) -> float:
        return (self.committed or time.monotonic()) - self.began


class RootWatch:
    """Every attempt under a run root and every file of it, told by the kernel the moment that it appears."""

    def __init__(self, root: Path) -> None:
        self.attempts: dict[str, Attempt] = {}
        self._root = root
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._check(self._fd, "inotify_init1")
        self._paths: dict[int, str] = {}
        self._add("")
        self._rescan()

    def close(self) -> None:
        os.close(self._fd)

    def wait(self, seconds: float) -> None:
        """Takes in what has happened; waits at most that long for something to happen."""
        if not select.select([self._fd], [], [], max(0.0, seconds))[0]:
            return
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        place = 0
        while place < len(data):
            watch, mask, _, length = _HEADER.unpack_from(data, place)
            place += _HEADER.size
            name = data[place : place + length].rstrip(b"\0").decode()
            place += length
            if mask & _IN_Q_OVERFLOW:
                self._rescan()
            elif watch not in self._paths or not name:
                continue  # the kernel's word that a watched directory is gone
            elif not mask & _IN_DELETE:
                self._appeared(self._paths[watch], name)
            elif self._paths[watch] == "" and name in self.attempts:
                self.attempts[name].removed = True

    def _add(self, path: str) -> bool:
        full = os.fsencode(self._root / path)
        watch = self._libc.inotify_add_watch(self._fd, full, _IN_CREATE | _IN_MOVED_TO | _IN_DELETE)
        if watch < 0 and ctypes.get_errno() == errno.ENOENT:
            return False
        self._check(watch, f"inotify_add_watch {os.fsdecode(full)}")
        self._paths[watch] = path
        return True

    def _appeared(self, directory: str, name: str) -> None:
        if directory:
            attempt = self.attempts[directory]
            attempt.files.add(name)
            if name == ".metadata" and attempt.committed is None:
                attempt.committed = time.monotonic()
        elif (match := _NAME.fullmatch(name)) and name not in self.attempts:
            self.attempts[name] = Attempt(name, int(match[1]), int(match[2]), time.monotonic())
            if self._add(name):
                self._list(name)  # what came before the watch was there

    def _rescan(self) -> None:
        self._list("")
        for name in list(self.attempts):
            self._list(name)

    def _list(self, directory: str) -> None:
        try:
            names = os.listdir(self._root / directory)
        except FileNotFoundError:
            return
        for name in names:
            self._appeared(directory, name)

    @staticmethod
    def _check(result: int, action: str) -> None:
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{action}: {os.strerror(code)}")


class LedgerTail:
    """How far each rank is, from the growing ledgers."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.at: list[tuple[int, int]] = [(0, 0)] * ranks  # (generation, step) of each rank's last line
        self.first_steps: dict[int, int] = {}  # generation: the first step that it trained
        self._paths = [directory / f"rank-{rank}.jsonl" for rank in range(ranks)]
        self._read = [0] * ranks

    @property
    def generation(self) -> int:
        return max(generation for generation, _ in self.at)

    @property
    def step(self) -> int:
        """The last step that all ranks have trained in the newest generation; 0 while some rank has yet to begin."""
        return min(step if generation == self.generation else 0 for generation, step in self.at)

    def poll(self) -> bool:
        """True when a rank has moved on."""
        moved = False
        for rank, path in enumerate(self._paths):
            try:
                with path.open("rb") as file:
                    file.seek(self._read[rank])
                    data = file.read()
            except FileNotFoundError:
                continue
            whole = data[: data.rfind(b"\n") + 1]
            if whole:
                lines = [json.loads(line) for line in whole.splitlines()]
                for line in lines:
                    self.first_steps.setdefault(line["generation"], line["step"])
                self.at[rank] = (lines[-1]["generation"], lines[-1]["step"])
                self._read[rank] += len(whole)
                moved = True
        return moved


def descendants(pid: int) -> list[int]:
    """All living processes below that one, parents first."""
    below: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent(int(entry))):
            below.setdefault(parent, []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        children = below.get(queue.pop(0), [])
        found += children
        queue += children
    return found


def ranks_of(torchrun: int) -> dict[int, int]:
    """Rank: its process, for those that torchrun has started."""
    found = {}
    for pid in descendants(torchrun):
        if _parent(pid) == torchrun:
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found.update({int(entry[5:]): pid for entry in environment if entry.startswith(b"RANK=")})
    return found


def alive(pid: int) -> bool:
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; [] when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0
