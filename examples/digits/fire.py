"""Runs the training script under torchrun and, when told to, under fire; says from the disk where each kill fell.

The product is not slowed down for this and has no hook for it: the kernel tells the moment that a save's directory or
file appears (inotify), and the SIGKILL follows. Whether the kill came in time is then read from the disk: a save whose
`.metadata` got there after all counts as *after the commit*, and another shot is drawn.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from watch import Attempt, LedgerTail, RootWatch, alive, descendants, kill, ranks_of

__all__ = ["BETWEEN", "COMMIT", "LATE", "FireError", "Hit", "Shot", "Training", "draw_shots", "torchrun_command"]

COMMIT, BETWEEN, LATE = "in a save", "between saves", "after the commit"
ONE, ALL, EVERYTHING = "one rank", "all ranks", "everything"
PATIENCE_SECONDS = 120.0  # without a step trained: something hangs
DEATH_SECONDS = 60.0  # from a kill to the end of all of that life's ranks (torchrun ends the survivors)
EXTRA_SHOTS = 6  # for shots that came too late

# By default torchrun keeps one key-value store over all restarts, and a rank that is started again can take the address
# that a dead one had left there: gloo then cannot connect, and the restart is lost. With this, every start has its own.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


class FireError(Exception):
    """The run did not do what it had to. The message says what; the log's end is with it."""


@dataclass(frozen=True)
class Shot:
    """When and whom to kill, drawn beforehand."""

    where: str  # COMMIT or BETWEEN
    who: str  # ONE, ALL (torchrun stays and restarts them) or EVERYTHING (the command is typed again)
    victim: int  # the rank, for ONE
    let_through: int  # saves of this life before the shot is due
    trigger: str = ""  # COMMIT: "files" (of a save being written), "votes" or "manifest"
    fraction: float = 0.0  # COMMIT, "files": how far into the time that a save takes
    steps_after: int = 0  # BETWEEN: steps after the last save

    @property
    def target(self) -> str:
        return {ONE: f"rank {self.victim}", ALL: "all ranks", EVERYTHING: "torchrun and all"}[self.who]

    @property
    def restarted_by(self) -> str:
        return "typed again" if self.who == EVERYTHING else "torchrun"


@dataclass(frozen=True)
class Hit:
    """Where a shot fell."""

    shot: Shot
    fell: str  # COMMIT, BETWEEN or LATE
    save_step: int | None  # of the save that was being made
    commit_step: str  # COMMIT: how far its commit had come
    generation: int
    step: int  # the last step that all ranks had trained
    seconds: float  # since the run began


def draw_shots(draw: random.Random, every: int, ranks: int) -> list[Shot]:
    """Three in a save and three between saves; of each kind one on one rank, one on all ranks, one on everything."""
    triggers = ["files", "votes", "manifest"]
    draw.shuffle(triggers)
    targets = (ONE, ALL, EVERYTHING)
    shots = [draw_shot(draw, COMMIT, who, how, every, ranks) for who, how in zip(targets, triggers, strict=True)]
    shots += [draw_shot(draw, BETWEEN, who, "", every, ranks) for who in targets]
    draw.shuffle(shots)
    return shots


