"""What was trained, line by line: kept for the demonstration's audit alone, and no part of a training script's duties.

Each rank appends one line of JSON a step to its own file, when the optimizer has stepped and before a save can begin.
One write() to a file opened with O_APPEND survives the death of the process. A step that had to be done again appears
again, under the generation that did it again. How long saves blocked the training is noted with the step after them.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Entry", "Ledger", "read_ledger"]


@dataclass(frozen=True)
class Entry:
    generation: int
    step: int
    samples: tuple[int, ...]  # in the order in which the rank trained them
    blocked_ms: tuple[float, ...]  # by each save that has ended since the line before


class Ledger:
    """A rank's file. With no directory given, nothing is written."""

    def __init__(self, directory: str | None, rank: int) -> None:
        self._fd = -1
        self._last_save = 0
        if directory is not None:
            os.makedirs(directory, exist_ok=True)
            path = os.path.join(directory, f"rank-{rank}.jsonl")
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def record(self, run: Any, samples: Iterable[int]) -> None:
        """Notes that the step after `run.step_number` was trained. `run` is the Checkpointer."""
        if self._fd < 0:
            return
        saves = [save for save in run.stats.saves if save.step > self._last_save]
        self._last_save = max((save.step for save in saves), default=self._last_save)
        line = {
            "generation": run.generation,
            "step": run.step_number + 1,
            "samples": list(samples),
            "blocked_ms": [round(1000 * save.blocked_seconds, 3) for save in saves],
        }
        os.write(self._fd, json.dumps(line).encode() + b"\n")


def read_ledger(directory: Path, rank: int) -> list[Entry]:
    """All entries of a rank, in the order in which they were written. A line that does not parse raises ValueError."""
    path = directory / f"rank-{rank}.jsonl"
    entries = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            fields = json.loads(line)
            samples, blocked = tuple(fields["samples"]), tuple(fields["blocked_ms"])
            entries.append(Entry(fields["generation"], fields["step"], samples, blocked))
        except (ValueError, KeyError) as error:
            raise ValueError(f"read {path}: line {number} is damaged: {error}") from error
    return entries
