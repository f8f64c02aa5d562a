"""What the demonstration shows: live progress, tables at the end. With rich on a terminal, in plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Sequence

try:
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError:  # rich is a nicety
    RICH = False
else:
    RICH = True

__all__ = ["Screen"]

PLAIN_SECONDS = 5.0  # between two lines of progress


class Screen:
    """Lines, a bar for the run that is going, tables."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._console = Console(highlight=False) if RICH and sys.stdout.isatty() else None
        self._bars: Progress | None = None
        self._name, self._total, self._last = "", 0, 0.0

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:6.1f} s  {f'{self._name}: ' if self._name else ''}{text}"
        if self._console:
            self._console.print(line, markup=False)
        else:
            print(line, flush=True)

    def start(self, name: str, total: int) -> None:
        """From here on lines and progress are of this run."""
        self._name, self._total, self._last = name, total, 0.0
        if self._console:
            columns = (TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.add_task(f"{name}: step", total=total)
            self._bars.start()

    def progress(self, step: int) -> None:
        if self._bars:
            self._bars.update(self._bars.task_ids[0], completed=step)
        elif time.monotonic() - self._last > PLAIN_SECONDS and step:
            self._last = time.monotonic()
            self.say(f"step {step} of {self._total}")

    def stop(self) -> None:
        if self._bars:
            self._bars.stop()
        self._bars, self._name = None, ""

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self._console:
            table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
            for name in head:
                table.add_column(name, overflow="fold")
            for row in rows:
                table.add_row(*row)
            self._console.print(table)
            return
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        print(f"\n{title}")
        for row in (head, ["-" * width for width in widths], *rows):
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def verdict(self, good: bool, text: str) -> None:
        if self._console and "NO_COLOR" not in os.environ:
            self._console.print(text, markup=False, style="bold green" if good else "bold red")
        else:
            print(text)
