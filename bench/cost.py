"""What saving and loading cost beside time: CPU seconds, bytes and calls that pass the kernel, the GIL, the first step.

Peers that write in a process of their own are left out: what that process uses is not this one's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import floors
import torch
from ours import Ours
from peers import SYNCHRONOUS, DcpReused, drop_failed, note, open_peers
from rows import Effort, Row, say
from stall import Stall, beside_python
from state import adam, nbytes_of

import unbroken

_GB = 1e9
_ROUNDS = 3
_EVENTS = ("instructions", "cache-misses")
_LINE_BYTES = 64  # of a cache


class _Usage:
    """CPU seconds, bytes and calls of this process, from its making on."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> dict[str, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return {
            "cpu": usage.ru_utime + usage.ru_stime,
            "moved": float(io["rchar"]) + float(io["wchar"]),
            "calls": float(io["syscr"]) + float(io["syscw"]),
        }

    def so_far(self) -> dict[str, float]:
        now = self._now()
        return {name: now[name] - self._start[name] for name in now}


def _used(work: Callable[[], Any]) -> dict[str, float]:
    usage = _Usage()
    work()
    return usage.so_far()


class _Costs:
    """The rows of saving or of loading."""

    def __init__(self, size: str, verb: str, nbytes: int) -> None:
        self._nbytes = nbytes
        self.cpu = Row(f"{size}: CPU for a GB {verb} (x the floor's)", unit="s")
        self.moved = Row(f"{size}: bytes through system calls, for a byte {verb}", unit="", exact=True, absolute=True)
        self.calls = Row(f"{size}: reads and writes for a GB {verb}", unit="", exact=True, absolute=True)
        self.gil = Row(f"{size}: GIL held at most, {verb} (floor: beside a Python loop)", unit="ms", absolute=True)
        self.rows = [self.cpu, self.moved, self.calls, self.gil]

    def add(self, ours: dict[str, float], floor: dict[str, float]) -> None:
        for row, one, base in zip(self.rows, self._figures(ours), self._figures(floor), strict=False):
            row.add(one, base)

    def add_peer(self, name: str, used: dict[str, float]) -> None:
        for row, one in zip(self.rows, self._figures(used), strict=False):
            row.add_peer(name, one)

    def _figures(self, used: dict[str, float]) -> tuple[float, ...]:
        a_gb = self._nbytes / _GB
        return used["cpu"] / a_gb, used["moved"] / self._nbytes, used["calls"] / a_gb


def measure(place: Path, nbytes: int, effort: Effort, notes: list[str]) -> list[Row]:
    place.mkdir(parents=True, exist_ok=True)
    state, target = adam(nbytes), adam(nbytes)
    nbytes = nbytes_of(state)
    size = f"{nbytes / 2**20:.0f} MiB"
    source, sink = floors.Memory(nbytes), floors.Memory(nbytes)
    plain = place / "floor"
    ours = Ours(place / "ours", state)
    ours.prepare()
    peers = open_peers((*SYNCHRONOUS, DcpReused), place, state, notes)
    for peer in peers:
        peer.save(state)
    saved, loaded = _Costs(size, "saved", nbytes), _Costs(size, "loaded", nbytes)

    def save_bare() -> None:
        floors.memcpy(sink, source, 1)
        floors.write(plain, source, 1, 16 << 20)

    # These figures hardly vary, and what peers do beside a spinning thread takes them many times as long.
    effort = replace(effort, least=min(effort.least, _ROUNDS), most=_ROUNDS)
    for number in effort.rounds([saved.cpu, loaded.cpu], f"{size}: cost"):
        floor = _used(save_bare)
        saved.add(_used(ours.save), floor)
        floors.warm_cache([plain, ours.path])
        floor = _used(lambda: floors.read(plain, sink, 1, direct=False))
        loaded.add(_used(lambda: ours.load(target)), floor)
        for costs, work in ((saved, ours.save), (loaded, lambda: ours.load(target))):
            costs.gil.add(1e3 * _stall(work), 1e3 * beside_python(0.5))
        for peer in list(peers):
            try:
                saved.add_peer(peer.name, _used(lambda peer=peer: peer.save(state)))  # type: ignore[misc]
                floors.warm_cache([peer.path])
                loaded.add_peer(peer.name, _used(lambda peer=peer: peer.load(target)))  # type: ignore[misc]
                if number == 0:
                    saved.gil.add_peer(peer.name, 1e3 * _stall(lambda peer=peer: peer.save(state)))  # type: ignore[misc]
                    loaded.gil.add_peer(peer.name, 1e3 * _stall(lambda peer=peer: peer.load(target)))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001  # a peer that fails is no reason to measure nothing
                drop_failed(peers, peer, error, notes)
    _count_events(size, nbytes, {"save": ours.save, "load": lambda: ours.load(target), "bare save": save_bare}, notes)
    for peer in peers:
        peer.close()
    ours.close()
    return [*saved.rows, *loaded.rows]


