"""`make bench`: measures, prints one table, writes bench/results/checkpoint.json."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import checkpoint
from rows import machine, table, write_json


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    checkpoint.add_arguments(parser)
    parser.add_argument(
        "--place", type=Path, default=Path(__file__).parent / "work", help="a directory on the disk to measure"
    )
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "checkpoint.json")
    arguments = parser.parse_args()
    quick = arguments.quick or os.environ.get("QUICK") == "1"
    rows, settings = checkpoint.run(arguments.place, quick=quick, rounds=arguments.rounds)
    print(", ".join(f"{key} {value}" for key, value in machine().items()), file=sys.stderr)
    print(table(rows))
    write_json(arguments.json, rows, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
