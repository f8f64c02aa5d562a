"""How many indices of an epoch's order a core computes in a second, in bulk and through Python."""

from __future__ import annotations

import time

from rows import Effort, Row

from unbroken._engine import Permutation

_LENGTHS = {"2^20": 2**20, "2^20 + 1": 2**20 + 1, "10^9": 10**9, "2^40 + 1": 2**40 + 1}
_COUNT = 2**20


def measure(effort: Effort) -> list[Row]:
    rows = {
        name: Row(f"order, {name} samples: million indices/s", 20, unit="M/s", more_is_better=True, absolute=True)
        for name in _LENGTHS
    }
    for samples in _LENGTHS.values():
        _millions_per_second(samples)
    for _ in effort.rounds(list(rows.values()), "order"):
        for name, samples in _LENGTHS.items():
            rows[name].add(_millions_per_second(samples))
    return list(rows.values())


def _millions_per_second(samples: int) -> float:
    """Of this thread's CPU time, in four bulk calls, each of another epoch."""
    orders = [Permutation(seed=7, epoch=epoch, samples=samples) for epoch in range(4)]
    started = time.thread_time()
    for order in orders:
        order.fill(0, _COUNT)
    return len(orders) * _COUNT / (time.thread_time() - started) / 1e6
