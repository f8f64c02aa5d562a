"""The safetensors format, as Hugging Face tools read it (https://github.com/huggingface/safetensors, README, "Format").

A file is the length of its header (8 bytes, little-endian), the header, which is JSON and padded with spaces, and the
tensors' bytes, back to back in the order that the header gives. Several files have an index beside them: which tensor
is in which file. Nothing here reads or writes a file.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from unbroken.errors import InvalidArgumentError

__all__ = ["DTYPES", "INDEX", "SINGLE", "Shard", "Weight", "bytes_of", "index_of", "is_name_of_export", "shards_of"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_METADATA = "__metadata__"
_HEADER_BYTES = 100_000_000  # what the safetensors package takes at most
_ENTRY_BYTES = 90  # of a header's entry without name and shape, at most
_ALIGNMENT = 8

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}


@dataclass(frozen=True)
class Weight:
    """One tensor: its name in the export, its key in the checkpoint."""

    name: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One file."""

    file: str
    weights: tuple[Weight, ...]  # as they lie in it

    @property
    def data_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def header(self) -> bytes:
        """What the file begins with. The data follows at a multiple of 8."""
        entries: dict[str, object] = {_METADATA: {"format": "pt"}}
        at = 0
        for weight in self.weights:
            end = at + weight.nbytes
            entries[weight.name] = {
                "dtype": DTYPES[weight.dtype],
                "shape": list(weight.shape),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return struct.pack("<Q", len(text)) + text


def check_name(name: str) -> None:
    """InvalidArgumentError for a name that the format cannot hold."""
    if name == _METADATA:
        raise InvalidArgumentError(f"export {name!r}: safetensors keeps that name for itself; rename the tensor")
    if any("\ud800" <= c <= "\udfff" for c in name):
        raise InvalidArgumentError(f"export {name!r}: the name is not valid Unicode, which safetensors needs it to be")


def shards_of(weights: Iterable[Weight], max_bytes: int) -> list[Shard]:
    """Cut in the order given: a file ends before the tensor that would make it larger than `max_bytes`, so a tensor
    larger than that has one to itself."""
    groups: list[list[Weight]] = [[]]
    size = header = 0
    for weight in weights:
        check_name(weight.name)
        entry = len(json.dumps(weight.name)) + sum(len(str(n)) + 1 for n in weight.shape) + _ENTRY_BYTES
        if groups[-1] and (size + weight.nbytes > max_bytes or header + entry > _HEADER_BYTES):
            groups.append([])
            size = header = 0
        groups[-1].append(weight)
        size += weight.nbytes
        header += entry
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    # The largest elements first: so each tensor lies at a multiple of its own.
    return [
        Shard(name, tuple(sorted(group, key=lambda weight: -weight.dtype.itemsize)))
        for name, group in zip(names, groups, strict=True)
    ]


def index_of(shards: Sequence[Shard]) -> bytes:
    """The index of several files."""
    where = {weight.name: shard.file for shard in shards for weight in shard.weights}
    document = {"metadata": {"total_size": sum(shard.data_bytes for shard in shards)}, "weight_map": where}
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def is_name_of_export(name: str) -> bool:
    return name in (SINGLE, INDEX) or _SHARD.fullmatch(name) is not None


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def bytes_of(size: int | str) -> int:
    """Bytes, from a number of them or a text such as "5GB" (10^9) or "5GiB" (2^30)."""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise InvalidArgumentError(f'max_shard_size {size!r}: give bytes, or a size such as "5GB" or "500MiB"')
        value = int(float(match[1]) * _UNITS[match[2].upper()])
    else:
        value = size
    if type(value) is not int or value < 1:
        raise InvalidArgumentError(f"max_shard_size {size!r}: give at least one byte")
    return value
