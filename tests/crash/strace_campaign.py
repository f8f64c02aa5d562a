"""Faults from outside: strace kills or fails one system call of the real process, in turn, and the run must survive it.

What we inject ourselves shares our blind spots, so here the engine is the one that is shipped and the fault comes from
the kernel's side. A process that has imported torch and unbroken forks a child for each point; strace attaches to it
and injects a fault at the n-th call of one system call that changes files. There are three scenes: the child resumes a
run that has checkpoints, trains on, saves twice and retains; it is the first start, on a root that is not there; it
resumes where the file system has no links, and names are made in another way.

- KILL, EIO, ENOSPC: afterwards two fresh starts, one after the other, must find the same checkpoint, at least as new as
  the newest that the child had reported durable, with exactly the state of that step.
- STOP, STOP-IDLE: the child is stopped there (SIGSTOP), the next start goes on from what it finds and saves (or, idle,
  saves nothing), and then the child wakes. What it had still to do, a marker or a deletion, must change nothing: a
  fresh start finds what the newest start had, and no step is called durable that the start after it gave up.

    python tests/crash/strace_campaign.py --all
    python tests/crash/strace_campaign.py --sample 10 --seed 7
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import importlib
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import unbroken

# All system calls by which the engine changes files; of openat only those count that create. strace counts the calls of
# each thread, so `when` is the n-th of some thread.
SYSCALLS = (
    "openat",
    "fallocate",
    "pwrite64",
    "ftruncate",
    "fdatasync",
    "fsync",
    "renameat",
    "linkat",
    "unlinkat",
    "mkdirat",
    "mkdir",
)
FAULTS = ("KILL", "EIO", "ENOSPC", "STOP", "STOP-IDLE")
# What these cannot say: a name or a sync has no need of space.
IMPOSSIBLE = {("ENOSPC", call) for call in ("unlinkat", "ftruncate")}
FIRST_STEPS, SAVE_EVERY, KEEP = 6, 2, 2
SECONDS = 60.0


@dataclass(frozen=True)
class Scene:
    """What the victim does, and what of it is hit."""

    name: str
    first_steps: int  # of the run before it; 0: there is none, and no root
    steps: int
    calls: tuple[str, ...] = SYSCALLS
    always: tuple[str, ...] = ()  # faults that are there all the time

    def options(self, call: str) -> list[str]:
        also = [fault.split("=")[1].split(":")[0] for fault in self.always]
        return [f"trace={','.join([call, *also])}", *self.always]


SCENES = (
    Scene("resumed", FIRST_STEPS, 4),
    Scene("first-start", 0, 2),
    Scene("no-links", FIRST_STEPS, 2, ("renameat2",), ("inject=linkat:error=EPERM",)),
)


@dataclass(frozen=True)
class Point:
    """One fault: the `when`-th `call` of a thread."""

    scene: Scene
    call: str
    when: int
    fault: str

    def __str__(self) -> str:
        return f"{self.scene.name}-{self.call}-{self.when}-{self.fault}"

    def injection(self) -> str:
        kind, _, _ = self.fault.partition("-")
        what = f"signal={kind}" if kind in ("KILL", "STOP") else f"error={kind}"
        return f"inject={self.call}:{what}:when={self.when}"


def make_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"w{i}": torch.randn(40_000 + i, generator=generator) for i in range(4)}


def train(state: dict[str, torch.Tensor], step: int, life: int = 0) -> None:
    """One step; the state after it is a function of the numbers of the steps, and of the lives that did them."""
    for i, tensor in enumerate(state.values()):
        tensor.mul_(0.9).add_(float((step * 7 + i) % 11 + 100 * life))


def digest(state: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in state.values():
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


def digests(steps: int) -> list[str]:
    """Of the state after 0, 1, ... steps."""
    state, found = make_state(), []
    for step in range(1, steps + 2):
        found.append(digest(state))
        train(state, step)
    return found


@dataclass(frozen=True)
class Event:
    """What a life says of itself: what it resumed from, and each step that became durable."""

    what: str
    generation: int
    step: int
    digest: str


def run(root: Path, report: Path, steps: int, *, life: int = 0, save_every: int = SAVE_EVERY) -> None:
    """The run: resumes, trains `steps` steps, saves, retains; says in `report` what became durable."""
    state = make_state()
    with (
        report.open("a", buffering=1) as file,
        unbroken.Checkpointer(root, state, keep=unbroken.Keep(last=KEEP), vote_timeout=SECONDS, signals=False) as run,
    ):

        def say(what: str, step: int) -> None:
            file.write(json.dumps([what, run.generation, step, digest(state)]) + "\n")

        first = run.resume()
        say("resumed", first)
        for step in range(first + 1, first + steps + 1):
            train(state, step, life)
            run.step()
            if step % save_every == 0:
                try:
                    run.save().wait()
                except unbroken.errors.Error:
                    logging.getLogger(__name__).info("a save failed", exc_info=True)
                    continue
                say("durable", step)


def read_report(path: Path) -> list[Event]:
    return [Event(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def resume(root: Path, answer: Path) -> None:
    """A fresh start: what it goes on from, and the state that it has then."""
    state = make_state()
    with unbroken.Checkpointer(root, state, signals=False) as run:
        step = run.resume()
    answer.write_text(json.dumps({"step": step, "digest": digest(state)}))


def fork(work: Callable[[], Any]) -> int:
    """A child that does `work` and exits with 0, with 1 when an error of the engine ended it, with 3 at any other."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except unbroken.errors.Error as error:
        logging.getLogger(__name__).info("%s: %s", type(error).__name__, error)
    except BaseException:  # noqa: BLE001  # the parent sees the exit code, the reader the trace
        traceback.print_exc()
        code = 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def await_exit(pid: int, between: Callable[[], None] = lambda: None) -> int:
    """The child's exit code, or minus the signal that ended it. TimeoutError when it hangs."""
    deadline = time.monotonic() + 2 * SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        between()
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"process {pid} hung")


