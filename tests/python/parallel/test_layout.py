"""Which part of a DTensor a rank holds, against torch.chunk by hand: on meshes too large to start ranks for."""

import itertools
import math
import random

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from unbroken.checkpoint._layout import local_boxes


def chunk(tensor, chunks, dim, number):
    parts = torch.chunk(tensor, chunks, dim)
    return parts[number] if number < len(parts) else tensor.narrow(dim, 0, 0)


def held(full, boxes, local_shape):
    """A local tensor as the boxes say; -1 where they say nothing."""
    local = torch.full(local_shape, -1)
    for box in boxes:
        part = full
        for dim, (begin, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, begin, length)
        box.of(local).copy_(part)
    return local


def draw(rng):
    shape = [rng.choice([1, 2, 3, 5, 6, 7, 9, 13]) for _ in range(rng.randint(1, 3))]
    mesh = [rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(1, 3))]
    return shape, mesh, torch.arange(math.prod(shape)).view(shape)


def places(mesh):
    return itertools.product(*map(range, mesh))


@pytest.fixture
def rng():
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)


def test_plain_shards_are_one_box_as_torch_says(rng):
    for _ in range(300):
        shape, mesh, _ = draw(rng)
        placements = [rng.choice([Replicate(), *map(Shard, range(len(shape)))]) for _ in mesh]
        for at in places(mesh):
            sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(at), placements)
            boxes = local_boxes(shape, mesh, at, placements, sizes)
            expected = [] if 0 in sizes else [(tuple(offsets), tuple(sizes), (0,) * len(shape))]
            assert [tuple(box) for box in boxes] == expected


def test_shards_on_top_of_earlier_ones_are_exact_although_torch_is_wrong_about_them(rng):
    """FSDP2 over tensor (and expert) parallelism: the mesh dimension on the left shards last (T5)."""
    torch_is_wrong = 0
    for _ in range(400):
        shape, mesh, full = draw(rng)
        mesh.append(rng.choice([2, 4]))
        dim = rng.randrange(len(shape))
        before = [rng.choice([Replicate(), Shard(dim), Shard(rng.randrange(len(shape)))]) for _ in mesh[1:]]
        factor = math.prod(size for size, p in zip(mesh[1:], before, strict=True) if p == Shard(dim))
        placements = [_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim), *before]
        covered = torch.zeros_like(full, dtype=torch.bool)
        for at in places(mesh):
            local = full
            for i in [*range(1, len(mesh)), 0]:
                if not isinstance(placements[i], Replicate):
                    local = chunk(local, mesh[i], placements[i].dim, at[i])
            boxes = local_boxes(shape, mesh, at, placements, local.shape)
            assert torch.equal(held(full, boxes, local.shape), local), (shape, mesh, at, placements)
            covered.view(-1)[local.reshape(-1)] = True
            box = _compute_local_shape_and_global_offset(shape, mesh, list(at), placements)
            torch_is_wrong += local.numel() > 0 and [(one.sizes, one.offsets) for one in boxes] != [box]
        assert covered.all()
    assert torch_is_wrong


def test_a_strided_shard_alone_is_several_boxes():
    """What is left when the shards on its right are gathered: [0, 1, 4, 5] and [2, 3, 6, 7] of eight."""
    full = torch.arange(8)
    placements = [_StridedShard(0, split_factor=2), Replicate()]
    boxes = [local_boxes([8], [2, 2], (i, 0), placements, [4]) for i in range(2)]
    assert [[tuple(box) for box in one] for one in boxes] == [
        [((0,), (2,), (0,)), ((4,), (2,), (2,))],
        [((2,), (2,), (0,)), ((6,), (2,), (2,))],
    ]
    assert held(full, boxes[1], [4]).tolist() == [2, 3, 6, 7]


def test_an_order_of_shards_of_ones_own():
    full = torch.arange(6)
    for i, j in places([2, 3]):
        local = chunk(chunk(full, 3, 0, j), 2, 0, i)
        boxes = local_boxes([6], [2, 3], (i, j), [Shard(0), Shard(0)], local.shape, [(0, (1, 0))])
        assert torch.equal(held(full, boxes, local.shape), local)


def test_a_tensor_without_elements_is_one_box():
    assert [tuple(b) for b in local_boxes([4, 0], [2], (1,), [Shard(0)], [2, 0])] == [((0, 0), (4, 0), (0, 0))]


@pytest.mark.parametrize(
    ("placements", "local", "message"),
    [([Partial()], [4], "Partial"), ([Shard(0)], [3], r"has the shape \(3,\)"), ([Replicate()], [2], r"\(2,\)")],
)
def test_what_cannot_be_right_is_refused(placements, local, message):
    with pytest.raises(ValueError, match=message):
        local_boxes([4], [2], (0,), placements, local)
