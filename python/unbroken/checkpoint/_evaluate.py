"""Loading for evaluation: without a run."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist

from unbroken import _engine
from unbroken.checkpoint._foreign import MARKER, open_directory
from unbroken.checkpoint._load import Load
from unbroken.checkpoint._reader import CheckpointReader, Reading
from unbroken.checkpoint._state import State
from unbroken.errors import InvalidArgumentError

__all__ = ["load"]


def load(
    root: str | os.PathLike[str], state: MutableMapping[str, Any], step: int | None = None, *, strict: bool = True
) -> int:
    """Loads the newest complete checkpoint of the run at `root`, or that of `step`, into `state`; returns its step.

    For evaluation: it takes what `state` names and leaves the rest, claims nothing, writes nothing, restores no random
    numbers and needs no torch.distributed. A mapping names the keys that it has; an empty one names all that was saved
    there. Several ranks that load while the run goes on give `step`, so that all load the same one. strict=False: see
    Checkpointer.

    root may also be the directory of one checkpoint: a step of a run, or one that torch.distributed.checkpoint wrote,
    with get_model_state_dict() and get_optimizer_state_dict() in the places of modules and optimizers. The step of a
    checkpoint that has none is 0. Nothing in it is run.

    Raises, before anything has changed: NotFoundError when there is none; InvalidArgumentError when the state differs
    from what was saved, or an object is of a class that is not allowed (torch.serialization.add_safe_globals());
    UnsupportedError for a newer format; UnavailableError and PermissionDeniedError when the root cannot be read. A
    checkpoint that lacks a file is passed over, as by resume(). But bytes that turn out damaged while they are read are
    a DamagedError, and no older checkpoint is tried: the state may then be half loaded. Give `step` for an older one.
    """
    store = _engine.open_store(os.fspath(root))
    reader: Reading
    if MARKER not in store.list(""):
        reader = CheckpointReader(store, _engine.find_attempt(store, step))
    elif step is None:
        reader = open_directory(os.fspath(root))
    else:
        raise InvalidArgumentError(f"load {store.url}: it is one checkpoint, not a run's root: give no step")
    first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    loading = Load(reader, State(state), strict=strict, whole=False, tell=first)
    loading.plan()
    loading.apply()
    return reader.step
