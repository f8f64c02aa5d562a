"""SIGTERM and SIGUSR1: save at the end of a step, leave with code 75, and go on from there."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import unbroken

SCRIPT = """
    import logging, os, sys, time
    import torch
    import unbroken

    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 1000
        def __getitem__(self, index):
            return torch.tensor(float(index))

    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    root, until, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    state = {"sum": torch.zeros(1, dtype=torch.float64), "model": torch.nn.Linear(1, 1)}
    loader = unbroken.data.DataLoader(Numbers(), global_batch_size=4, seed=1, num_workers=workers)
    with unbroken.Checkpointer(root, state, loader) as run:
        for batch in run.batches(until=until):
            state["sum"] += batch.double().sum() * run.step_number
            print("step", run.step_number + 1, os.getpid(), flush=True)
            time.sleep(0.02)
    print("done", state["sum"].item(), flush=True)
"""


class Process:
    """The script above, with its lines as they come."""

    def __init__(self, root, until=1000, workers=0):
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(root), str(until), str(workers)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines = []
        self.errors = []
        self._reader = threading.Thread(target=lambda: self.errors.extend(self.popen.stderr))
        self._reader.start()

    def read_until(self, start):
        for line in self.popen.stdout:
            self.lines.append(line.strip())
            if line.startswith(start):
                return line.strip()
        raise AssertionError(f"it ended without {start!r}: {''.join(self.errors)[-3000:]}")

    def finish(self, timeout=60):
        self.lines += [line.strip() for line in self.popen.stdout]
        code = self.popen.wait(timeout)
        self._reader.join()
        return code


@pytest.fixture
def started():
    running = []

    def start(*arguments, **options):
        running.append(Process(*arguments, **options))
        return running[-1]

    yield start
    for one in running:
        one.popen.kill()
        one.popen.wait()


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 2)])
def test_a_signal_in_mid_step_saves_that_step_and_the_next_start_goes_on_exactly(tmp_path, started, number, workers):
    one = started(tmp_path / "stopped", workers=workers)
    one.read_until("step 5 ")
    one.popen.send_signal(number)
    assert one.finish() == unbroken.EXIT_STOPPED == 75, one.errors
    last = int(one.lines[-1].split()[1])
    state = {"sum": torch.zeros(1, dtype=torch.float64)}
    assert unbroken.load(tmp_path / "stopped", state) == last
    assert any("exit code 75" in line for line in one.errors)

    two = started(tmp_path / "stopped", until=last + 5, workers=workers)
    assert two.finish() == 0, two.errors
    assert int(two.lines[0].split()[1]) == last + 1
    undisturbed = started(tmp_path / "undisturbed", until=last + 5)
    assert undisturbed.finish() == 0, undisturbed.errors
    assert two.lines[-1] == undisturbed.lines[-1]


def test_a_second_signal_leaves_at_once(tmp_path, started):
    one = started(tmp_path)
    one.read_until("step 3 ")
    one.popen.send_signal(signal.SIGSTOP)  # so that both arrive in one step
    one.popen.send_signal(signal.SIGTERM)
    one.popen.send_signal(signal.SIGUSR1)
    one.popen.send_signal(signal.SIGCONT)
    assert -one.finish() in (signal.SIGTERM, signal.SIGUSR1)


SLOW = """
    import logging, sys, time
    import torch
    import unbroken
    from unbroken.checkpoint import _checkpointer

    _checkpointer._STOP_SECONDS = 1.0
    logging.basicConfig(level=logging.INFO)
    root, how = sys.argv[1:]
    state = {"x": torch.zeros(1000)}
    every = unbroken.Every(steps=1) if how == "in flight" else None
    run = unbroken.Checkpointer(root, state, every=every, keep=None)
    run.resume()
    for step in range(1, 1000):
        state["x"].fill_(step)
        run.step()
        if step == 2 or how == "explicit":
            run.save()
        if step == 2:
            run.last_save.wait()
            print("ready", flush=True)
            sys.stdin.readline()
        time.sleep(0.02)
