"""The loader's state: a place, and what the place is in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from unbroken.data._order import ALGORITHM, OrderOptions, Place
from unbroken.errors import InvalidArgumentError, StateMismatchError, UnsupportedError

__all__ = ["FORMAT", "Cursor", "DatasetIdentity", "describe", "read"]

FORMAT = 1
_LONGEST_IDENTITY = 256  # bytes of JSON, so that a state stays below 1 KB


class Cursor(NamedTuple):
    """A place, and how many samples all ranks together have had since the start of the run."""

    place: Place
    samples_total: int


class DatasetIdentity(NamedTuple):
    """What must be the same for a place to mean the same sample."""

    length: int
    identity: str

    @classmethod
    def of(cls, dataset: Any, given: str | None) -> DatasetIdentity:
        """``given``, or the dataset's own ``identity``, or the name of its type."""
        identity = getattr(dataset, "identity", None) if given is None else given
        if callable(identity):
            identity = identity()
        if identity is None:
            # Without the module: that is "__main__" or not depending on how the script is started.
            identity = type(dataset).__qualname__
        if not isinstance(identity, str):
            raise TypeError(f"the dataset's identity is a {type(identity).__name__}: it must be a str")
        if len(identity.encode()) > _LONGEST_IDENTITY or not identity.isascii() or not identity.isprintable():
            identity = "sha256:" + hashlib.sha256(identity.encode()).hexdigest()
        return cls(len(dataset), identity)

    def __str__(self) -> str:
        return f"{self.identity!r} of {self.length} samples"


def _order(options: OrderOptions) -> dict[str, Any]:
    return {"shuffle": options.shuffle, "epoch_end": options.epoch_end, "algorithm": ALGORITHM}


def describe(cursor: Cursor, options: OrderOptions, dataset: DatasetIdentity) -> dict[str, Any]:
    """The state, of JSON types only."""
    return {
        "format": FORMAT,
        "seed": options.seed,
        "epoch": cursor.place.epoch,
        "offset": cursor.place.offset,
        "samples_total": cursor.samples_total,
        "global_batch_size": options.global_batch_size,
        "order": _order(options),
        "dataset": {"length": dataset.length, "identity": dataset.identity},
    }


def _number(state: Mapping[str, Any], name: str) -> int:
    value = state[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise InvalidArgumentError(f"load the loader's state: {name} is {value!r}, which is no count")
    return value


def _refuse(what: str, saved: object, here: object, remedy: str) -> None:
    raise StateMismatchError(
        f"load the loader's state: it was saved with {what} {saved}, and this loader has {what} {here}; {remedy}"
    )


def read(state: Mapping[str, Any], options: OrderOptions, dataset: DatasetIdentity, *, strict: bool) -> Cursor:
    """The cursor of ``state``, checked against this loader's options and dataset.

    Raises:
        StateMismatchError: another dataset, seed or order, or, if strict, another global batch size.
        UnsupportedError: the state is of a newer format.
        InvalidArgumentError: it is no state of a loader.
    """
    try:
        version = state["format"]
        if isinstance(version, int) and version > FORMAT:
            raise UnsupportedError(
                f"load the loader's state: it has format {version}, and this version of Unbroken reads up to {FORMAT}; "
                "update Unbroken"
            )
        if version != FORMAT:
            raise InvalidArgumentError(f"load the loader's state: it has format {version!r}, which never was one")
        cursor = Cursor(Place(_number(state, "epoch"), _number(state, "offset")), _number(state, "samples_total"))
        seed, size, order = _number(state, "seed"), _number(state, "global_batch_size"), dict(state["order"])
        saved = DatasetIdentity(_number(state["dataset"], "length"), str(state["dataset"]["identity"]))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(
            f"load the loader's state: {state!r:.200} is no state of a loader ({type(error).__name__}: {error})"
        ) from error

    if saved != dataset:
        _refuse("dataset", saved, dataset, "a place in one is none in the other; use the one it was saved with")
    if seed != options.seed:
        _refuse("seed", seed, options.seed, f"pass seed={seed} to go on in the same order")
    here = _order(options)
    if order != here:
        names = [name for name in sorted(order.keys() | here.keys()) if order.get(name) != here.get(name)]
        _refuse(
            "order",
            {name: order.get(name) for name in names},
            {name: here.get(name) for name in names},
            "pass the same to go on in the same order",
        )
    if strict and size != options.global_batch_size:
        _refuse("global_batch_size", size, options.global_batch_size, "without strict=True it goes on from the place")
    return cursor
