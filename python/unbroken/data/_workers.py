"""The end of torch's worker processes. They ignore SIGTERM, which is what torch and Python would end them with."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import weakref
from typing import Any, Protocol

import torch.utils.data

__all__ = ["close_at_exit", "end_pass", "shut_down"]


class _Closeable(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[Any] = weakref.WeakSet()
_registered_in: int | None = None  # a process; a child made by fork must register anew


def shut_down(torch_loader: torch.utils.data.DataLoader[Any], batches: Any) -> list[str]:
    """Ends the workers of the pass ``batches``, and those that torch's loader keeps for the next one.

    Returns:
        How those ended that did not end of themselves.
    """
    if torch_loader._iterator is batches:
        torch_loader._iterator = None
    # Without waiting for it to be collected: a traceback may hold it for long.
    if not hasattr(batches, "_shutdown_workers"):
        return []
    batches._shutdown_workers()
    died = [
        f"the loader's worker process {worker.pid} ended with exit code {worker.exitcode} (negative: by that signal)"
        for worker in batches._workers
        if worker.exitcode not in (0, None)
    ]
    for worker in batches._workers:
        if worker.is_alive():
            worker.kill()
            worker.join()
    return died


def end_pass(torch_loader: torch.utils.data.DataLoader[Any], batches: Any) -> list[str]:
    """Ends the pass, and its workers unless they are to be kept for the next one."""
    return [] if torch_loader.persistent_workers else shut_down(torch_loader, batches)


def close_at_exit(loader: _Closeable) -> None:
    """Closes ``loader`` before this process ends, if it still exists then.

    Python joins its child processes at exit. Idle workers wait for work as long as their parent lives, and would never
    be joined.
    """
    global _registered_in
    _open.add(loader)
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        atexit.register(_close_all)
        # Children of multiprocessing do not run atexit's functions.
        multiprocessing.util.Finalize(None, _close_all, exitpriority=100)


def _close_all() -> None:
    if _registered_in == os.getpid():
        for loader in list(_open):
            loader.close()
