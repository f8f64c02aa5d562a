"""The trainer's speed while a save is in flight, against its speed while a bare direct writer writes as many bytes.

The trainer is one thread that runs small optimizer steps one after another, as the thread does that feeds a device.
Only the time after the trainer goes on and before the save is durable counts; what blocks it has a row of its own.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import floors
import torch
from ours import Ours
from peers import ASYNCHRONOUS, Peer, drop_failed, open_peers
from rows import Effort, Row
from state import adam, nbytes_of

import unbroken

_DUE = 8  # saves
_SECONDS = 0.5  # in flight, for one sample; small states are saved several times over


class Trainer:
    """Steps of a small network; one of them takes about a millisecond."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.randn(64, 256)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()

    def run_until(self, done: Callable[[], bool]) -> tuple[int, float]:
        """Steps, and the seconds that they took."""
        steps, begin = 0, time.perf_counter()
        while not done():
            self.step()
            steps += 1
        return steps, time.perf_counter() - begin


class _BareWriter:
    """A thread that writes the bytes with direct I/O, and waits for its start first."""

    def __init__(self, path: Path, source: floors.Memory) -> None:
        ready, self._go = threading.Event(), threading.Event()

        def started() -> None:
            ready.set()
            self._go.wait()

        self._thread = threading.Thread(target=lambda: floors.write(path, source, 1, 16 << 20, started))
        self._thread.start()
        ready.wait()

    def go(self) -> None:
        self._go.set()

    def done(self) -> bool:
        return not self._thread.is_alive()


def measure(place: Path, nbytes: int, effort: Effort, notes: list[str]) -> list[Row]:
    place.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(place, nbytes, effort, notes)
    finally:
        torch.set_num_threads(threads)


def _measure(place: Path, nbytes: int, effort: Effort, notes: list[str]) -> list[Row]:
    state = adam(nbytes)
    size = f"{nbytes / 2**20:.0f} MiB"
    row = Row(
        f"{size}: steps/s while saving (x steps/s beside a bare writer)", 0.97, unit="steps/s", more_is_better=True
    )
    alone = Row(f"{size}: steps/s beside a bare writer (x steps/s alone)", unit="steps/s", more_is_better=True)
    trainer = Trainer()
    trainer.run_until(_after(0.5))
    source = floors.Memory(nbytes_of(state))
    ours = Ours(place / "ours", state)
    ours.prepare()
    peers = open_peers(ASYNCHRONOUS, place, state, notes)

    def beside_writer() -> tuple[int, float]:
        writer = _BareWriter(place / "floor", source)
        writer.go()
        return trainer.run_until(writer.done)

    def beside_ours() -> tuple[int, float]:
        ours.step()
        floors.settle(place)
        return trainer.run_until(ours.begin().done)

    def beside(peer: Peer) -> tuple[int, float]:
        peer.clear()
        floors.settle(place)
        flight = peer.begin(state)
        found = trainer.run_until(flight.done)
        flight.wait()
        return found

    for warm in (beside_writer, beside_ours):
        warm()
    for _ in effort.rounds([row], f"{size}: trainer"):
        writing = _speed(beside_writer)
        row.add(_speed(beside_ours), writing)
        alone.add(writing, statistics.median(_rate(trainer.run_until(_after(0.2))) for _ in range(5)))
        for peer in list(peers):
            try:
                row.add_peer(peer.name, _speed(lambda peer=peer: beside(peer)))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001  # a peer that fails is no reason to measure nothing
                drop_failed(peers, peer, error, notes)
    for peer in peers:
        peer.close()
    ours.close()
    return [row, alone, _due_saves(place / "due", state, trainer, size)]


def _due_saves(place: Path, state: dict[str, Any], trainer: Trainer, size: str) -> Row:
    """A run that saves by itself, as often as its saves take three times over: each one that is due must be made."""
    row = Row(f"{size}: due saves that were deferred, of {_DUE}", 0, unit="saves", absolute=True, exact=True)
    probe = Ours(place / "probe", state)
    probe.prepare()
    _, seconds = probe.save()
    probe.close()
    steps, took = trainer.run_until(_after(0.5))
    every = max(1, math.ceil(3 * seconds * steps / took))
    with unbroken.Checkpointer(
        place / "run", state, every=unbroken.Every(steps=every), keep=unbroken.Keep(last=1), signals=False
    ) as run:
        run.resume()
        for _ in range(_DUE * every + 1):
            trainer.step()
            run.step()
    stats = run.stats
    row.add(_DUE - stats.durable + stats.deferred)
    return row


def _speed(sample: Callable[[], tuple[int, float]]) -> float:
    """Steps a second over as many samples as it takes for enough time in flight."""
    steps, seconds, begin = 0, 0.0, time.monotonic()
    while seconds < _SECONDS and time.monotonic() - begin < 10 * _SECONDS:
        more, took = sample()
        steps, seconds = steps + more, seconds + took
    return steps / seconds


def _rate(found: tuple[int, float]) -> float:
    return found[0] / found[1]


def _after(seconds: float) -> Callable[[], Any]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end
