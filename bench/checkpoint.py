"""Checkpoints on a disk: blocked, durable, cold and warm load, beside the floors and stock DCP, interleaved.

The state is that of an Adam run: float32 parameters and two moments of the same shapes, in 432 tensors.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import floors
import torch
import torch.distributed.checkpoint as dcp
from rows import Row

import unbroken

_TENSORS = 432
_BLOCKS = (4 << 20, 16 << 20)
_THREADS = (1, 2)


def make_state(nbytes: int) -> dict[str, Any]:
    """432 float32 tensors of about `nbytes` together, two thirds of them moments, and a few plain values."""
    elements = nbytes // 4 // _TENSORS
    width = 256
    shape = (elements // width, width)
    state: dict[str, Any] = {"model": {}, "optim": {"state": {}}, "step": 1}
    generator = torch.Generator().manual_seed(0)
    for i in range(_TENSORS // 3):
        state["model"][f"layer{i}.weight"] = torch.randn(shape, generator=generator)
        state["optim"]["state"][f"layer{i}.weight"] = {
            "exp_avg": torch.randn(shape, generator=generator),
            "exp_avg_sq": torch.randn(shape, generator=generator),
        }
    return state


def state_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(state_bytes(value) for value in state.values()) if isinstance(state, dict) else 0


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


class Ours:
    """The Checkpointer on one root; each save is explicit, so its call is what blocks the trainer."""

    def __init__(self, root: Path, state: dict[str, Any]) -> None:
        self.root = root
        self.run = unbroken.Checkpointer(root, state, keep=unbroken.Keep(last=1), signals=False)
        self.run.resume()

    def prepare(self) -> None:
        """The first step, behind which the arena is built in the background, as in a run."""
        self.run.step()
        while self.run.stats.plans == 0:
            time.sleep(0.01)

    def save(self) -> tuple[float, float]:
        """Seconds until the trainer goes on, and until the checkpoint is durable."""
        self.run.step()
        floors.settle(self.root.parent)
        begin = time.perf_counter()
        save = self.run.save()
        blocked = time.perf_counter() - begin
        save.wait()
        return blocked, time.perf_counter() - begin

    def files(self) -> list[Path]:
        return [self.root]

    def load(self, target: dict[str, Any]) -> float:
        return timed(lambda: unbroken.load(self.root, target))[0]


class StockDcp:
    """dcp.save and dcp.load as they come, with two writer threads."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(self, state: dict[str, Any]) -> float:
        shutil.rmtree(self.root, ignore_errors=True)
        floors.settle(self.root.parent)
        writer = dcp.FileSystemWriter(self.root, thread_count=2)
        return timed(lambda: dcp.save(state, storage_writer=writer, no_dist=True))[0]

    def load(self, target: dict[str, Any]) -> float:
        reader = dcp.FileSystemReader(self.root)
        return timed(lambda: dcp.load(target, storage_reader=reader, no_dist=True))[0]


class StockAsync:
    """dcp.async_save as it comes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(self, state: dict[str, Any]) -> tuple[float, float]:
        shutil.rmtree(self.root, ignore_errors=True)
        floors.settle(self.root.parent)
        writer = dcp.FileSystemWriter(self.root, thread_count=2)
        begin = time.perf_counter()
        future = dcp.async_save(state, storage_writer=writer, no_dist=True)
        blocked = time.perf_counter() - begin
        future.result()
        return blocked, time.perf_counter() - begin


def best(measure: Callable[..., float], *choices: tuple[Any, ...]) -> float:
    return min(measure(*choice) for choice in choices)


def measure(place: Path, nbytes: int, rounds: int) -> list[Row]:
    """All rows of one size, `rounds` interleaved rounds each."""
    size = f"{nbytes / 2**20:.0f} MiB"
    state = make_state(nbytes)
    nbytes = state_bytes(state)
    target = make_state(nbytes)
    source, sink = floors.Memory(nbytes), floors.Memory(nbytes)
    blocked_first = Row(f"{size}: blocked, first save (x memcpy)", 1.5)
    blocked = Row(f"{size}: blocked, later saves (x memcpy)", 1.5)
    durable = Row(f"{size}: durable (x direct write)", 1.25)
    cold = Row(f"{size}: load, cold (x cold read)", 1.15)
    warm = Row(f"{size}: load, warm (x warm read)", 1.3)
    plain = place / "floor"
    stock, stock_async = StockDcp(place / "dcp"), StockAsync(place / "dcp-async")
    ours = Ours(place / "unbroken", state)
    ours.prepare()
    for number in range(rounds + 1):
        copied = best(lambda threads: floors.memcpy(sink, source, threads), *((t,) for t in _THREADS))
        block_seconds, durable_seconds = ours.save()
        written = best(
            lambda threads, block: floors.write(plain, source, threads, block),
            *((t, b) for t in _THREADS for b in _BLOCKS),
        )
        saved = stock.save(state)
        async_blocked, async_durable = stock_async.save(state)
        if number == 0:
            blocked_first.floor.append(copied)
            blocked_first.ours.append(block_seconds)
            blocked_first.peers = {"dcp.save": [saved], "dcp.async_save": [async_blocked]}
            continue
        for row, floor, mine, sync, asynchronous in (
            (blocked, copied, block_seconds, saved, async_blocked),
            (durable, written, durable_seconds, saved, async_durable),
        ):
            row.floor.append(floor)
            row.ours.append(mine)
            row.peers.setdefault("dcp.save", []).append(sync)
            row.peers.setdefault("dcp.async_save", []).append(asynchronous)
    for _ in range(rounds):
        for row, is_cold in ((cold, True), (warm, False)):

            def prepare(path: Path, is_cold: bool = is_cold) -> None:
                if is_cold:
                    floors.drop_cache([path])
                else:
                    for file in path.rglob("*") if path.is_dir() else [path]:
                        if file.is_file():
                            file.read_bytes()

            samples = []
            for threads in _THREADS:
                for direct in (True, False) if is_cold else (False,):
                    prepare(plain)
                    samples.append(floors.read(plain, sink, threads, direct=direct))
            row.floor.append(min(samples))
            prepare(ours.root)
            row.ours.append(ours.load(target))
            prepare(stock.root)
            row.peers.setdefault("dcp.load", []).append(stock.load(target))
    ours.run.close()
    return [blocked_first, blocked, durable, cold, warm]


def run(place: Path, *, quick: bool, rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """Measures in a directory below `place`, which is removed afterwards."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.distributed")
    sizes = [256 << 20] if quick else [256 << 20, 2 << 30]
    rows = []
    for nbytes in sizes:
        work = place / f"unbroken-bench-{os.getpid()}"
        work.mkdir(parents=True)
        try:
            rows += measure(work, nbytes, rounds)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return rows, {"rounds": rounds, "tensors": _TENSORS, "place": "a directory on the disk", "torch": torch.__version__}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="256 MiB only")
    parser.add_argument("--rounds", type=int, default=5)
