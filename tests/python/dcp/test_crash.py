"""A save that is killed at any system call that changes the directory: what is there is the old one, the new one, or
none, for Unbroken's reader and for stock's alike."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from dcp_parts import differences, failure, load_ours, load_stock, save_ours
from saver_process import a_state

HERE = Path(__file__).parent
CHANGES = ["unlinkat", "linkat", "rename", "renameat", "renameat2", "pwrite64", "ftruncate", "fallocate"]
CHANGES += ["fsync", "fdatasync", "mkdir", "mkdirat", "openat"]

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


class Saver:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, HERE / "saver_process.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def save(self, directory, number, call, kill_at, log):
        """Killed on entry of the kill_at-th such call, before it has an effect. Whether it came to that."""
        self.process.stdin.write(f"{directory} {number}\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        tracer = subprocess.Popen(
            ["strace", "-f", "-o", log, "-e", f"inject={call}:signal=KILL:when={kill_at}", "-p", str(child)],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "attached" in tracer.stderr.readline()
        os.kill(child, signal.SIGCONT)
        status = int(self.process.stdout.readline())
        tracer.communicate(timeout=60)
        assert status in (0, signal.SIGKILL), status
        return status != 0


@pytest.fixture(scope="module")
def saver():
    saver = Saver()
    yield saver
    saver.process.stdin.close()
    assert saver.process.wait(30) == 0


def found(load, directory):
    """The number of the checkpoint that a reader finds; None when it finds none."""
    state = a_state(0)
    try:
        load(state, directory)
    except BaseException:  # noqa: BLE001  # DCP's own is one of these
        return None
    number = state["n"]
    assert not differences(state, a_state(number))
    return number


@pytest.mark.parametrize("old", [None, 1])
def test_killed_at_every_change(old, saver, tmp_path):
    seen = set()
    kills = 0
    for call in CHANGES:
        for kill_at in range(1, 100):
            directory = tmp_path / f"{call}-{kill_at}"
            if old is not None:
                save_ours(a_state(old), directory)
            was_killed = saver.save(directory, 2, call, kill_at, tmp_path / "log")
            ours = found(load_ours, directory)
            assert found(load_stock, directory) == ours, (call, kill_at)
            if not was_killed:
                assert ours == 2
                break
            assert ours in (old, None, 2), (call, kill_at)
            seen.add(ours)
            kills += 1
            if kills % 5 == 0:  # what is left is in nobody's way
                save_ours(a_state(3), directory, overwrite=True)
                assert found(load_ours, directory) == found(load_stock, directory) == 3
        else:
            raise AssertionError("it is killed for ever")
    assert kills > 25
    assert seen == {old, None, 2}  # 2: the directory was not yet synced after the marker was in it


def test_a_process_that_dies_between_the_shards_and_the_marker(tmp_path):
    """All shards and their part of the manifest are there and durable."""
    script = """
        import os, signal, sys, warnings
        import torch.distributed.checkpoint as dcp
        import unbroken
        from saver_process import a_state
        warnings.simplefilter("ignore")
        class Dies(unbroken.UnbrokenWriter):
            def finish(self, metadata, results):
                os.kill(os.getpid(), signal.SIGKILL)
        dcp.save(a_state(2), storage_writer=Dies(sys.argv[1]), no_dist=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), tmp_path / "c"], cwd=HERE, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "c" / "__0.json").exists()
    assert "did not finish" in str(failure(lambda: load_ours(a_state(0), tmp_path / "c")))
    failure(lambda: load_stock(a_state(0), tmp_path / "c"))
    save_ours(a_state(3), tmp_path / "c")
    assert torch.equal(load_stock(a_state(0), tmp_path / "c")["t3"], torch.full((2000,), 3.0))