def draw_shot(draw: random.Random, where: str, who: str, trigger: str, every: int, ranks: int) -> Shot:
    # A rank that has voted is no longer needed for the commit; without rank 0, which coordinates it, there is none.
    voted = trigger in ("votes", "manifest")
    return Shot(
        where=where,
        who=who,
        victim=draw.randrange(1 if voted else ranks),
        let_through=draw.randint(0, 2) if where == COMMIT else draw.randint(1, 2),
        trigger=trigger,
        fraction=draw.uniform(0.0, 0.9),
        steps_after=draw.randint(every // 4, every * 3 // 4),
    )


@dataclass
class Training:
    """One run of train.py on its own root, from the first start to its end, however often it dies in between."""

    directory: Path  # gets run/, ledger/ and log
    command: list[str]  # torchrun's, without root and ledger
    ranks: int
    every: int
    say: Callable[[str], None]
    progress: Callable[[int], None]
    shots: list[Shot] = field(default_factory=list)
    draw: random.Random = field(default_factory=random.Random)  # for the shots that replace late ones
    save_seconds: float = 0.05  # how long a save's directory is there before its marker is

    hits: list[Hit] = field(default_factory=list)
    starts: int = 0  # how often the command was typed

    def run(self) -> None:
        """Until the training is done. Raises FireError when it does not get there."""
        (self.directory / "run").mkdir(parents=True)
        self._watch = RootWatch(self.directory / "run")
        self._ledger = LedgerTail(self.directory / "ledger", self.ranks)
        self._log = (self.directory / "log").open("ab")
        self._began = time.monotonic()
        self._extra = EXTRA_SHOTS
        self._processes: dict[int, int] = {}
        try:
            self._type_command()
            while self._torchrun.poll() is None:
                self._turn()
            self._ledger.poll()
            if self._torchrun.returncode:
                raise self._error(f"torchrun ended with exit code {self._torchrun.returncode}")
        finally:
            kill([self._torchrun.pid, *descendants(self._torchrun.pid)])
            self._torchrun.wait()
            self._watch.wait(0)
            self._watch.close()
            self._log.close()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def commit_seconds(self) -> list[float]:
        """From a save's directory to its marker, of all saves that were committed."""
        return [attempt.seconds for attempt in self._watch.attempts.values() if attempt.committed]

    def _turn(self) -> None:
        """Takes in what happened, and shoots when the moment has come."""
        self._watch.wait(0.002 if self.shots else 0.05)
        if self._shot_is_due():
            self._shoot()
        if self._ledger.poll():
            self._moved = time.monotonic()
            if self._ledger.generation > self._generation and self._ledger.step:
                self._begin_life()
            self.progress(self._ledger.step)
        elif time.monotonic() - self._moved > PATIENCE_SECONDS:
            raise self._error(f"no step was trained for {PATIENCE_SECONDS:.0f} s")

    # ---- lives -------------------------------------------------------------------------------------------------

    def _type_command(self) -> None:
        self.starts += 1
        self._generation = self._ledger.generation  # the last one known; the next is a new life
        self._moved = time.monotonic()
        command = [*self.command, str(self.directory / "run"), "--ledger", str(self.directory / "ledger")]
        self._torchrun = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | ENVIRONMENT
        )

    def _begin_life(self) -> None:
        self._generation = self._ledger.generation
        self._processes = ranks_of(self._torchrun.pid)
        before = self._ledger.first_steps[self._generation] - 1
        where = f"goes on after step {before}" if before else "begins at the first step"
        self.say(f"generation {self._generation} {where}")

    # ---- aiming ------------------------------------------------------------------------------------------------

    def _saves(self) -> tuple[list[Attempt], Attempt | None]:
        """This life's committed saves, and the one being made."""
        mine = [attempt for attempt in self._watch.attempts.values() if attempt.generation == self._generation]
        being_made = [attempt for attempt in mine if not attempt.committed and not attempt.removed]
        return [attempt for attempt in mine if attempt.committed], being_made[-1] if being_made else None

    def _shot_is_due(self) -> bool:
        if not self.shots or not self._processes:
            return False
        shot = self.shots[0]
        done, being_made = self._saves()
        if len(done) < shot.let_through:
            return False
        if shot.where == BETWEEN:
            last = max((attempt.step for attempt in done), default=0)
            return being_made is None and self._ledger.step >= last + shot.steps_after
        if being_made is None:
            return False
        if shot.trigger == "files":
            return being_made.seconds >= shot.fraction * self.save_seconds
        parts = {f"__{rank}.json" for rank in range(self.ranks)}
        return bool(being_made.files & parts) if shot.trigger == "votes" else "manifest.json" in being_made.files

    def _shoot(self) -> None:
        shot = self.shots.pop(0)
        ranks = list(self._processes.values())
        rest = descendants(self._torchrun.pid) if shot.who == EVERYTHING else []
        kill([self._processes[shot.victim]] if shot.who == ONE else ranks)
        if shot.who == EVERYTHING:
            kill([self._torchrun.pid, *rest])
        step, seconds = max(step for _, step in self._ledger.at), self.seconds
        _, open_at_kill = self._saves()
        files_at_kill = set(open_at_kill.files) if open_at_kill else set()
        self._await_death(ranks)
        self._hit(shot, open_at_kill, files_at_kill, step, seconds)
        self._processes = {}
        if shot.who == EVERYTHING:
            self._torchrun.wait()
            self.say("the same command is typed again")
            self._type_command()
        else:
            self._generation = self._ledger.generation
            self.say("torchrun starts the ranks again")

    def _await_death(self, ranks: list[int]) -> None:
        deadline = time.monotonic() + DEATH_SECONDS
        while any(alive(pid) for pid in ranks):
            self._watch.wait(0.02)
            if time.monotonic() > deadline:
                raise self._error(f"a rank was still alive {DEATH_SECONDS:.0f} s after the kill")
        self._watch.wait(0)
        self._ledger.poll()
        self._moved = time.monotonic()

    def _hit(self, shot: Shot, attempt: Attempt | None, files_at_kill: set[str], step: int, seconds: float) -> None:
        save_step, commit_step = attempt.step if attempt else None, ""
        if attempt is None:
            fell, where = BETWEEN, f"after step {step}"
        elif attempt.committed or (self.directory / "run" / attempt.name / ".metadata").exists():
            fell, where = LATE, f"the save of step {save_step} got through"
        else:
            commit_step = self._commit_step(files_at_kill)
            fell, where = COMMIT, f"that of step {save_step}, in step {commit_step} of the commit"
        self.say(f"SIGKILL of {shot.target}: {fell}, {where}")
        self.hits.append(Hit(shot, fell, save_step, commit_step, self._generation, step, seconds))
        if fell != shot.where and self._extra > 0:
            self._extra -= 1
            again = draw_shot(self.draw, shot.where, shot.who, shot.trigger, self.every, self.ranks)
            self.shots.append(again)

    def _commit_step(self, files: set[str]) -> str:
        """Which steps of the commit protocol the files that had appeared by then speak of."""
        parts = sum(f"__{rank}.json" in files for rank in range(self.ranks))
        if "manifest.json" in files:
            return "5-6 (manifest)"
        return "3-4 (votes)" if parts == self.ranks else f"2 (files, {parts}/{self.ranks} parts)"

    def _error(self, what: str) -> FireError:
        self._log.flush()
        lines = (self.directory / "log").read_text(errors="replace").splitlines()[-40:]
        return FireError(f"{what}. The end of {self.directory / 'log'}:\n" + "\n".join(f"  {line}" for line in lines))


def torchrun_command(script: Path, ranks: int, arguments: list[str], max_restarts: int) -> list[str]:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        f"--max-restarts={max_restarts}",
    ]
    return [sys.executable, *launcher, str(script), *arguments]
