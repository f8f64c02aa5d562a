"""Rows of a benchmark: samples of ours, a floor and peers, as ratios with their spread, as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """One thing measured. Samples are in `unit`, one a round, interleaved with those of the floor."""

    name: str
    target: float | None  # ours / floor, at most
    unit: str = "s"
    ours: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, samples: list[float]) -> float | None:
        """Median over the floor's median."""
        if not samples or not self.floor:
            return None
        return statistics.median(samples) / statistics.median(self.floor)

    def spread(self) -> list[float] | None:
        """The least and the greatest of ours, over the floor's median."""
        if not self.ours or not self.floor:
            return None
        base = statistics.median(self.floor)
        return [min(self.ours) / base, max(self.ours) / base]

    def to_json(self) -> dict[str, Any]:
        ratio = self.ratio(self.ours)
        return {
            "row": self.name,
            "unit": self.unit,
            "ours": statistics.median(self.ours) if self.ours else None,
            "floor": statistics.median(self.floor) if self.floor else None,
            "ratio": ratio,
            "target": self.target,
            "met": None if ratio is None or self.target is None else ratio <= self.target,
            "spread": self.spread(),
            "peers": {name: {"value": statistics.median(s), "ratio": self.ratio(s)} for name, s in self.peers.items()},
            "rounds": len(self.ours),
        }


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
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _cell(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)


def table(rows: list[Row]) -> str:
    """For people: one line a row, ratios to the floor; peers in the order of the first row that has them."""
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    head = ["", "ours", "floor", "ours/floor", "min..max", "target", "met", *(f"{p}/floor" for p in peers)]
    lines = [head]
    for row in rows:
        found = row.to_json()
        spread = found["spread"]
        lines.append(
            [
                row.name,
                _cell(found["ours"], "{:.4f} " + row.unit),
                _cell(found["floor"], "{:.4f} " + row.unit),
                _cell(found["ratio"]),
                "-" if spread is None else f"{spread[0]:.2f}..{spread[1]:.2f}",
                _cell(row.target),
                {True: "yes", False: "no", None: "-"}[found["met"]],
                *(_cell(row.ratio(row.peers.get(p, []))) for p in peers),
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    text.insert(1, "-|-".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in text)


def write_json(path: Path, rows: list[Row], settings: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": machine(), "settings": settings, "rows": [row.to_json() for row in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n")
