"""The Checkpointer: resume, step, save. It adapts torch to the engine and holds no protocol of its own."""

from __future__ import annotations

import enum
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unbroken import _engine
from unbroken._board import make_board
from unbroken.checkpoint._arena import Arena, look_at
from unbroken.checkpoint._background import Background
from unbroken.checkpoint._loader import Loader
from unbroken.checkpoint._metadata import versions
from unbroken.checkpoint._options import Every, Keep
from unbroken.checkpoint._resume import Resume
from unbroken.checkpoint._saves import Numbers, Save, Stats, error_of
from unbroken.checkpoint._signals import EXIT_STOPPED, StopSignals
from unbroken.checkpoint._state import ObjectSource, State, StructureChanged
from unbroken.errors import (
    DeadlineError,
    Error,
    FencedError,
    InvalidArgumentError,
    SaveFailedError,
    UnavailableError,
    UnknownOutcomeError,
)

__all__ = ["Checkpointer"]

_logger = logging.getLogger(__name__)
# torchrun kills 30 s after SIGTERM; what is not durable by then is left to the next start. A step that took so long
# that little is left of that gets the shorter time: nobody may be there who kills.
_STOP_SECONDS = 25.0
_STOP_SECONDS_AT_LEAST = 5.0
# How soon a wait sees that a signal has come.
_POLL_SECONDS = 0.2


class _Phase(enum.Enum):
    NEW = "new"
    RUNNING = "running"
    FAILED = "failed"
    CLOSED = "closed"


