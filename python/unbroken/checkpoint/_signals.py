"""SIGTERM and SIGUSR1 as a request to save and leave."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

__all__ = ["EXIT_STOPPED", "StopSignals"]

_logger = logging.getLogger(__name__)
# EX_TEMPFAIL of sysexits.h: not done, worth starting again.
EXIT_STOPPED = 75
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Turns the first signal into `requested`; the second one does what it would have done without us."""

    def __init__(self) -> None:
        self.since: float | None = None  # when the first one came, by time.monotonic()
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.since is not None

    def install(self) -> None:
        """Only Python's main thread may; elsewhere signals stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            _logger.info("signals are left alone: the Checkpointer does not run in the main thread")
            return
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)

    def uninstall(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle and before is not None:
                signal.signal(number, before)
        self._before.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._pid and not self.requested:
            self.since = time.monotonic()
            name = signal.Signals(number).name
            _logger.warning("%s: the step after the one in progress is saved, then this run ends", name)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
