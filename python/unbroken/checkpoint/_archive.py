"""The bytes of a torch.save archive around a tensor's data.

A tensor's archive is a ZIP file: records, the tensor's bytes as the record `data/0`, more records and the directory.
All but the bytes depends on dtype and shape only. torch writes it without them (`torch.serialization.skip_data`) into a
sparse file in memory; what lies before and after the hole is the head and the tail. The CRC-32 of the data is left out,
as `torch.serialization.set_crc32_options(False)` does; torch.load does not look at it.
"""

from __future__ import annotations

import functools
import io
import math
import os
import zipfile

import torch

__all__ = ["DTYPES", "frame"]

# Whole bytes per element, no scale or zero point beside the data.
DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    }
)

_LOCAL_HEADER = 30  # bytes of a ZIP local file header before name and extra field (APPNOTE.TXT 4.3.7)


def _hole(archive: zipfile.ZipFile, file: int) -> tuple[int, int]:
    """Where the record data/0 of a torch.save archive has its bytes: (offset, length)."""
    entry = next(i for i in archive.infolist() if i.filename.endswith("/data/0"))
    header = os.pread(file, _LOCAL_HEADER, entry.header_offset)
    name_bytes = int.from_bytes(header[26:28], "little")
    extra_bytes = int.from_bytes(header[28:30], "little")
    return entry.header_offset + _LOCAL_HEADER + name_bytes + extra_bytes, entry.file_size


@functools.lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What comes before and after the bytes of a contiguous CPU tensor of `dtype` and `shape` in its archive.

    Raises RuntimeError when torch's archive is not laid out as expected: nothing is guessed.
    """
    _check(dtype)
    return _frame(dtype, shape)


def _frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    # The memory of `empty` is never touched, so a frame of any size costs its head and tail.
    tensor = torch.empty(shape, dtype=dtype, device="cpu", requires_grad=False)
    nbytes = math.prod(shape) * dtype.itemsize
    with os.fdopen(os.memfd_create("unbroken-frame"), "w+b") as file:
        with torch.serialization.skip_data():
            torch.save(tensor, file)
        file.flush()
        with zipfile.ZipFile(file) as archive:
            start, length = _hole(archive, file.fileno())
        size = os.fstat(file.fileno()).st_size
        if length != nbytes:
            raise RuntimeError(f"torch.save leaves {length} bytes for a {dtype} of {shape}, which has {nbytes}")
        head = os.pread(file.fileno(), start, 0)
        tail = os.pread(file.fileno(), size - start - length, start + length)
    return head, tail


@functools.lru_cache(maxsize=64)
def _check(dtype: torch.dtype) -> None:
    """Composes an archive and has torch read it: once for each dtype, as the layout belongs to torch."""
    shape = (3, 5)
    data = bytes(i % 2 for i in range(15 * dtype.itemsize))  # valid in each dtype, bool too
    head, tail = _frame(dtype, shape)
    loaded = torch.load(io.BytesIO(head + data + tail), weights_only=True)
    good = (
        type(loaded) is torch.Tensor
        and loaded.dtype == dtype
        and tuple(loaded.shape) == shape
        and loaded.is_contiguous()
        and bytes(loaded.view(torch.uint8).flatten().tolist()) == data
    )
    if not good:
        raise RuntimeError(f"torch {torch.__version__} lays out a saved {dtype} in a way that Unbroken does not know")