def traced(
    work: Callable[[], Any], log: Path, *expressions: str, when_stopped: Callable[[], None] | None = None
) -> int:
    """Runs `work` in a child below strace; returns how it ended. When it stops, calls `when_stopped` and wakes it."""
    gate, opened = os.pipe()

    def begin() -> None:
        os.close(opened)  # the child's own end, without which the gate would never be seen closed
        os.read(gate, 1)
        work()

    pid = fork(begin)
    os.close(gate)
    options = [word for expression in expressions for word in ("-e", expression)]
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-y", "-o", str(log), *options, "-p", str(pid)], stderr=subprocess.PIPE, text=True
    )
    try:
        _await_tracer(pid, tracer)
        os.close(opened)
        if when_stopped is not None and _await_stop(pid, log):
            try:
                when_stopped()
            finally:
                os.kill(pid, signal.SIGCONT)
            woken = 1

            def wake() -> None:  # another thread may come to its n-th call, too
                nonlocal woken
                if log.read_text().count("--- SIGSTOP {") > woken:
                    woken += 1
                    os.kill(pid, signal.SIGCONT)

            return await_exit(pid, wake)
        return await_exit(pid)
    finally:
        tracer.wait(timeout=SECONDS)


def _await_tracer(pid: int, tracer: subprocess.Popen[str]) -> None:
    status = Path(f"/proc/{pid}/status")
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        found = re.search(r"TracerPid:\s+(\d+)", status.read_text())
        if found and found[1] != "0":
            return
        if tracer.poll() is not None:
            assert tracer.stderr is not None
            raise RuntimeError(f"strace cannot attach: {tracer.stderr.read().strip()}")
        time.sleep(0.002)
    raise TimeoutError("strace did not attach")


def _await_stop(pid: int, log: Path) -> bool:
    """Whether it stopped; False when it ended without, as the call may come less often than in the run that counted."""
    deadline = time.monotonic() + 2 * SECONDS
    while time.monotonic() < deadline:
        if log.exists() and "--- stopped by SIGSTOP ---" in log.read_text():
            return True
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        time.sleep(0.002)
    raise TimeoutError(f"process {pid} neither stopped nor ended")


