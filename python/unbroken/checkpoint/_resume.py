"""Starting a run: which checkpoint all ranks load, and the load on this one."""

from __future__ import annotations

import logging
import socket
from typing import Any, Protocol

import torch

from unbroken import _engine, _rng
from unbroken._board import AnyBoard
from unbroken.checkpoint._load import Load
from unbroken.checkpoint._reader import CheckpointReader
from unbroken.checkpoint._state import State, rng_prefix
from unbroken.errors import (
    DamagedError,
    DeadlineError,
    Error,
    InvalidArgumentError,
    IoError,
    NotFoundError,
    UnavailableError,
)

__all__ = ["Resume"]

_logger = logging.getLogger(__name__)


class _Loader(Protocol):
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Resume:
    """One start on this rank. The engine's Recovery decides; this loads what it says and tells how that went."""

    def __init__(
        self,
        store: _engine.Store,
        board: AnyBoard,
        state: State,
        loader: _Loader | None,
        *,
        rank: int,
        world_size: int,
        layout: dict[str, Any],
        seed: int,
        strict: bool,
    ) -> None:
        self._store = store
        self._board = board
        self._state = state
        self._loader = loader
        self._rank = rank
        self._world_size = world_size
        self._layout = layout
        self._seed = seed
        self._strict = strict
        self._applied = False  # something of the state was changed
        self._rng: dict[str, torch.Tensor] | None = None  # None: the checkpoint is of another world or layout
        self._saved_world_size = 0
        self._changed = ""  # how this world differs from the one that saved

    def run(self, *, step: int | None, allow_fresh: bool, timeout: float) -> _engine.Start:
        recovery = _engine.Recovery(
            self._store,
            self._board,
            rank=self._rank,
            world_size=self._world_size,
            host=socket.gethostname(),
            step=step,
            allow_fresh=allow_fresh,
            timeout_seconds=timeout,
        )
        start = recovery.begin()
        while True:
            if self._rank == 0:
                _logger.log(logging.WARNING if start.refused else logging.INFO, "%s", start.account)
                for warning in start.warnings:
                    _logger.warning("%s", warning)
            verdict, error = self._try(start)
            try:
                following = recovery.settle(verdict, "" if error is None else str(error))
            except Error:
                if error is not None and verdict != "damaged":
                    raise error from None
                raise
            if following is None:
                return start
            start = following

    def restore_rng(self, step: int) -> None:
        """The last thing of a resume, so that nothing draws after it."""
        if self._rng is not None:
            absent = _rng.restore(self._rng)
            if absent:
                _logger.warning("rank %d: random number generators that are not here any more: %s", self._rank, absent)
            return
        # Ranks that train the same samples, as those of one tensor-parallel group do, must draw the same numbers.
        data_rank: int = getattr(self._loader, "dp_rank", self._rank)
        _rng.seed_from(self._seed, step, data_rank)
        if self._rank == 0:
            _logger.warning(
                "the checkpoint is of %s: the random numbers of each rank come from (seed, step, data-parallel rank). "
                "The samples of every batch are the same; what a rank draws is not",
                self._changed or "a world without random numbers",
            )

    def _try(self, start: _engine.Start) -> tuple[str, Exception | None]:
        """The verdict for the other ranks, and what is behind it."""
        try:
            if not start.fresh:
                self._load(start.attempt)
            elif self._applied:
                raise InvalidArgumentError("the state is half loaded, so it cannot start fresh; end the process")
        except (DamagedError, IoError, NotFoundError) as error:
            # A file that has gone, or that the device does not give after several tries, is not better tomorrow.
            return "damaged", error
        except (UnavailableError, DeadlineError) as error:
            return "unreachable", error
        except Exception as error:  # noqa: BLE001  # all ranks stop, and this one raises it
            return "failed", error
        return "loaded", None

    def _load(self, attempt: str) -> None:
        reader = CheckpointReader(self._store, attempt)
        place = reader.manifest.get("loader")
        self._check_loader(attempt, place)
        self._saved_world_size = int(reader.manifest["world_size"])
        self._changed = self._difference(reader.manifest)
        own = self._rank if self._saved_world_size == self._world_size else None
        load = Load(reader, self._state, strict=self._strict, whole=True, own=own, tell=self._rank == 0)
        load.plan()
        self._rng = self._read_rng(reader)
        if self._loader is not None and place is not None:
            self._loader.load_state_dict(place)
        self._applied = True
        load.apply()

    def _difference(self, manifest: dict[str, Any]) -> str:
        """Where ranks that now share a batch may have had numbers of their own. Empty: the world is as it was."""
        if self._saved_world_size != self._world_size:
            return f"a world of {self._saved_world_size}, this one is of {self._world_size}"
        saved = manifest.get("mesh") or {}
        for name, what in (("shape", "mesh of shape"), ("names", "mesh of"), ("dp_size", "data-parallel size")):
            there, here = saved.get(name), self._layout.get(name)
            if there is not None and here is not None and there != here:
                return f"{what} {there}, this one is of {here}"
        return ""

    def _read_rng(self, reader: CheckpointReader) -> dict[str, torch.Tensor] | None:
        mine = rng_prefix(self._rank)
        saved = {key: one for key, one in reader.saved.items() if key.startswith(mine) and one.tensor is not None}
        if not saved or self._changed:
            return None
        read = {key: torch.empty(one.shape, dtype=one.dtype) for key, one in saved.items()}
        reader.tensors(read)
        return {key.removeprefix(mine): tensor for key, tensor in read.items()}

    def _check_loader(self, attempt: str, saved: dict[str, Any] | None) -> None:
        if self._loader is not None and saved is None:
            raise InvalidArgumentError(
                f"resume {attempt}: it has no data state, so the loader cannot go on from where it was; train without "
                "loader=, or take the weights by unbroken.load() and start another run"
            )
        if self._loader is None and saved is not None and self._strict:
            raise InvalidArgumentError(
                f"resume {attempt}: it was saved with a loader and this run has none; give loader=, or strict=False to "
                "drop the data state"
            )
