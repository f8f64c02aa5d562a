"""What the tests of the DCP drop-ins share."""

from __future__ import annotations

import io
import json
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import unbroken

__all__ = ["CASES", "Case", "bits", "differences", "failure", "load_ours", "load_stock", "save_ours", "save_stock"]

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
warnings.filterwarnings("ignore", message="TypedStorage is deprecated")


def save_ours(state: dict[str, Any], path: Path, **options: Any) -> Any:
    return dcp.save(state, storage_writer=unbroken.UnbrokenWriter(path, **options), no_dist=True)


def save_stock(state: dict[str, Any], path: Path) -> Any:
    return dcp.save(state, checkpoint_id=path, no_dist=True)


def load_ours(state: dict[str, Any], path: Path) -> dict[str, Any]:
    dcp.load(state, storage_reader=unbroken.UnbrokenReader(path), no_dist=True)
    return state


def load_stock(state: dict[str, Any], path: Path) -> dict[str, Any]:
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def failure(call: Callable[[], object]) -> BaseException:
    """What a call fails with: the error of the lowest rank, where DCP has wrapped it."""
    try:
        call()
    except CheckpointException as error:
        return min(error.failures.items())[1][0]
    except Exception as error:  # noqa: BLE001  # the test looks at what it is
        return error
    raise AssertionError("it did not fail")


def bits(tensor: torch.Tensor) -> bytes:
    """Everything that a plain tensor is, byte for byte."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.numel() == 0:
        return b""
    raw = plain.reshape(-1).view(torch.uint8)
    return bytes(raw.numpy())


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two states differ, byte for byte."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return [f"{at}: {one!r} is not {other!r}"]
        return [] if bits(one) == bits(other) else [f"{at}: other bits"]
    if isinstance(one, Mapping):
        if not isinstance(other, Mapping) or list(one) != list(other):
            return [f"{at}: {one!r} is not {other!r}"]
        return [d for key in one for d in differences(one[key], other[key], f"{at}.{key}")]
    if isinstance(one, (list, tuple)):
        if type(one) is not type(other) or len(one) != len(other):
            return [f"{at}: {one!r} is not {other!r}"]
        return [d for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{at}[{i}]")]
    return [] if type(one) is type(other) and one == other else [f"{at}: {one!r} is not {other!r}"]


def a_state(number: int, tensors: int = 6) -> dict[str, Any]:
    """Nested, with lists, numbers and strings; everything differs with the number."""
    return {
        "model": {f"layer{i}.weight": torch.full((7, i + 1), float(number * 100 + i)) for i in range(tensors)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(number))}}, "groups": [{"lr": 0.1 * number}]},
        "list": [torch.full((3,), float(number)), {"deep": [torch.full((2,), float(number)), "x" * number]}],
        "step": number,
        "name": f"run {number}",
        "ordered": OrderedDict(a=number, b=[number, number]),
    }


def blank() -> dict[str, Any]:
    return a_state(0)


def same(loaded: dict[str, Any], number: int) -> None:
    # DCP gives every mapping string keys.
    wanted = a_state(number)
    assert json.dumps(loaded["step"]) == json.dumps(number)
    assert not differences(loaded["model"], wanted["model"])
    assert not differences(loaded["list"], wanted["list"])
    assert loaded["ordered"] == wanted["ordered"]
    assert loaded["name"] == wanted["name"]


class Case:
    """A kind of tensor: how one is made, and one to load into."""

    def __init__(self, name: str, make: Callable[[], torch.Tensor], blank: Callable[[], torch.Tensor]) -> None:
        self.name, self.make, self.blank = name, make, blank

    def __repr__(self) -> str:
        return self.name


def _of_dtype(dtype: torch.dtype) -> Case:
    """Random bytes: what a dtype makes of them, NaNs with payloads too, must not change."""

    def make() -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(str(dtype)) % 1000)
        high = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, high, (6, 4 * dtype.itemsize), dtype=torch.uint8, generator=generator)
        return raw.view(dtype)

    return Case(str(dtype), make, lambda: torch.zeros(6, 4 * dtype.itemsize, dtype=torch.uint8).view(dtype))


def _plannable() -> Iterator[torch.dtype]:
    """All dtypes that DCP's own planner knows the size of, but for the quantised, which are made in another way."""
    for dtype in sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str):
        try:
            torch._utils._element_size(dtype)
        except TypeError:
            continue
        if not str(dtype).startswith(("torch.q", "torch.bits")):
            yield dtype


def _full(size: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(size).numel()).reshape(size)


def _zeros(*size: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(*size)


def _complex() -> torch.Tensor:
    return torch.view_as_complex(_full((6, 2)))


CASES = [
    *map(_of_dtype, _plannable()),
    Case("transposed", lambda: _full((3, 4)).t(), _zeros(4, 3)),
    Case("into transposed", lambda: _full((3, 4)), lambda: torch.zeros(4, 3).t()),
    Case("channels_last", lambda: _full((2, 3, 4, 5)).to(memory_format=torch.channels_last), _zeros(2, 3, 4, 5)),
    Case(
        "into channels_last",
        lambda: _full((2, 3, 4, 5)),
        lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ),
    Case("expanded", lambda: _full((3,)).expand(4, 3), _zeros(4, 3)),
    Case("every second", lambda: _full((10,))[::2], _zeros(5)),
    Case("conj", lambda: _complex().conj(), lambda: torch.zeros(6, dtype=torch.complex64)),
    Case("neg", lambda: _complex().conj().imag, _zeros(6)),
    Case("0-dim", lambda: torch.tensor(7.5), lambda: torch.tensor(0.0)),
    Case("size 1", lambda: torch.full((1, 1), 3.0), _zeros(1, 1)),
    Case("0-numel", lambda: torch.zeros(0, 3), _zeros(0, 3)),
    Case("0-numel in the middle", lambda: torch.zeros(4, 0, 3), _zeros(4, 0, 3)),
    Case("view of a big storage", lambda: _full((100_000,))[17:20], _zeros(3)),
    Case("parameter", lambda: torch.nn.Parameter(_full((3, 2))), lambda: torch.nn.Parameter(torch.zeros(3, 2))),
    Case("buffer", lambda: torch.nn.Buffer(_full((3, 2))), lambda: torch.nn.Buffer(torch.zeros(3, 2))),
    Case("with a history", lambda: torch.nn.Parameter(_full((3,))) * 2, _zeros(3)),
    Case("large", lambda: _full((1_500_000,)), _zeros(1_500_000)),
    Case(
        "into a mapped slice of more",
        lambda: _full((5,)),
        lambda: torch.zeros(20)[3:8],
    ),
]


def torch_saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
