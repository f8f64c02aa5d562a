"""Two ranks with gloo that hold the same module, as under DDP: each writes its half, each reads all of it."""

from __future__ import annotations

import logging
import multiprocessing.connection
import os
import pickle
import resource
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import floors
import torch
import torch.distributed as dist
from ours import Ours, timed
from peers import Dcp, DcpAsync, DcpReused, Peer
from rows import Effort, Row
from state import module, nbytes_of

_RANKS = 2
_DEADLINE_SECONDS = 3600


class _DcpRanks(Dcp):
    no_dist = False


class _AsyncRanks(DcpAsync):
    no_dist = False


class _ReusedRanks(DcpReused):
    no_dist = False


def measure(place: Path, nbytes: int, effort: Effort, notes: list[str]) -> list[Row]:
    """All rows of one size. The ranks are processes of their own; the first one measures and counts."""
    del notes  # its peers come with torch
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answer = place / "rows"
    ranks = [
        context.Process(target=_rank, args=(rank, port, place, nbytes, effort, answer), daemon=True)
        for rank in range(_RANKS)
    ]
    for rank in ranks:
        rank.start()
    try:
        _join(ranks)
    finally:
        for rank in ranks:
            rank.kill()
    rows: list[Row] = pickle.loads(answer.read_bytes())
    return rows


def _join(ranks: Sequence[Any]) -> None:
    """Waits for the ranks; one that fails leaves the others waiting for it."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while any(rank.exitcode is None for rank in ranks):
        multiprocessing.connection.wait([rank.sentinel for rank in ranks if rank.exitcode is None], 1)
        failed = [f"rank {number} ends with {rank.exitcode}" for number, rank in enumerate(ranks) if rank.exitcode]
        if failed or time.monotonic() > deadline:
            raise RuntimeError(f"2 ranks: {', '.join(failed) or 'they do not end'}")


def _rank(rank: int, port: int, place: Path, nbytes: int, effort: Effort, answer: Path) -> None:
    warnings.filterwarnings("ignore", module="torch")
    logging.getLogger("unbroken").setLevel(logging.ERROR)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // _RANKS))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=_RANKS)
    try:
        rows = _Bench(rank, place, nbytes, effort).run()
        if rank == 0:
            answer.write_bytes(pickle.dumps(rows))
    finally:
        dist.destroy_process_group()


class _Bench:
    """The same calls on both ranks. What one alone does is done by rank 0 while the other waits."""

    def __init__(self, rank: int, place: Path, nbytes: int, effort: Effort) -> None:
        self.rank = rank
        self.place = place
        self.effort = effort
        self.size = f"{nbytes / 2**20:.0f} MiB, 2 ranks"
        self.module = module(nbytes)
        self.state: dict[str, Any] = {"model": self.module}
        self.plain: dict[str, Any] = {"model": self.module.state_dict()}  # for DCP: the same memory
        self.nbytes = nbytes_of(self.plain)

    def run(self) -> list[Row]:
        self.place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        ours = Ours(self.place / "ours", self.state)
        ours.prepare()
        ours.save()
        peers: list[Peer] = [_DcpRanks(self.place), _AsyncRanks(self.place), _ReusedRanks(self.place)]
        for peer in peers:
            self._save_peer(peer)
        rows = self._saves(ours, peers)
        ours.close()
        for peer in peers:
            peer.close()
        return [*rows, *self._loads(ours, peers[0])]

    def _saves(self, ours: Ours, peers: list[Peer]) -> list[Row]:
        blocked = Row(f"{self.size}: blocked (x memcpy of a half by each)", 1.15)
        durable = Row(f"{self.size}: durable (x direct write of the whole)", 1.10)
        half = self.nbytes // _RANKS
        source, sink = floors.Memory(half), floors.Memory(half)
        whole = floors.Memory(self.nbytes) if self.rank == 0 else None
        write = floors.best_write(self.place / "floor", whole) if whole is not None else None
        for _ in self._rounds([blocked, durable], "saves"):
            copied = self._both(lambda: floors.memcpy(sink, source, 1))
            written = self._alone(write)
            floors.settle(self.place)
            dist.barrier()
            blocked_seconds, durable_seconds = (self._most(one) for one in ours.save())
            blocked.add(blocked_seconds, copied)
            durable.add(durable_seconds, written)
            for peer in peers:
                first, second = self._save_peer(peer)
                blocked.add_peer(peer.name, first)
                durable.add_peer(peer.name, second)
        return [blocked, durable]

    def _loads(self, ours: Ours, peer: Peer) -> list[Row]:
        cold = Row(f"{self.size}: load, cold, both need all (x one cold read)", 1.3)
        from_disk = Row(f"{self.size}: load, cold: read from the disk (x state)", unit="MiB")
        processor = Row(f"{self.size}: load, cold: CPU of both (x one cold read)")
        plain = self.place / "floor"
        sink = floors.Memory(self.nbytes) if self.rank == 0 else None
        read = floors.best_read(plain, sink, cold=True) if sink is not None else None
        for _ in self._rounds([cold], "loads"):
            floor = self._alone(read)
            self._drop(ours.path)
            before, used = _disk_bytes(), _cpu_seconds()
            seconds = self._both(lambda: ours.load(self.state))
            cold.add(seconds, floor)
            from_disk.add(self._sum(_disk_bytes() - before) / 2**20, self.nbytes / 2**20)
            processor.add(self._sum(_cpu_seconds() - used), floor)
            self._drop(peer.path)
            cold.add_peer(peer.name, self._both(lambda: peer.load(self.plain)))
        return [cold, from_disk, processor]

    def _save_peer(self, peer: Peer) -> tuple[float, float]:
        dist.barrier()
        if self.rank == 0:
            peer.clear()
            floors.settle(self.place)
        dist.barrier()
        begun, flight = timed(lambda: peer.begin(self.plain))
        waited, _ = timed(flight.wait)
        return self._most(begun), self._most(begun + waited)

    def _drop(self, path: Path) -> None:
        dist.barrier()
        if self.rank == 0:
            floors.drop_cache([path])
        dist.barrier()

    def _both(self, work: Callable[[], Any]) -> float:
        """Seconds of the slower rank, from a common start."""
        dist.barrier()
        return self._most(timed(work)[0])

    def _alone(self, work: Callable[[], float] | None) -> float:
        dist.barrier()
        return self._most(work() if work is not None else 0.0)

    def _most(self, value: float) -> float:
        return self._reduced(value, dist.ReduceOp.MAX)

    def _sum(self, value: float) -> float:
        return self._reduced(value, dist.ReduceOp.SUM)

    def _reduced(self, value: float, operation: Any) -> float:
        shared = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(shared, op=operation)
        return float(shared)

    def _rounds(self, rows: list[Row], label: str) -> Iterator[int]:
        """The rounds of rank 0's effort, on both ranks."""
        own = iter(self.effort.rounds(rows, f"{self.size}: {label}")) if self.rank == 0 else None
        while True:
            number = next(own, None) if own is not None else None
            if self._most(-1.0 if number is None else 1.0) < 0:
                return
            yield number if number is not None else 0


def _disk_bytes() -> float:
    """What this process has had the disk read."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return float(fields["read_bytes"])


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
