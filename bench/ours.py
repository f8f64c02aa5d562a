"""Unbroken as the bench drives it, and the form in which it and its peers are measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import floors

import unbroken


@dataclass(frozen=True)
class Flight:
    """A save whose caller may change the state again."""

    wait: Callable[[], Any]  # until it is durable
    done: Callable[[], bool]  # without waiting


def nothing() -> None:
    """What is left to wait for after a save that was durable when it returned."""


FINISHED = Flight(wait=nothing, done=lambda: True)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def measure_save(begin: Callable[[], Flight], place: Path) -> tuple[float, float]:
    """Seconds until the trainer goes on, and until the checkpoint is durable."""
    floors.settle(place)
    start = time.perf_counter()
    flight = begin()
    blocked = time.perf_counter() - start
    flight.wait()
    return blocked, time.perf_counter() - start


class Ours:
    """The Checkpointer on one root; each save is explicit, so its call is what blocks the trainer."""

    def __init__(self, root: Path, state: dict[str, Any]) -> None:
        self.path = root
        self.run = unbroken.Checkpointer(root, state, keep=unbroken.Keep(last=1), signals=False)
        self.run.resume()

    def prepare(self) -> None:
        """The first step, behind which the arena is built in the background, as in a run."""
        self.run.step()
        while self.run.stats.plans == 0:
            time.sleep(0.01)

    def step(self) -> None:
        """A save is of a step that was not saved yet."""
        self.run.step()

    def begin(self) -> Flight:
        save = self.run.save()
        return Flight(wait=save.wait, done=save.done)

    def save(self) -> tuple[float, float]:
        self.step()
        return measure_save(self.begin, self.path.parent)

    def load(self, target: dict[str, Any]) -> None:
        unbroken.load(self.path, target)

    def close(self) -> None:
        self.run.close()
