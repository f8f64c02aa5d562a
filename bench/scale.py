"""Large worlds, simulated: what the coordinator does for 1,024 ranks of 500 tensors, and what a restore reads there.

Each world is a process of its own (scale_run.py). What 4,096 ranks would take is estimated: a power of the number of
ranks is fitted to what the smaller worlds took.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from peers import note
from rows import Row, say

_TENSORS = 500
_WORLDS = (128, 256, 512, 1024)
_QUICK_WORLDS = (32, 64, 128)
_TARGET_RANKS = 1024
_ESTIMATED_RANKS = 4096
_LOADS = 3  # that one process of scale_run.py makes
_READS = "trace=read,pread64,preadv,preadv2"


def measure(place: Path, notes: list[str], *, quick: bool) -> list[Row]:
    worlds = _QUICK_WORLDS if quick else _WORLDS
    found: list[dict[str, Any]] = []
    for ranks in worlds:
        say(f"{ranks} ranks: plan, saves, restore")
        root = place / f"world-{ranks}"
        one = _run("save", root, ranks)
        one |= _run("load", root, ranks)
        if ranks == worlds[-1]:
            _tell_reads(root, ranks, notes)
        shutil.rmtree(root)
        found.append(one)
    rows = _rows(found[-1], f"{worlds[-1]} ranks", _stock(worlds[-1]))
    for ranks in (_TARGET_RANKS, _ESTIMATED_RANKS):
        if ranks > worlds[-1]:
            rows += _estimate(found, ranks, notes)
    return rows


def _run(mode: str, root: Path, ranks: int, *before: str) -> dict[str, Any]:
    script = str(Path(__file__).with_name("scale_run.py"))
    command = [*before, sys.executable, script, mode, str(root), str(ranks), str(_TENSORS)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    parsed: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return parsed


def _stock(ranks: int) -> dict[str, Any]:
    say(f"{ranks} ranks: stock DCP")
    script = str(Path(__file__).with_name("scale_stock.py"))
    command = [sys.executable, script, str(ranks), str(_TENSORS)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    parsed: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return parsed


def _rows(one: dict[str, Any], label: str, stock: dict[str, Any] | None = None) -> list[Row]:
    label = f"{label} x {_TENSORS} tensors"
    beside_python = 1e3 * one["python_stall_seconds"]
    rows: list[Row] = []

    def add(
        name: str, value: Any, target: float | None, unit: str, floor: float | None = None, *, dcp: Any = None
    ) -> None:
        row = Row(f"{label}: {name}", target, unit=unit, absolute=True, exact=not isinstance(value, list))
        for sample in value if isinstance(value, list) else [value]:
            row.add(sample, floor)
        if stock is not None and dcp is not None:
            row.add_peer("dcp", dcp(stock))
        rows.append(row)

    def first(found: dict[str, Any]) -> float:
        return float(found["plan_seconds"] + found["first_commit_seconds"])

    add("first plan and first .metadata", first(one), 10, "s", dcp=first)
    add("of it, the plan", one["plan_seconds"], None, "s", dcp=lambda found: found["plan_seconds"])
    later = one["later_cpu_seconds"]
    add("coordinator's CPU for a later save", later, 0.5, "s", dcp=lambda found: found["later_cpu_seconds"])
    add("the same when an object has moved", one["moved_cpu_seconds"], 0.5, "s")
    hold = "GIL held at most (floor: beside a Python loop)"
    add(f"plan: {hold}", 1e3 * one["plan_stall_seconds"], None, "ms", beside_python)  # once in the life of a run
    held = one["later_stall_seconds"]  # the machine disturbs some saves; what holds the GIL does so in each
    if isinstance(held, list):
        held = [1e3 * seconds for seconds in held]
        add(f"later saves: {hold}", held, 20, "ms", beside_python, dcp=lambda found: 1e3 * found["later_stall_seconds"])
    add(f"object moved: {hold}", 1e3 * one["moved_stall_seconds"], 20, "ms", beside_python)
    size = one["metadata_bytes"] / 2**20
    add("size of .metadata", size, None, "MiB", dcp=lambda found: found["metadata_bytes"] / 2**20)
    add("size of the manifest and its parts", (one["manifest_bytes"] + one["parts_bytes"]) / 2**20, None, "MiB")
    add("restore: one rank reads (floor: its own bytes)", one["load_read_bytes"] / 2**20, None, "MiB")
    rows[-1].floor.append(one["load_own_bytes"] / 2**20)
    add("restore: the first rank of a node reads from the disk", one["load_disk_bytes"] / 2**20, None, "MiB")
    add("restore: another rank of it reads from the disk", one["load_again_disk_bytes"] / 2**20, None, "MiB")
    add("restore: seconds of one rank", one["load_seconds"], None, "s")
    add(f"restore: {hold}", 1e3 * one["load_stall_seconds"], None, "ms", beside_python)
    return rows


def _middle(value: Any) -> float:
    return float(statistics.median(value)) if isinstance(value, list) else float(value)


def _estimate(found: list[dict[str, Any]], ranks: int, notes: list[str]) -> list[Row]:
    """The same rows for a larger world, each figure continued as a power of the number of ranks."""
    estimated: dict[str, Any] = {}
    powers: dict[str, float] = {}
    for name in found[-1]:
        values = [_middle(one[name]) for one in found]
        power = max(0.0, _power([one["ranks"] for one in found], values))
        powers[name] = power
        estimated[name] = values[-1] * (ranks / found[-1]["ranks"]) ** power
    for name in ("python_stall_seconds", "load_own_bytes"):
        estimated[name] = _middle(found[-1][name])
    # What takes only the processor is continued by its CPU time, which other programs disturb least.
    for name in ("plan", "first_commit", "load"):
        estimated[f"{name}_seconds"] = estimated[f"{name}_cpu_seconds"]
    told = ", ".join(f"{name} {powers[name]:.2f}" for name in sorted(powers) if name not in ("ranks", "tensors"))
    note(notes, f"{ranks} ranks are an estimate from {[one['ranks'] for one in found]}; powers of the ranks: {told}")
    return _rows(estimated, f"{ranks} ranks (estimate)")


def _power(sizes: list[int], values: list[float]) -> float:
    """The slope of the line through the logarithms."""
    if any(value <= 0 for value in values):
        return 1.0
    return statistics.linear_regression([math.log(s) for s in sizes], [math.log(v) for v in values]).slope


def _tell_reads(root: Path, ranks: int, notes: list[str]) -> None:
    """Which files the restore of one rank reads, by strace."""
    if shutil.which("strace") is None:
        note(notes, "strace is not installed: which files a restore reads is not told")
        return
    log = root / "strace"
    _run("load", root, ranks, "strace", "-f", "-qq", "-y", "-s", "0", "-e", _READS, "-o", str(log))
    sizes: Counter[str] = Counter()
    files: dict[str, set[str]] = {}
    for path, count in re.findall(r"\(\d+<([^>]*)>.* = (\d+)$", log.read_text(), flags=re.MULTILINE):
        if Path(path).is_relative_to(root.resolve()):
            kind = _kind(Path(path).name)
            sizes[kind] += int(count)
            files.setdefault(kind, set()).add(path)
    told = ", ".join(
        f"{kind} {size / _LOADS / 2**20:.2f} MiB of {len(files[kind])} file(s)" for kind, size in sizes.most_common()
    )
    note(notes, f"{ranks} ranks: every rank reads for itself, in a restore: {told}")


def _kind(name: str) -> str:
    if name.startswith("__"):
        return "manifest parts" if name.endswith(".json") else "shard files"
    return name if name in (".metadata", "manifest.json") else "the run's records"
