"""Runs an example as it is and notes what it trains: `recorded.py DIRECTORY SCRIPT ARGUMENTS...`.

Each rank appends a line of JSON to its own file when a step is trained and before a save can begin. One write() to a
file opened with O_APPEND survives the death of the process.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import unbroken


def watch(directory: Path) -> None:
    file = os.open(directory / f"rank-{os.environ.get('RANK', '0')}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    class Recorded(unbroken.Checkpointer):
        def __init__(self, root: str, state: dict[str, Any], loader: unbroken.data.DataLoader, **options: Any) -> None:
            super().__init__(root, state, loader, **options)
            self._batches_of = loader

        def step(self, batches: int = 1) -> None:
            trained = self._batches_of.last
            assert trained is not None
            line = {
                "pid": os.getpid(),
                "generation": self.generation,
                "step": self.step_number + 1,
                "epoch": trained.epoch,
                "samples": trained.indices,
            }
            os.write(file, json.dumps(line).encode() + b"\n")
            super().step(batches)

    unbroken.Checkpointer = Recorded  # type: ignore[misc, assignment]


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