"""
DELAY_SECONDS = 1000


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("how", ["at the stop", "in flight", "explicit", "in a with block"])
def test_a_disk_that_is_too_slow_does_not_keep_the_run_from_leaving_in_time(tmp_path, how):
    """Every fdatasync takes much longer than the test waits; it may be the last save's or that of the one before."""
    script = textwrap.dedent(SLOW)
    if how == "in a with block":
        head, body = script.split("run.resume()")
        script = f"{head}with run:\n" + textwrap.indent(f"run.resume(){body}", "    ")
    one = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run"), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    tracer = None
    try:
        assert one.stdout.readline() == "ready\n"
        slow = ["-e", "trace=fdatasync", "-e", f"inject=fdatasync:delay_enter={DELAY_SECONDS}s"]
        tracer = subprocess.Popen(
            ["strace", "-f", "-o", tmp_path / "log", *slow, "-p", str(one.pid)], stderr=subprocess.PIPE, text=True
        )
        assert "attached" in tracer.stderr.readline()
        one.stdin.write("go\n")
        one.stdin.flush()
        if how in ("in flight", "explicit"):  # the slow save is there already
            wait_for(lambda: "fdatasync" in (tmp_path / "log").read_text())
        one.send_signal(signal.SIGTERM)
        wait_for(lambda: "State:\tZ" in Path(f"/proc/{one.pid}/status").read_text())
        tracer.kill()  # strace holds on to a thread that it delays, even when its process has ended
        _, log = one.communicate(timeout=60)
    finally:
        if tracer is not None:
            tracer.kill()
            tracer.wait()
        one.kill()
        one.wait()
    assert one.returncode == 75, log
    assert "is not durable within 1 s of the signal" in log
    assert unbroken.load(tmp_path / "run", {"x": torch.zeros(1000)}) == 2


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_signal_to_the_whole_group_leaves_loader_workers_alone(tmp_path, started):
    """torchrun signals the process group: workers that died of it would break the step in progress."""
    script_workers = 2
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), "1000", str(script_workers)]
    group = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        for line in group.stdout:
            if line.startswith("step 5 "):
                os.killpg(group.pid, signal.SIGTERM)
                break
        _, log = group.communicate(timeout=60)
        assert group.returncode == 75, log
    finally:
        group.kill()
        group.wait()


def test_signals_are_what_they_were_after_close(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with unbroken.Checkpointer(tmp_path, {"x": 1}) as run:
        run.resume()
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    with unbroken.Checkpointer(tmp_path, {"x": 1}, signals=False) as run:
        run.resume()
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before


def test_a_checkpointer_in_another_thread_leaves_signals_alone(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with unbroken.Checkpointer(tmp_path, {"x": 1}) as run:
            run.resume()
            seen.append(signal.getsignal(signal.SIGTERM))
            run.step()
            run.save().wait()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
    assert unbroken.load(tmp_path, {"x": 0}) == 1


def test_a_child_process_of_the_user_still_dies_of_a_signal(tmp_path):
    with unbroken.Checkpointer(tmp_path, {"x": 1}) as run:
        run.resume()
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


TORCHRUN = """
    import os, sys
    import torch, torch.distributed as dist
    import unbroken
    dist.init_process_group("gloo")
    root, until = sys.argv[1], int(sys.argv[2])
    state = {"x": torch.zeros(1)}
    loader = unbroken.data.DataLoader(list(range(100)), global_batch_size=4, seed=1)
    with unbroken.Checkpointer(root, state, loader, unbroken.Every(steps=4), keep=None) as run:
        for batch in run.batches(until=until):
            total = batch.sum().reshape(1)
            dist.all_reduce(total)
            state["x"] += total * run.step_number
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and run.step_number == 6 and dist.get_rank() == 1:
                os.kill(os.getpid(), 9)
    if dist.get_rank() == 0:
        print("restarts", os.environ["TORCHELASTIC_RESTART_COUNT"], "sum", state["x"].item(), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank_and_the_run_is_as_if_nothing_had_been(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(TORCHRUN))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    # Without the last, torchrun keeps one store over restarts, and gloo connects to the addresses of the dead.
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [*command, tmp_path / "train.py", tmp_path / "run", "12"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    words = done.stdout.split()
    assert words[:2] == ["restarts", "1"]
    loader = unbroken.data.DataLoader(list(range(100)), global_batch_size=4, seed=1)
    batches = loader.forever()
    expected = sum(float(next(batches).sum()) * step for step in range(12))
    assert float(words[3]) == expected
