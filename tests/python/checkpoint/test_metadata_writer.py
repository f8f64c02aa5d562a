"""`.metadata` as it is written for a plan: when read, by anyone, it is what DCP's own objects would be."""

import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from unbroken.checkpoint._metadata import read_metadata
from unbroken.checkpoint._metadata_writer import MetadataWriter
from unbroken.checkpoint._plan import Item, LocalPlan, Places, Plan
from unbroken.checkpoint._state import Role

GIB = 1 << 30


def plan_of(everything, owners):
    local = LocalPlan(everything[0], [], [], [], [], [], "", "")
    return Plan(0, "", local, [], len(everything) == 1, everything, owners)


def shard(key, size, offsets, sizes, dtype="torch.float32", **more):
    return Item(key, tuple(key.split(".")), Role.SPREAD, dtype, size, offsets, sizes, shard=True, **more)


def tensor(key, size, dtype="torch.float32", **more):
    return Item(key, (key,), Role.SPREAD, dtype, size, (0,) * len(size), size, **more)


def test_two_ranks_with_everything_that_there_is():
    first = [
        shard("a.weight", (5, 4), (0, 0), (3, 4)),
        tensor("scalar", (), "torch.int64"),
        tensor("empty", (0, 3), "torch.bfloat16"),
        tensor("large", (3, 1 << 28)),  # three pieces, one behind the 2 GiB that a short integer can say
        tensor("tied", (2,)),
        tensor("tied too", (2,), same_as=4),
        Item("100% %b \ud800é\n", ("mapping", 7, "100% %b \ud800é\n"), Role.OWN, None),
        Item("hole in a pickle", ("hole in a pickle",), Role.LOWEST, None),
    ]
    second = [shard("a.weight", (5, 4), (3, 0), (2, 4)), Item("only.here", ("only", "here"), Role.LOWEST, None)]
    owners = [[(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (4, 0), (6, 0), (7, 0)], [(0, 0), (1, 0)]]
    places = [
        [(f"__0_{slot // 4}.distcp", GIB * slot, 64 + slot) for slot in range(len(owners[0]) + 1)],
        [("__1_0.distcp", 64 * slot, 70000 + slot) for slot in range(len(owners[1]) + 1)],
    ]

    def kept(size, *chunks, dtype=torch.float32):
        sizes = [ChunkStorageMetadata(torch.Size(at), torch.Size(of)) for at, of in chunks]
        return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), sizes)

    state = {
        "a.weight": kept((5, 4), ((0, 0), (3, 4)), ((3, 0), (2, 4))),
        "scalar": kept((), ((), ()), dtype=torch.int64),
        "empty": kept((0, 3), ((0, 0), (0, 3)), dtype=torch.bfloat16),
        "large": kept((3, 1 << 28), *(((i, 0), (1, 1 << 28)) for i in range(3))),
        "tied": kept((2,), ((0,), (2,))),
        "tied too": kept((2,), ((0,), (2,))),
        "100% %b \ud800é\n": BytesStorageMetadata(),
        "hole in a pickle": BytesStorageMetadata(),
        "only.here": BytesStorageMetadata(),
    }
    paths = {item.key: item.path for item in [*first, *second]}
    stored = [
        (MetadataIndex("a.weight", (0, 0), 0), places[0][0]),
        (MetadataIndex("scalar", (), 0), places[0][1]),
        (MetadataIndex("empty", (0, 0), 0), places[0][2]),
        *((MetadataIndex("large", (i, 0), i), places[0][3 + i]) for i in range(3)),
        (MetadataIndex("tied", (0,), 0), places[0][6]),
        (MetadataIndex("tied too", (0,), 0), places[0][6]),
        (MetadataIndex("100% %b \ud800é\n"), places[0][7]),
        (MetadataIndex("hole in a pickle"), places[0][8]),
        (MetadataIndex("a.weight", (3, 0), 1), places[1][0]),
        (MetadataIndex("only.here"), places[1][1]),
    ]
    expected = Metadata(
        state, paths, {index: _StorageInfo(*place) for index, place in stored}, version=CURRENT_DCP_VERSION
    )
    writer = MetadataWriter(plan_of([first, second], owners))
    assert_same(writer.write(columns(places), ()), expected)

    # The values of ranks that differ are listed; then the object of one rank moves, and they are equal again.
    state |= {f"unbroken/rank_0000{r}/values": BytesStorageMetadata() for r in range(2)}
    for r in range(2):
        paths[f"unbroken/rank_0000{r}/values"] = (f"unbroken/rank_0000{r}/values",)
        expected.storage_data[MetadataIndex(f"unbroken/rank_0000{r}/values")] = _StorageInfo(*places[r][-1])
    assert_same(writer.write(columns(places), (0, 1)), expected)
    for r in range(2):
        key = f"unbroken/rank_0000{r}/values"
        del state[key], paths[key], expected.storage_data[MetadataIndex(key)]
    moved = columns(places)
    moved[1] = moved[1].moved({"1": (128, 99)})
    expected.storage_data[MetadataIndex("only.here")] = _StorageInfo("__1_0.distcp", 128, 99)
    assert_same(writer.write(moved, ()), expected)
    assert_same(writer.write(columns(places), ()), expected_with(expected, MetadataIndex("only.here"), places[1][1]))


def columns(places):
    return [Places(*map(list, zip(*its, strict=True))) for its in places]


def expected_with(expected, index, place):
    expected.storage_data[index] = _StorageInfo(*place)
    return expected


def assert_same(parts, expected):
    raw = b"".join(parts)
    for read in (pickle.loads(raw), read_metadata(raw)):
        assert read == expected
        for mapping in ("state_dict_metadata", "planner_data", "storage_data"):
            assert list(getattr(read, mapping)) == list(getattr(expected, mapping))
        # Not compared by ==, and what a reader goes by: the number of the piece, the types.
        for one, other in zip(read.storage_data, expected.storage_data, strict=True):
            assert vars(one) == vars(other)
            assert type(one.offset) is type(other.offset)
        for key, entry in read.state_dict_metadata.items():
            assert type(entry) is type(expected.state_dict_metadata[key])
            if isinstance(entry, TensorStorageMetadata):
                assert type(entry.size) is torch.Size
                assert all(type(part) is torch.Size for c in entry.chunks for part in (c.offsets, c.sizes))


@pytest.mark.parametrize("pieces", [999, 1000, 1001, 3000])
def test_many_pieces_of_many_dimensions(pieces):
    dims = (1,) * 40
    items = [shard("x", (pieces, *dims), (i, *((0,) * 40)), (1, *dims)) for i in range(pieces)]
    places = [(f"__0_{i}.distcp", 0, 70) for i in range(pieces + 1)]
    writer = MetadataWriter(plan_of([items], [[(i, 0) for i in range(pieces)]]))
    read = pickle.loads(b"".join(writer.write(columns([places]), ())))
    assert [chunk.offsets[0] for chunk in read.state_dict_metadata["x"].chunks] == list(range(pieces))
    assert [info.relative_path for info in read.storage_data.values()] == [f"__0_{i}.distcp" for i in range(pieces)]
    assert [index.index for index in read.storage_data] == list(range(pieces))
