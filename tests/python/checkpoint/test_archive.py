"""The bytes around a tensor's data are those of torch.save."""

import io
import os
import resource

import pytest
import torch
from checkpoint_parts import same_tensor

from unbroken.checkpoint._archive import DTYPES, _frame, frame


def random_tensor(dtype, shape):
    count = max(1, torch.Size(shape).numel()) * dtype.itemsize
    raw = torch.tensor(list(os.urandom(count)), dtype=torch.uint8)
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype)[: torch.Size(shape).numel()].reshape(shape)


def compose(tensor):
    head, tail = frame(tensor.dtype, tuple(tensor.shape))
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
    return head, data, tail


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (7, 5), (1000,)], ids=str)
def test_a_composed_archive_loads_as_the_tensor(dtype, shape):
    tensor = random_tensor(dtype, shape)
    loaded = torch.load(io.BytesIO(b"".join(compose(tensor))), weights_only=True)
    assert same_tensor(loaded, tensor)
    assert loaded.is_contiguous()
    assert loaded.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_a_composed_archive_is_as_long_as_that_of_torch_save(dtype):
    tensor = random_tensor(dtype, (33, 3))
    stock = io.BytesIO()
    torch.save(tensor, stock)
    head, data, tail = compose(tensor)
    assert len(head) + len(data) + len(tail) == len(stock.getvalue())
    assert stock.getvalue()[len(head) : len(head) + len(data)] == data


def test_the_data_begins_where_torch_aligns_it():
    for shape in [(), (5,), (1024, 3)]:
        head, _ = frame(torch.float32, shape)
        assert len(head) % 64 == 0


def test_a_frame_of_a_huge_tensor_costs_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    head, tail = _frame(torch.uint8, (1 << 30,))
    assert len(head) + len(tail) < 4096
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_other_dtypes_are_not_composed():
    assert torch.quint8 not in DTYPES
    assert torch.float4_e2m1fn_x2 not in DTYPES