def _stall(work: Callable[[], Any]) -> float:
    with Stall() as stall:
        work()
    return stall.seconds


def _count_events(size: str, nbytes: int, works: dict[str, Callable[[], Any]], notes: list[str]) -> None:
    """Instructions and cache misses by `perf stat`, where it is there and the machine has counters."""
    if shutil.which("perf") is None:
        note(notes, "perf is not installed: instructions and cache misses are not told")
        return
    for name, work in works.items():
        with _perf_stat() as counted:
            work()
        if not counted:
            note(notes, "perf stat counts nothing here (no counters, or not allowed): instructions are not told")
            return
        lines = counted.get("cache-misses", 0.0) * _LINE_BYTES / nbytes
        note(
            notes,
            f"{size}: {name}: {counted.get('instructions', 0.0) / nbytes:.2f} instructions and {lines:.2f} bytes of "
            "cache misses for a byte",
        )


@contextlib.contextmanager
def _perf_stat() -> Iterator[dict[str, float]]:
    """Counts for this process. The answer is filled in when the block has ended."""
    counted: dict[str, float] = {}
    command = ["perf", "stat", "-x", ",", "-e", ",".join(_EVENTS), "-p", str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as perf:
        time.sleep(0.3)
        yield counted
        if perf.poll() is None:
            perf.send_signal(signal.SIGINT)
        _, told = perf.communicate(timeout=30)
    for value, event in re.findall(r"^(\d+),[^,]*,([a-z-]+)", told, flags=re.MULTILINE):
        counted[event] = float(value)


# --- the first step after a resume -----------------------------------------------------------------------------------


def measure_first_step(place: Path, effort: Effort) -> list[Row]:
    """Of a process that resumed, against a step of the same network that nothing disturbs."""
    row = Row("first step after a resume (x an undisturbed step)")
    resume = Row("resume itself, 50 MB in the page cache")
    root = place / "ours"
    _child(root, "save")
    for _ in range(min(effort.least, 6)):
        say("first step after a resume")
        found = _child(root, "resume")
        row.add(found["first"], found["undisturbed"])
        resume.add(found["resume"])
    return [row, resume]


def _child(root: Path, mode: str) -> dict[str, float]:
    command = [sys.executable, __file__, str(root), mode]
    found: dict[str, float] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    )
    return found


class _Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self._batch = torch.randn(64, 1024)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self.optimizer.step()


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _first_step(root: Path, mode: str) -> dict[str, float]:
    logging.getLogger("unbroken").setLevel(logging.ERROR)
    warm = _Training()
    undisturbed = statistics.median([_seconds(warm.step) for _ in range(30)][10:])
    training = _Training()
    with unbroken.Checkpointer(root, training.state, signals=False) as run:
        resume = _seconds(run.resume)

        def step() -> None:
            training.step()
            run.step()

        first = _seconds(step)
        if mode == "save":
            run.save().wait()
    return {"undisturbed": undisturbed, "first": first, "resume": resume}


if __name__ == "__main__":
    print(json.dumps(_first_step(Path(sys.argv[1]), sys.argv[2])))
