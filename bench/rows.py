"""Rows of a benchmark: samples of ours, a floor and peers, one a round; what they say, as a table and as JSON.

A row is decided by an interval that holds the median of its rounds' ratios with 95 % certainty: met when all of it is
on the good side of the target, missed when all of it is on the other, and unclear as long as the target lies within.
The interval is that of order statistics, which assumes nothing about how the noise is distributed; it takes six rounds.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEAST_ROUNDS = 6  # with fewer, no interval of order statistics holds the median with 95 % certainty
_CERTAINTY = 0.95


@dataclass
class Row:
    """One thing measured. Samples are in `unit`, one a round, interleaved with those of the floor."""

    name: str
    target: float | None = None  # for the ratio to the floor; of an absolute row for ours, in `unit`
    unit: str = "s"
    more_is_better: bool = False  # the target is a least one
    absolute: bool = False  # judged by its own figure; the floor, if any, is for the reader
    exact: bool = False  # a count, not a time: one round decides
    ours: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)

    def add(self, ours: float, floor: float | None = None) -> None:
        """One round."""
        self.ours.append(ours)
        if floor is not None:
            self.floor.append(floor)

    def add_peer(self, name: str, value: float) -> None:
        self.peers.setdefault(name, []).append(value)

    def figures(self, samples: list[float]) -> list[float]:
        """What the target is compared with, round by round: a ratio to that round's floor, or the figure itself."""
        if self.absolute:
            return samples
        # A peer may have missed rounds; its rounds are then compared with the floor's median.
        if len(samples) != len(self.floor):
            return [sample / statistics.median(self.floor) for sample in samples] if self.floor else []
        return [sample / floor if floor else math.inf for sample, floor in zip(samples, self.floor, strict=True)]

    def ratio(self, samples: list[float]) -> float | None:
        """The median of the rounds' ratios to the floor; None without a floor."""
        if not samples or not self.floor:
            return None
        if self.absolute:
            return statistics.median(samples) / statistics.median(self.floor)
        return statistics.median(self.figures(samples))

    def interval(self) -> tuple[float, float] | None:
        return median_interval(self.figures(self.ours))

    def met(self) -> str | None:
        """yes, no or unclear; None without a target."""
        figures = self.figures(self.ours)
        if self.target is None or not figures:
            return None
        if self.exact:
            low = high = statistics.median(figures)
        else:
            interval = self.interval()
            if interval is None or len(figures) < LEAST_ROUNDS:
                return "unclear"
            low, high = interval
        if self.more_is_better:
            low, high = -high, -low
        target = -self.target if self.more_is_better else self.target
        return "yes" if high <= target else "no" if low > target else "unclear"

    def to_json(self) -> dict[str, Any]:
        figures = self.figures(self.ours)
        interval = self.interval()
        return {
            "row": self.name,
            "unit": self.unit,
            "ours": statistics.median(self.ours) if self.ours else None,
            "floor": statistics.median(self.floor) if self.floor else None,
            "ratio": self.ratio(self.ours),
            "target": self.target,
            "target_of": "ours" if self.absolute else "ratio",
            "target_is": "at least" if self.more_is_better else "at most",
            "met": self.met(),
            "interval": None if self.exact or interval is None else list(interval),
            "spread": [min(figures), max(figures)] if figures else None,
            "peers": {
                name: {"value": statistics.median(s), "ratio": self.ratio(s), "rounds": len(s)}
                for name, s in self.peers.items()
            },
            "rounds": len(self.ours),
        }


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest pair of order statistics between which the median lies with 95 % certainty, or all there is."""
    if not samples:
        return None
    ordered = sorted(samples)
    count = len(ordered)
    outside, cut = 0.5**count, 0
    # Leaving out `cut` samples at either end is wrong when fewer than that fall on one side of the median.
    while cut + 1 < (count + 1) // 2:
        more = outside + math.comb(count, cut + 1) * 0.5**count
        if 2 * more > 1 - _CERTAINTY:
            break
        outside, cut = more, cut + 1
    return ordered[cut], ordered[count - 1 - cut]


@dataclass(frozen=True)
class Effort:
    """How long to measure: until every row is decided, but no longer than `seconds`, nor less than `least` rounds.

    `hurry`: the time counts more than the rounds.
    """

    least: int = LEAST_ROUNDS
    most: int = 60
    seconds: float = 60.0
    hurry: bool = False

    def rounds(self, rows: Sequence[Row], label: str) -> Iterator[int]:
        """Counts rounds. `rows` may grow while it runs."""
        begin = time.monotonic()
        for number in range(self.most):
            spent = time.monotonic() - begin
            unclear = [row.name for row in rows if row.met() == "unclear"]
            enough = number >= self.least or (self.hurry and number > 0)
            if (number >= self.least and not unclear) or (enough and spent > self.seconds):
                break
            say(f"{label}: round {number + 1}, {spent:.0f} s so far, {len(unclear)} rows unclear")
            yield number


def say(text: str) -> None:
    """Tells whoever waits what goes on."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What a reader has to know about where the figures come from."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def available_bytes() -> int:
    """Memory that a program can still take."""
    return next((int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if "MemAvailable" in line), 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.4f}"


def _value(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{_number(value)} {unit}".rstrip()


def _target(row: Row) -> str:
    if row.target is None:
        return "-"
    sign = ">=" if row.more_is_better else "<="
    return f"{sign} {row.target:g} {row.unit}".rstrip() if row.absolute else f"{sign} {row.target:g} x"


def _peer(row: Row, name: str) -> str:
    samples = row.peers.get(name, [])
    if not samples:
        return "-"
    if row.absolute:
        return _value(statistics.median(samples), row.unit)
    ratio = row.ratio(samples)
    return "-" if ratio is None else f"{ratio:.2f}"


def table(rows: list[Row]) -> str:
    """For people: one line a row. Peers stand as ratios to the floor, in rows of absolute targets as figures."""
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    head = ["", "ours", "floor", "ours/floor", "95 % interval", "target", "met", "rounds", *peers]
    lines = [head]
    for row in rows:
        found = row.to_json()
        interval = found["interval"]
        lines.append(
            [
                row.name,
                _value(found["ours"], row.unit),
                _value(found["floor"], row.unit),
                "-" if found["ratio"] is None else f"{found['ratio']:.2f}",
                "-" if interval is None else f"{_number(interval[0])}..{_number(interval[1])}",
                _target(row),
                found["met"] or "-",
                str(found["rounds"]),
                *(_peer(row, name) for name in peers),
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    text.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in text)


def write_json(path: Path, rows: list[Row], settings: dict[str, Any], notes: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": machine(), "settings": settings, "notes": notes, "rows": [row.to_json() for row in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n")
