"""Finalizers run at any place of any thread, so they must not take a lock: the thread may hold it already.

`threading` holds a lock of its own where it makes containers, which is where garbage is found: when a thread begins,
and when one has ended. A save through the drop-ins hung there once.
"""

import subprocess
import sys

import pytest

HOLDING = """
import faulthandler, gc, threading
faulthandler.dump_traceback_later(20, exit=True)
names = ("_shutdown_locks_lock", "_active_limbo_lock")  # those that this Python has
locks = [getattr(threading, name) for name in names if hasattr(threading, name)]

class Held:
    def __enter__(self):
        gc.disable()
        for lock in locks:
            lock.acquire()
    def __exit__(self, *_):
        for lock in locks:
            lock.release()
"""

DROP_IN = """
import time, torch
from unbroken.checkpoint import _dcp_stage

arena = _dcp_stage.borrow()
staged = arena.stage({"x": torch.ones(1000)}, 0)
ended = threading.Event()
saver = threading.Thread(target=lambda: (arena.is_saved_here(), ended.set()))
saver.start()
ended.wait()
time.sleep(0.5)  # it has ended, and nobody has asked it yet
with arena.lock, Held():
    _dcp_stage.give_back(arena)
assert _dcp_stage.borrow() is arena
print("done")
"""

BACKGROUND = """
from unbroken.checkpoint._background import Background

background = Background("test")
background.submit(lambda: None).result()
thread = background._thread
ring = [background]
ring.append(ring)  # garbage only when somebody looks for cycles
del background, ring
with Held():
    gc.collect()
thread.join(10)
assert not thread.is_alive(), "it ends by itself"
print("done")
"""


@pytest.mark.parametrize("script", [DROP_IN, BACKGROUND], ids=["drop-in", "background"])
def test_no_finalizer_takes_a_lock(script):
    ran = subprocess.run([sys.executable, "-c", HOLDING + script], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "done", ran.stderr