class Checkpointer:
    """Saves and resumes a training run.

    root: the run's directory. One run writes to it, and each start of the run goes on where the last one got to.
    state: names to modules, optimizers, schedulers, any object with state_dict() and load_state_dict(), and tensors and
        values, nested as for `dcp.save`. It stays yours; a resume loads into it.
    loader: gives the batches for batches(); its place is saved and restored with the state.
    every: when a save is due; None: only by save() and at the end of batches().
    keep: which checkpoints stay; None: all.
    seed: from which the random numbers of each rank come when the world has another size or another layout than the one
        that saved.
    strict: refuse a checkpoint that lacks something of the state, has more, or other shapes; False leaves those parts
        as they are, and says so.
    allow_fresh: start from step 0 although something is there that cannot be loaded.
    process_group: the ranks that save together; all of them by default.
    mesh: recorded with each checkpoint. A resume on another mesh of as many ranks draws new random numbers.
    vote_timeout: seconds that a save waits for a late rank before it fails, naming it.
    start_timeout: seconds that resume() goes on asking a root that does not answer; the other ranks wait twice as long
        for what the first has chosen. Loading itself may take longer.
    signals: SIGTERM and SIGUSR1 save at the end of a step that the ranks agree on and then raise SystemExit(75), 25 s
        after the signal at the latest, or 5 s after the end of a step that took longer: what is not durable by then is
        lost. A second signal ends the process at once.

    A kill at any instant leaves the newest checkpoint that was committed, and the next start goes on from it. What it
    leaves of a save in flight is no checkpoint to anyone, and a later save removes it.

    Values that differ between ranks are kept apart, and each rank gets its own back on as many ranks; of parameters,
    buffers, optimizer state and tensors of over 64 KiB there is one for all. Tensors that are more than their bytes
    (sparse, quantised, nested, subclasses) are saved as torch.save does; a resume puts new ones in their place.

    Every method is called by every rank, from one thread, equally often. The random numbers of python, numpy and torch
    are part of the state; none are drawn here.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        state: MutableMapping[str, Any],
        loader: Loader | None = None,
        every: Every | None = None,
        keep: Keep | None = Keep(last=3),  # noqa: B008  # frozen
        *,
        seed: int = 0,
        strict: bool = True,
        allow_fresh: bool = False,
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        vote_timeout: float = 600.0,
        start_timeout: float = 300.0,
        signals: bool = True,
    ) -> None:
        if every is not None and not isinstance(every, Every):
            raise InvalidArgumentError(f"every={every!r}: give unbroken.Every(steps=...) or Every(seconds=...)")
        if keep is not None and not isinstance(keep, Keep):
            raise InvalidArgumentError(f"keep={keep!r}: give unbroken.Keep(last=...), or None to keep all")
        if not vote_timeout > 0 or not start_timeout > 0:
            raise InvalidArgumentError("vote_timeout and start_timeout are seconds, over 0")
        if loader is not None and not isinstance(loader, Loader):
            raise InvalidArgumentError(
                f"loader={type(loader).__name__}: give unbroken.data.DataLoader, whose place is saved with the state; "
                "for another loader leave it out, and put what it has to remember into the state"
            )
        self._root = os.fspath(root)
        self._rank, self._world_size = _place_in(process_group)
        self._group = process_group
        self._state = State(state, rank=self._rank)
        for source in self._state.sources:
            if isinstance(source, ObjectSource) and isinstance(source.target, Loader):
                raise InvalidArgumentError(
                    f"state {source.prefix[-1]!r}: a loader's own state is the place of what it has delivered, not of "
                    "what was trained; give it as loader="
                )
        self._loader = loader
        self._every = every
        self._keep = keep
        self._seed = seed
        self._strict = strict
        self._allow_fresh = allow_fresh
        self._layout: dict[str, Any] = {"dp_size": getattr(loader, "dp_size", None)}
        if mesh is not None:
            self._layout |= {"shape": list(mesh.shape), "names": list(mesh.mesh_dim_names or ())}
        self._vote_timeout = vote_timeout
        self._start_timeout = start_timeout
        self._signals = StopSignals() if signals else None

        self._phase = _Phase.NEW
        self._why_failed = ""
        self._pid = os.getpid()
        self._step = 0
        self._generation = 0
        self._stats = Stats()
        self._last_save: Save | None = None
        self._fatal: Error | None = None
        self._background = Background("unbroken-save")
        self._stop_since: float | None = None  # since when this run knows that it is to stop
        self._stop_by = 0.0  # when it has to have ended
        self._left = False  # it ends without waiting for the background
        self._fence: Any = None  # the device's end of the step before
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._fence = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._in_flight: Future[None] | None = None
        self._arena: Arena | None = None
        self._wanted = False  # coordinator: a due save was deferred
        self._announced = False  # coordinator: it has told the ranks that the next step may save
        self._last_begin = time.monotonic()
        if loader is not None:
            loader.attach()

    # --- what the user sees ------------------------------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        """Completed optimizer steps, those of earlier starts included."""
        return self._step

    @property
    def generation(self) -> int:
        """The number of this start in the run's records; 0 before resume()."""
        return self._generation

    @property
    def last_save(self) -> Save | None:
        """The newest save of this start."""
        return self._last_save

    @property
    def stats(self) -> Stats:
        """This rank's saves so far: how many became durable, failed or were deferred, and what the newest took. It is
        the living object, and changes while saves are in flight."""
        return self._stats

    def resume(self, step: int | None = None) -> int:
        """Loads the newest complete checkpoint of this run, or that of `step`, and returns its step: 0 when fresh.

        Raises NotFoundError, listing each candidate with its reason, when something is there and nothing can be loaded;
        InvalidArgumentError when the state or the data does not fit what was saved; UnavailableError when the root
        cannot be reached, PermissionDeniedError when it may not be written; FencedError when another start takes the
        run. A checkpoint that turns out damaged is refused for good, and all ranks load the next older one. After an
        error this object refuses all else.
        """
        if self._phase is not _Phase.NEW:
            self._check_usable()
            raise InvalidArgumentError("resume() was called before; it is called once, at the beginning")
        self._phase, self._why_failed = _Phase.FAILED, "resume() did not end"
        try:
            if self._signals is not None:
                self._signals.install()
            self._start(step)
        except BaseException as error:
            self._why_failed = f"resume() failed: {error}"
            raise
        self._phase = _Phase.RUNNING
        self._last_begin = time.monotonic()
        return self._step

    def step(self, batches: int = 1) -> None:
        """Says that an optimizer step is complete, for which `batches` batches of the loader were used. Saves when due.

        A save that fails in the background is logged, counted and set on its future, and does not stop the training.
        Raises FencedError when another start has taken over the run, and SystemExit(75) after a signal.
        """
        self._check_running()
        if self._loader is not None:
            self._loader.complete(batches)
        self._step += 1
        if self._fence is not None:
            # The host runs ahead of the device, whose collectives hold the ranks in step: at most one step, here.
            self._fence.synchronize()
            self._fence.record()
        if self._opened.plans == 0:
            self._plan_in_background()
        due = self._every is not None and self._every.steps is not None and self._step % self._every.steps == 0
        decision = self._decide(due=due)
        if decision is None or decision.action == "none":
            return
        if decision.action == "deferred":
            self._stats.deferred += 1
            self._wanted = self._rank == 0
            _logger.info("the save of step %d is deferred until the one in flight has ended", self._step)
            return
        if decision.action == "stop":
            self._stop(decision)
        self._begin(decision)

    def save(self) -> Save:
        """Saves now, as all ranks must. Waits for a save in flight to end, then returns when the copy is made.

        A step that is saved already is not saved again: its Save is returned.
        """
        self._check_running()
        self._await_background()
        self._raise_fatal()
        last = self._last_save
        if last is not None and last.step == self._step and not last._failed():
            return last
        decision = self._decide(explicit=True)
        if decision is None or decision.action not in ("save", "stop"):
            raise SaveFailedError(f"save step {self._step}: the ranks did not agree on it in time")
        if decision.action == "stop":
            self._stop(decision)
        return self._begin(decision)

    def batches(self, until: int) -> Iterator[Any]:
        """Batches of the loader, one for each optimizer step, up to step `until`. Resumes first if that was not done.

        step() is called when the next batch is asked for. After step `until` that step is saved, if it is not yet, and
        the loop ends when it is durable. A body that is left by `break` has not completed its step.
        """
        if self._loader is None:
            raise InvalidArgumentError("batches() needs a loader: Checkpointer(..., loader=...)")
        return self._batches(until, self._loader)

    def _batches(self, until: int, loader: Loader) -> Iterator[Any]:
        if self._phase is _Phase.NEW:
            self.resume()
        self._check_running()
        if self._step >= until:
            return
        iterator = loader.forever()
        try:
            while self._step < until:
                yield next(iterator)
                self.step()
        finally:
            if callable(close := getattr(iterator, "close", None)):
                close()
        save = self.save()
        self._await_background()
        save.wait()

    def close(self) -> None:
        """Waits for the save in flight, and raises its failure unless that was raised before."""
        self._close()
        last = self._last_save
        if last is not None and not last.raised and last._failed():
            last.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            if self._phase is _Phase.RUNNING:
                self._saver.cancel()  # other ranks may be dead: nobody is waited for long
            self._close()  # what went wrong with a save is in the log; the error at hand is the one to see

    def _close(self) -> None:
        if self._phase is _Phase.CLOSED or os.getpid() != self._pid:
            return
        self._phase = _Phase.CLOSED
        idle = self._idle_in_time()
        if idle:
            self._background.shutdown()
        if self._signals is not None:
            self._signals.uninstall()
        if idle and self._arena is not None:
            self._arena.close()
        if self._loader is not None:
            self._loader.detach()

    # --- starting ----------------------------------------------------------------------------------------------------

    def _open_store(self) -> tuple[_engine.Store | None, Exception | None]:
        """The root, or what keeps this rank from starting: found now, what a save could only find later."""
        local, _ = look_at(self._state, self._rank)
        if isinstance(local, Exception):
            return None, local
        try:
            self._loader_state()
            return _engine.open_store(self._root, create=True), None
        except Exception as error:  # noqa: BLE001  # the other ranks must hear of it, whatever it is
            return None, error

    def _settings(self, step: int | None) -> dict[str, object]:
        """What must be equal on all ranks."""
        return {
            "every": str(self._every),
            "keep": str(self._keep),
            "loader": "absent" if self._loader is None else "given",
            "resume(step)": step,
            "seed": self._seed,
            "strict": self._strict,
            "allow_fresh": self._allow_fresh,
        }

    def _start(self, step: int | None) -> None:
        store, problem = self._open_store()
        board = make_board(self._group, problem, self._settings(step))
        assert store is not None
        resume = Resume(
            store,
            board,
            self._state,
            self._loader,
            rank=self._rank,
            world_size=self._world_size,
            layout=self._layout,
            seed=self._seed,
            strict=self._strict,
        )
        start = resume.run(step=step, allow_fresh=self._allow_fresh, timeout=self._start_timeout)
        self._saver = _engine.Saver(
            store,
            board,
            start,
            rank=self._rank,
            world_size=self._world_size,
            keep_last=self._keep.last if self._keep is not None else 0,
            keep_every_steps=(self._keep.every_steps or 0) if self._keep is not None else 0,
            vote_timeout_seconds=self._vote_timeout,
            steps_ahead=2 if self._fence is not None else 1,
        )
        self._arena = Arena(self._state, board, self._rank, self._world_size, self._vote_timeout)
        self._step = start.step
        self._generation = start.generation
        if not start.fresh:
            resume.restore_rng(start.step)

    @property
    def _opened(self) -> Arena:
        assert self._arena is not None
        return self._arena

    # --- one step ----------------------------------------------------------------------------------------------------

    def _decide(self, *, due: bool = False, explicit: bool = False) -> _engine.StepDecision | None:
        """The ranks' common decision; None when it could not be heard, so that this rank takes no part."""
        busy = self._busy()
        self._opened.forget_values()
        coordinator = self._rank == 0
        stop = self._signals is not None and self._signals.requested
        # What is wanted is announced a step ahead, once; on a step that saves anyway there is nothing to announce.
        announced, self._announced = self._announced, False
        wanted = coordinator and not (due or explicit or announced) and (self._wanted or self._time_has_come())
        look = coordinator and not busy and (due or explicit or announced or wanted or stop)
        self._announced = wanted and not busy and self._world_size > 1
        try:
            return self._saver.decide(
                self._step,
                due=due,
                wanted=wanted,
                stop=stop,
                busy=busy,
                explicit=explicit,
                plan_anew=look and self._opened.needs_plan(),
            )
        except (DeadlineError, UnavailableError) as error:
            self._stats.failed += 1
            _logger.error("rank %d takes no part in the save of step %d: %s", self._rank, self._step, error)
            return None

    def _time_has_come(self) -> bool:
        seconds = self._every.seconds if self._every is not None else None
        return seconds is not None and time.monotonic() - self._last_begin >= seconds

    def _busy(self) -> bool:
        return self._in_flight is not None and not self._in_flight.done()

    def _await_background(self) -> None:
        if not self._idle_in_time():
            raise SystemExit(EXIT_STOPPED)

    def _idle_in_time(self) -> bool:
        """Waits until nothing is in flight. False: a signal leaves no time for that; the process ends without it."""
        if self._in_flight is not None:
            if not self._done_in_time(self._in_flight):
                return False
            done, self._in_flight = self._in_flight, None
            done.result()
        return True

    def _done_in_time(self, work: Future[None]) -> bool:
        while not work.done():
            left = self._time_left()
            if left == 0:
                if not self._left:
                    self._leave()
                return False
            wait([work], _POLL_SECONDS if left is None else min(left, _POLL_SECONDS))
        return True

    # --- stopping ----------------------------------------------------------------------------------------------------

    def _time_left(self) -> float | None:
        """Seconds until this run has to have ended; None as long as nobody asked it to."""
        if self._stop_since is None:
            self._stop_since = self._signals.since if self._signals is not None else None
            if self._stop_since is None:
                return None
            self._stop_by = self._stop_since + _STOP_SECONDS
        return max(0.0, self._stop_by - time.monotonic())

    def _leave(self) -> None:
        """The time is over: the process ends without waiting for the background."""
        assert self._stop_since is not None
        self._left = True
        self._background.leave(EXIT_STOPPED)
        save = self._last_save
        if save is not None and save.step == self._step and save.done() and not save._failed():
            return  # it was tidying up
        _logger.error(
            "step %d is not durable within %.0f s of the signal: this run ends without it (exit code %d), and the next "
            "start goes on from what is complete then",
            self._step,
            self._stop_by - self._stop_since,
            EXIT_STOPPED,
        )

    def _stop(self, decision: _engine.StepDecision) -> NoReturn:
        """Saves and leaves after a signal, when the state is durable or the time is over."""
        now = time.monotonic()
        if self._time_left() is None:  # another rank had the signal
            self._stop_since, self._stop_by = now, now + _STOP_SECONDS
        self._stop_by = max(self._stop_by, now + min(_STOP_SECONDS_AT_LEAST, _STOP_SECONDS))
        try:
            self._save_to_stop(decision)
            _logger.warning(
                "step %d is saved; this run ends as it was asked to (exit code %d)", self._step, EXIT_STOPPED
            )
        except (SaveFailedError, UnknownOutcomeError) as error:
            _logger.error(
                "step %d may not be saved: %s; this run ends all the same (%d)", self._step, error, EXIT_STOPPED
            )
        except TimeoutError:
            self._leave()
        raise SystemExit(EXIT_STOPPED)

    def _save_to_stop(self, decision: _engine.StepDecision) -> None:
        try:
            self._begin(decision).wait(self._time_left())
        except SaveFailedError as error:
            # The coordinator had not known before this step that it would save: its plan may have been old.
            _logger.warning("%s; trying once more", error)
            self._await_background()
            decisions: list[_engine.StepDecision | None] = []
            # Not in this thread: a coordinator that has left already would be waited for too long.
            decided = self._background.submit(lambda: decisions.append(self._decide(explicit=True)))
            if not self._done_in_time(decided):
                raise SystemExit(EXIT_STOPPED) from None
            decided.result()
            (again,) = decisions
            if again is None or again.action not in ("save", "stop"):
                raise
            self._begin(again).wait(self._time_left())

    def _plan_in_background(self) -> None:
        """At the end of the first step, as an optimizer has no state before."""
        arena = self._opened
        described = arena.describe()

        def work() -> None:
            begin = time.perf_counter()
            arena.plan(described)
            self._stats.prepare_seconds = time.perf_counter() - begin
            self._count_arena()

        self._in_flight = self._background.submit(work)

    def _count_arena(self) -> None:
        arena = self._opened
        self._stats.plans = arena.plans
        self._stats.arena_bytes = arena.image.bytes if arena.image is not None else 0

    # --- saving ------------------------------------------------------------------------------------------------------

    def _begin(self, decision: _engine.StepDecision) -> Save:
        """Copies the state and hands it to the background. A rank that cannot take part says so in its vote."""
        begin = time.perf_counter()
        self._wanted = False
        self._last_begin = time.monotonic()
        save = Save(self._step, decision.attempt)
        self._last_save = save
        failure, plan_seconds = "", 0.0
        stage_begin = begin
        loader = "null"
        copy: Callable[[], None] | None = None
        arena = self._opened
        try:
            self._await_background()
            if decision.plan_anew:
                described = arena.describe()
                self._in_flight = self._background.submit(lambda: arena.plan(described))
                self._await_background()
                self._count_arena()
                plan_seconds = time.perf_counter() - begin
            stage_begin = time.perf_counter()
            loader = self._loader_state()
            copy = arena.prepare()
        except StructureChanged as change:
            failure = f"the structure of the state has changed ({change}); the next save plans anew"
        except Exception as error:  # noqa: BLE001  # it goes into the vote, so that the attempt fails by name
            failure = str(error) or type(error).__name__
        # The commit begins first: it writes what is copied while the rest is being copied.
        numbers: Future[Numbers] = Future()
        self._in_flight = self._background.submit(lambda: self._commit(save, decision, failure, loader, numbers))
        try:
            if copy is not None:
                copy()
        except Error as error:
            _logger.error("stage step %d: %s; the save fails", self._step, error)  # the engine tells the commit
        finally:
            end = time.perf_counter()
            numbers.set_result(Numbers(end - begin, end - stage_begin, plan_seconds))
            save.staged.set_result(None)
        return save

    def _loader_state(self) -> str:
        if self._loader is None:
            return "null"
        try:
            return json.dumps(self._loader.state_dict(), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"the loader's state_dict() is not JSON: {error}") from error

    def _commit(
        self, save: Save, decision: _engine.StepDecision, failure: str, loader: str, numbers: Future[Numbers]
    ) -> None:
        """In the background, from a full image to a checkpoint that exists."""
        arena = self._opened
        image = arena.image
        plan = image.plan if image is not None else None
        if failure and self._rank > 0:
            arena.say_stale()
        try:
            outcome = self._saver.commit(
                None if failure or image is None else image.image,
                step=save.step,
                attempt=decision.attempt,
                sequence=decision.sequence,
                structure=plan.digest if plan is not None else "",
                object_slots=image.object_slots if image is not None else None,
                metadata=(lambda slots: arena.metadata(plan, slots)) if self._rank == 0 and plan else None,
                mesh=json.dumps(self._layout),
                loader=loader,
                versions=versions(),
                failure=failure,
            )
        except Exception as error:  # noqa: BLE001  # it is the save's, and goes to whoever waits for it
            self._failed(save, error)
            return
        stats = numbers.result().of(save, outcome)
        self._stats.saves.append(stats)
        if outcome.state == "durable":
            self._stats.durable += 1
            if self._rank == 0:
                _logger.info("step %d is durable as %s", save.step, outcome.attempt_path)
            save.durable.set_result(stats)
            self._retain(save)
            return
        if self._rank == 0:
            arena.look_for_stale(known=outcome.structure_differs)
        self._failed(save, error_of(outcome, save.step))

    def _retain(self, save: Save) -> None:
        """Removes what need not be kept any more, when the new checkpoint is durable and nobody waits."""
        try:
            removed = self._saver.retain()
        except FencedError as error:
            self._fatal = error
        except Error as error:
            _logger.warning("retention after step %d: %s; it is tried again after the next save", save.step, error)
        else:
            if removed:
                _logger.info("removed %s", ", ".join(removed))

    def _failed(self, save: Save, error: Exception) -> None:
        if isinstance(error, FencedError):
            self._fatal = error
        if isinstance(error, Error) and error.code == "unknown":
            self._stats.unknown += 1
        else:
            self._stats.failed += 1
        log = _logger.error if self._rank == 0 else _logger.info
        log("%s; training goes on, older checkpoints are kept", error)
        save.durable.set_exception(error)

    # --- what must hold ----------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidArgumentError("the Checkpointer belongs to another process; a forked child cannot use it")
        if self._phase is _Phase.CLOSED:
            raise InvalidArgumentError("the Checkpointer is closed")
        if self._phase is _Phase.FAILED:
            raise InvalidArgumentError(
                f"this Checkpointer cannot go on: {self._why_failed}. The state may be half loaded: end the process"
            )

    def _check_running(self) -> None:
        self._check_usable()
        if self._phase is _Phase.NEW:
            raise InvalidArgumentError("call resume() first: it says at which step the run goes on")
        self._raise_fatal()

    def _raise_fatal(self) -> None:
        if self._fatal is not None:
            raise self._fatal


def _place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidArgumentError(
            "WORLD_SIZE says that there are other ranks, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before making the Checkpointer"
        )
    return 0, 1
