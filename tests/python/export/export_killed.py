"""`export_killed.py ROOT OUT POINT OPTIONS`: exports in a child that kills itself before its POINT-th change to a disk.

Prints "killed", or "done" when there are not so many. More lines on stdin give more points, as importing torch is what
takes the time: POINT and OUT on each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import unbroken

CHANGES = ("mkdir", "rmdir", "open", "write", "fsync", "rename", "unlink")


def die_at(point: int) -> None:
    """In place of the call itself, so that it is not carried out. Everything before it was."""
    left = point

    def counted(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))


def main() -> None:
    root, options = sys.argv[1], json.loads(sys.argv[2])
    for line in sys.stdin:
        point, out = json.loads(line)
        child = os.fork()
        if child == 0:
            die_at(point)
            unbroken.export_safetensors(root, out, **options)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}", flush=True)


if __name__ == "__main__":
    unbroken.export_safetensors  # noqa: B018  # imports torch
    main()
