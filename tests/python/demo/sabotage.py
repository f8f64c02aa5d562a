"""Runs a training script with one thing done wrong, in the process of the script and nowhere else.

python sabotage.py die-after:10 train.py ROOT ...      SIGKILLs itself when step 10 is in the ledger
python sabotage.py forget:numpy train.py ROOT ...      leaves that generator out when random numbers are restored
python sabotage.py lose-batch train.py ROOT ...        does not train the first batch after the resume
"""

import os
import runpy
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import unbroken
from unbroken import _rng


def die_after(last: int) -> None:
    from ledger import Ledger

    record = Ledger.record

    def record_and_die(self: Ledger, run: unbroken.Checkpointer, samples: Iterable[int]) -> None:
        record(self, run, samples)
        if run.step_number + 1 == last:
            os.kill(os.getpid(), signal.SIGKILL)

    Ledger.record = record_and_die


def forget(generator: str) -> None:
    restore = _rng.restore

    def restore_others(state: Mapping[str, torch.Tensor]) -> list[str]:
        kept = {name: value for name, value in state.items() if not name.startswith(generator)}
        assert len(kept) < len(state), f"no state of {generator} among {sorted(state)}"
        return restore(kept)

    _rng.restore = restore_others


def lose_batch() -> None:
    batches = unbroken.Checkpointer.batches

    def all_but_the_first(self: unbroken.Checkpointer, until: int) -> Iterator[Any]:
        handed_out = iter(batches(self, until=until))
        next(handed_out)
        return handed_out

    unbroken.Checkpointer.batches = all_but_the_first


def main() -> None:
    what, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    verb, _, argument = what.partition(":")
    if verb == "die-after":
        die_after(int(argument))
    elif verb == "forget":
        forget(argument)
    elif verb == "lose-batch":
        lose_batch()
    else:
        sys.exit(f"sabotage: {what}: unknown")
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
