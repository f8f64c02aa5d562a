"""What a save turns into: futures for the caller, numbers for the curious."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from unbroken import _engine
from unbroken.errors import FencedError, SaveFailedError, UnknownOutcomeError

__all__ = ["Numbers", "Save", "SaveStats", "Stats"]


@dataclass(frozen=True)
class SaveStats:
    """One save on this rank. Times in seconds."""

    step: int
    attempt: str  # the directory below the root
    state: str  # "durable", "failed" or "unknown"
    reason: str  # "" when durable
    blocked_seconds: float  # how long training stood still
    stage_seconds: float  # of that, the copy of the state
    plan_seconds: float  # of that, planning anew; 0 as long as the structure stays
    write_seconds: float
    commit_seconds: float
    bytes: int  # written by this rank


@dataclass
class Stats:
    """What this rank's saves came to so far."""

    durable: int = 0
    failed: int = 0
    unknown: int = 0
    deferred: int = 0  # due saves that waited for the arena
    plans: int = 0
    prepare_seconds: float = 0.0  # in the background after the first step: planning, allocating and touching the arena
    arena_bytes: int = 0
    saves: deque[SaveStats] = field(default_factory=lambda: deque(maxlen=1000))  # the newest, oldest first


@dataclass(frozen=True)
class Numbers:
    """What the foreground knows of a save. Seconds."""

    blocked: float
    stage: float
    plan: float

    def of(self, save: Save, outcome: _engine.SaveOutcome) -> SaveStats:
        return SaveStats(
            step=save.step,
            attempt=outcome.attempt_path,
            state=outcome.state,
            reason=outcome.reason,
            blocked_seconds=self.blocked,
            stage_seconds=self.stage,
            plan_seconds=self.plan,
            write_seconds=outcome.write_seconds,
            commit_seconds=outcome.commit_seconds,
            bytes=outcome.bytes,
        )


class Save:
    """One save. `staged`: the state may change again. `durable`: the checkpoint exists, and would survive a loss of
    power; its result is the numbers of the save, its exception says why it failed.
    """

    def __init__(self, step: int, attempt: str) -> None:
        self.step = step
        self.attempt = attempt
        self.staged: Future[None] = Future()
        self.durable: Future[SaveStats] = Future()
        for future in (self.staged, self.durable):
            future.set_running_or_notify_cancel()  # nobody can cancel what is under way
        self.raised = False

    def wait(self, timeout: float | None = None) -> SaveStats:
        """Until the save is durable. Raises what kept it from that (SaveFailedError, FencedError, UnknownOutcomeError),
        and TimeoutError when `timeout` seconds have passed."""
        try:
            return self.durable.result(timeout)
        except TimeoutError:
            if self.durable.done():
                raise
            raise TimeoutError(f"save step {self.step}: not durable within {timeout} s; it goes on") from None
        finally:
            self.raised = self.durable.done()

    def done(self) -> bool:
        return self.durable.done()

    def _failed(self) -> bool:
        return self.durable.done() and self.durable.exception() is not None

    def __repr__(self) -> str:
        state = "in flight" if not self.durable.done() else "failed" if self._failed() else "durable"
        return f"<Save of step {self.step}: {state}>"


def error_of(outcome: _engine.SaveOutcome, step: int) -> _engine.Error:
    """A failed or unclear outcome as an exception."""
    if outcome.state == "unknown":
        return UnknownOutcomeError(f"save step {step}: {outcome.reason}")
    if outcome.code == FencedError.code:
        return FencedError(f"save step {step}: {outcome.reason}")
    return SaveFailedError(f"save step {step} failed: {outcome.reason}")
