"""The longest time for which other Python threads stand still: who holds the GIL, and for how long."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self


class Stall:
    """A thread that does nothing but look at the clock, and keeps the longest gap. With a `with` around the work.

    Beside any thread that runs Python the gap is the interpreter's switch interval, 5 ms; longer ones are calls that
    keep the GIL, or a machine that gives the thread no core. beside_python() tells the second.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._spin, daemon=True)

    def _spin(self) -> None:
        last = time.perf_counter()
        while not self._stop:
            now = time.perf_counter()
            if now - last > self.seconds:
                self.seconds = now - last
            last = now

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop = True
        self._thread.join()


def beside_python(seconds: float) -> float:
    """The longest gap beside a loop of plain Python that runs for so long: what the machine itself does."""
    with Stall() as stall:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
    return stall.seconds
