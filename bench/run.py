"""`make bench`: measures, prints one table, writes bench/results/checkpoint.json."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import checkpoint
import cost
import order
import ranks
import scale
import small
import torch
import trainer
from rows import Effort, Row, machine, say, table, write_json
from state import TENSORS

_MIB = 1 << 20
_PLAIN_MINUTES = 12  # that all parts take with their seconds as they stand in _parts()
Part = Callable[[Path, Effort], list[Row]]


def _parts(sizes: list[int], quick: bool, notes: list[str]) -> Iterator[tuple[str, float, Part]]:
    """What is measured, each with the seconds that it may take beyond its least rounds."""
    for size in sizes:
        name = f"{size // _MIB} MiB"
        yield f"1 rank, {name}", 35, partial(_of_size, checkpoint.measure, size, notes)
        yield f"2 ranks, {name}", 25, partial(_of_size, ranks.measure, size, notes)
        yield f"trainer, {name}", 40, partial(_of_size, trainer.measure, size, notes)
        yield f"cost, {name}", 15, partial(_of_size, cost.measure, size, notes)
    yield "first step", 0, lambda place, effort: cost.measure_first_step(place, effort)
    yield "tiny", 20, lambda place, effort: small.measure_tiny(place, effort, notes)
    saves, nbytes = (50, 4 * _MIB) if quick else (200, 64 * _MIB)
    yield "order", 5, lambda _, effort: order.measure(effort)
    yield "bounded", 0, lambda place, _: small.measure_bounded(place, saves, nbytes)
    yield "scale", 0, lambda place, _: scale.measure(place, notes, quick=quick)


def _of_size(
    measure: Callable[[Path, int, Effort, list[str]], list[Row]],
    size: int,
    notes: list[str],
    place: Path,
    effort: Effort,
) -> list[Row]:
    return measure(place, size, effort, notes)


def _effort(seconds: float, arguments: argparse.Namespace, *, quick: bool) -> Effort:
    if arguments.rounds is not None:
        return Effort(least=arguments.rounds, most=arguments.rounds)
    if quick:
        return Effort(seconds=seconds, most=30, hurry=True)
    return Effort(seconds=seconds * arguments.minutes / _PLAIN_MINUTES, most=100)


def _arguments() -> argparse.Namespace:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="256 MiB only, in under ten minutes; as QUICK=1")
    parser.add_argument(
        "--rounds", type=int, help="just so many rounds, whatever they show; six is the least for a verdict"
    )
    parser.add_argument("--minutes", type=float, default=60, help="about how long all of it may take (60)")
    parser.add_argument(
        "--size", type=int, action="append", metavar="MIB", help="of the state, instead of 256 and 2048"
    )
    parser.add_argument("--only", action="append", metavar="PART", help="only parts whose name has this in it")
    parser.add_argument("--place", type=Path, default=here / "work", help="a directory on the disk to measure")
    parser.add_argument("--json", type=Path, default=here / "results" / "checkpoint.json")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    logging.getLogger("unbroken").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch")
    quick = arguments.quick or os.environ.get("QUICK") == "1"
    sizes = [size * _MIB for size in arguments.size or ([256] if quick else [256, 2048])]
    rows: list[Row] = []
    notes: list[str] = []
    failed = False
    begin = time.monotonic()
    for name, seconds, part in _parts(sizes, quick, notes):
        if arguments.only and not any(word in name for word in arguments.only):
            continue
        started = time.monotonic()
        place = arguments.place / f"unbroken-bench-{os.getpid()}"
        place.mkdir(parents=True)
        try:
            rows += part(place, _effort(seconds, arguments, quick=quick))
        except Exception:  # noqa: BLE001  # the other parts are still worth their time; the exit code tells
            failed = True
            traceback.print_exc()
            notes.append(f"{name}: failed, its rows are missing")
            say(notes[-1])
        finally:
            shutil.rmtree(place, ignore_errors=True)
            say(f"{name}: done in {time.monotonic() - started:.0f} s")
    settings = {
        "quick": quick,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "tensors": TENSORS,
        "torch": torch.__version__,
    }
    print(", ".join(f"{key} {value}" for key, value in {**machine(), **settings}.items()), file=sys.stderr)
    print(table(rows))
    for text in notes:
        print(f"note: {text}", file=sys.stderr)
    write_json(arguments.json, rows, settings, notes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
