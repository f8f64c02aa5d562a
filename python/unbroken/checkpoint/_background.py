"""The thread that saves while training goes on."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

__all__ = ["Background"]

_Item = tuple[Future[None], Callable[[], None]]


class Background:
    """One thread that does one thing after another. The process ends when it is done, or at once after leave().

    An executor's thread would do, if one could ever end a process without waiting for it.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[_Item | None] = SimpleQueue()
        self._thread = threading.Thread(target=_do, args=(self._work,), name=name, daemon=True)
        self._code: list[int] = []
        self._end = weakref.finalize(self, _end, weakref.ref(self), self._work, self._thread, self._code, os.getpid())

    def submit(self, work: Callable[[], None]) -> Future[None]:
        if not self._thread.ident:
            self._thread.start()
        done: Future[None] = Future()
        self._work.put((done, work))
        return done

    def shutdown(self) -> None:
        """Waits for all that was submitted."""
        self._end()

    def leave(self, code: int) -> None:
        """Nobody waits for the thread any more: it goes on until the process ends, which it then does with `code`."""
        self._code[:] = [code]


def _do(queue: SimpleQueue[_Item | None]) -> None:
    while (item := queue.get()) is not None:
        done, work = item
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits
            done.set_exception(error)
        else:
            done.set_result(None)
        del item, done, work  # what they hold must not live until the next item comes


def _end(
    owner: weakref.ref[Background],
    queue: SimpleQueue[_Item | None],
    thread: threading.Thread,
    code: list[int],
    pid: int,
) -> None:
    """At shutdown, at the end of the process, or when the Background is garbage: then the thread has nothing to do, and
    is not waited for, as garbage is found at any place of any thread, with any lock held."""
    if os.getpid() != pid or not thread.ident:
        return
    if code:
        # A thread that is in the engine must not find the interpreter gone when it comes back.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code[0])
    queue.put(None)
    if owner() is not None and thread is not threading.current_thread():
        thread.join()