class Campaign:
    """All points, each on a root of its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.template = place / "template"
        self.expected = digests(FIRST_STEPS + max(scene.steps for scene in SCENES))
        report, modules = place / "template.report", place / "template.modules"

        def prepare() -> None:
            run(self.template, report, FIRST_STEPS)
            modules.write_text("\n".join(sys.modules))

        if await_exit(fork(prepare)) != 0:
            raise RuntimeError("the run without a fault failed")
        # What a run imports is there before the forks: the faults are not for Python's own files, and all goes faster.
        for name in modules.read_text().splitlines():
            with contextlib.suppress(ImportError):  # some are no modules of their own
                importlib.import_module(name)

    def points(self) -> list[Point]:
        """Every call that changes files in a run without a fault, times every fault."""
        return [
            Point(scene, call, when, fault)
            for scene in SCENES
            for call, places in self._calls(scene).items()
            for when in places
            for fault in FAULTS
            if (fault, call) not in IMPOSSIBLE
        ]

    def _calls(self, scene: Scene) -> dict[str, list[int]]:
        """For each call, as the how-manyth of some thread it changes files."""
        name = f"count-{scene.name}"
        root, log = self._root(scene, name), self.place / f"{name}.log"
        options = scene.options(",".join(scene.calls))
        code = traced(lambda: run(root, self.place / f"{name}.report", scene.steps), log, *options)
        if code != 0:
            raise RuntimeError(f"the traced run without a fault ended with {code}")
        seen: collections.Counter[tuple[str, str]] = collections.Counter()
        changes: dict[str, set[int]] = {call: set() for call in scene.calls}
        others: set[int] = set()  # openat elsewhere: of Python, say
        below = re.compile(re.escape(str(root)) + '[/>"]')
        for line in log.read_text().splitlines():
            if found := re.match(r"(\d+) +(\w+)\((.*)", line):
                thread, call, rest = found.groups()
                seen[thread, call] += 1
                if call == "openat" and not below.search(rest):
                    others.add(seen[thread, call])
                elif call in changes and (call != "openat" or "O_CREAT" in rest):
                    changes[call].add(seen[thread, call])
        if not all(changes[call] for call in scene.calls if call not in ("mkdir", "mkdirat")):
            raise RuntimeError(f"{scene.name}: some call does not come: {changes}")
        shutil.rmtree(root)
        # A fault hits the n-th call of every thread: no call of something else may be among them.
        return {call: sorted(places - others if call == "openat" else places) for call, places in changes.items()}

    def check(self, point: Point) -> str:
        """Injects the fault; returns how the victim ended. AssertionError says what did not hold."""
        return self._check_stop(point) if point.fault.startswith("STOP") else self._check_fault(point)

    def _check_fault(self, point: Point) -> str:
        name, scene = str(point), point.scene
        root, report, log = self._root(scene, name), self.place / f"{name}.report", self.place / f"{name}.log"
        code = traced(lambda: run(root, report, scene.steps), log, *scene.options(point.call), point.injection())
        assert code != 3, "an exception that is not the engine's ended the run"
        if point.fault == "KILL":
            assert code in (-signal.SIGKILL, 0), f"the victim ended with {code}"
        durable = max([scene.first_steps, *(event.step for event in read_report(report))])
        first, second = (self._resume(root, name) for _ in range(2))
        assert first["step"] >= durable, f"step {durable} was durable, the next start found {first['step']}"
        assert first["digest"] == self.expected[first["step"]], f"the state of step {first['step']} has other bits"
        assert first == second, f"two starts in a row found {first} and {second}"
        shutil.rmtree(root, ignore_errors=True)
        log.unlink()
        return "killed" if code < 0 else "went on" if code == 0 else "stopped with an error"

    def _check_stop(self, point: Point) -> str:
        name, scene = str(point), point.scene
        root, log = self._root(scene, name), self.place / f"{name}.log"
        reports = [self.place / f"{name}.report{life}" for life in (0, 1)]
        every = 1000 if point.fault == "STOP-IDLE" else SAVE_EVERY
        taken: list[int] = []

        def take_over() -> None:
            taken.append(await_exit(fork(lambda: run(root, reports[1], scene.steps, life=1, save_every=every))))

        code = traced(
            lambda: run(root, reports[0], scene.steps),
            log,
            *scene.options(point.call),
            point.injection(),
            when_stopped=take_over,
        )
        assert code in (0, 1), f"the woken life ended with {code}"
        assert taken in ([], [0]), f"the start after a stopped life ended with {taken}"
        lives = sorted((events for path in reports if (events := read_report(path))), key=lambda e: e[0].generation)
        for older, newer in itertools.pairwise(lives):
            assert older[0].generation < newer[0].generation, f"two lives are generation {newer[0].generation}"
            assert older[-1].step <= newer[0].step, f"step {older[-1].step} was called durable and then given up"
        found = self._resume(root, name)
        last = lives[-1][-1]
        assert found == {"step": last.step, "digest": last.digest}, f"the next start found {found}, not {last}"
        shutil.rmtree(root)
        log.unlink()
        return "did not stop" if not taken else "was fenced" if code else "went on to the end"

    def _resume(self, root: Path, name: str) -> dict[str, Any]:
        answer = self.place / f"{name}.answer"
        answer.unlink(missing_ok=True)
        code = await_exit(fork(lambda: resume(root, answer)))
        assert code == 0, f"the next start ended with {code}"
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    def _root(self, scene: Scene, name: str) -> Path:
        root = self.place / name
        if scene.first_steps:
            shutil.copytree(self.template, root)
        return root


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every point")
    which.add_argument("--sample", type=int, default=12, help="so many points")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="of the sample")
    arguments = parser.parse_args()
    if shutil.which("strace") is None:
        print("strace is not installed: apt-get install strace", file=sys.stderr)
        return 2
    logging.getLogger("unbroken").setLevel(logging.CRITICAL)  # the faults are wanted
    torch.set_num_threads(1)
    ends: collections.Counter[tuple[str, str]] = collections.Counter()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="unbroken-strace-") as place:
        campaign = Campaign(Path(place))
        points = campaign.points()
        chosen = (
            points
            if arguments.all
            else random.Random(arguments.seed).sample(points, min(arguments.sample, len(points)))
        )
        print(f"{len(chosen)} of {len(points)} points, seed {arguments.seed}", flush=True)
        for point in chosen:
            try:
                ends[point.fault, campaign.check(point)] += 1
            except (AssertionError, TimeoutError) as failure:
                failures += 1
                log = campaign.place / f"{point}.log"
                tail = "\n  ".join(log.read_text().splitlines()[-20:]) if log.exists() else "there is no log"
                print(f"FAILED {point}: {failure}\n  {tail}", flush=True)
    for (fault, end), count in sorted(ends.items()):
        print(f"{fault:9} {end:22} {count}")
    print(f"{len(chosen) - failures} passed, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
