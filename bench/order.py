"""How many indices of an epoch's order a core computes in a second, in bulk and through Python.

    python bench/order.py [--json FILE]

The target is 20 million (docs/order.md defines the order). One thread; five rounds, interleaved over the lengths; the
median with the slowest and the fastest round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from unbroken._engine import Permutation

LENGTHS = {"2^20": 2**20, "2^20 + 1": 2**20 + 1, "10^9": 10**9, "2^40 + 1": 2**40 + 1}
COUNT = 2**20
ROUNDS = 5
TARGET = 20e6


def indices_per_second(samples: int) -> float:
    """Indices per second of this thread's CPU time, in four bulk calls of ``COUNT``, each of another epoch."""
    orders = [Permutation(seed=7, epoch=epoch, samples=samples) for epoch in range(4)]
    started = time.thread_time()
    for order in orders:
        order.fill(0, COUNT)
    return len(orders) * COUNT / (time.thread_time() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()

    rounds: dict[str, list[float]] = {name: [] for name in LENGTHS}
    for samples in LENGTHS.values():
        indices_per_second(samples)
    for _ in range(ROUNDS):
        for name, samples in LENGTHS.items():
            rounds[name].append(indices_per_second(samples))

    print(f"{'samples':<10} {'million indices/s':>18} {'min':>8} {'max':>8} {'x target':>9}")
    for name, figures in rounds.items():
        median = statistics.median(figures)
        print(
            f"{name:<10} {median / 1e6:>18.1f} {min(figures) / 1e6:>8.1f} {max(figures) / 1e6:>8.1f}"
            f" {median / TARGET:>9.2f}"
        )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"unit": "indices/s", "rounds": rounds}, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
