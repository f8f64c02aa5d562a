"""Reading saved objects without running what they say."""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import threading
from typing import IO, Any

import numpy as np
import torch

from unbroken.errors import DamagedError, InvalidArgumentError

__all__ = ["load", "loads"]

_lock = threading.Lock()  # torch keeps the list of safe globals for the whole process


@functools.cache
def _also_safe() -> list[Any]:
    """What people keep in a training state besides tensors and builtins, and what only makes values."""
    core = importlib.import_module("numpy._core.multiarray")
    dtypes = {type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"}
    # A pickle says where a function was found, which for numpy before 2 was another module.
    scalar = [(core.scalar, f"numpy.{name}.multiarray.scalar") for name in ("core", "_core")]
    array = [(core._reconstruct, f"numpy.{name}.multiarray._reconstruct") for name in ("core", "_core")]
    return [np.ndarray, np.dtype, *dtypes, *scalar, *array]


def loads(key: str, raw: bytes | memoryview | bytearray) -> Any:
    """The object that torch.save wrote. InvalidArgumentError names the key when its class is not allowed."""
    return load(key, io.BytesIO(raw))


def load(key: str, stream: IO[bytes]) -> Any:
    """As loads(), from where it lies."""
    try:
        with _lock, torch.serialization.safe_globals(_also_safe()):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        cause = str(error).split("WeightsUnpickler error:")[-1].strip().splitlines()[0].rstrip(".")
        raise InvalidArgumentError(
            f"state {key!r}: {cause}. Objects are read with weights_only=True, so that no file can run code: keep "
            "plain values in the state, or allow the class by torch.serialization.add_safe_globals() first"
        ) from error
    except Exception as error:
        raise DamagedError(f"read {key!r}: {type(error).__name__}: {error}") from error
