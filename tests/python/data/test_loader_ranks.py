"""Data-parallel ranks: from a mesh, from torch.distributed, by number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing
from loader_helpers import Numbers, indices
from torch.distributed.device_mesh import init_device_mesh

from unbroken.data import DataLoader, GlobalBatchSampler

WORLD = 4


def _samples(**arguments: Any) -> list[list[int]]:
    return [indices(batch) for batch in DataLoader(Numbers(24), global_batch_size=8, seed=3, **arguments)]


def _expected(dp_rank: int, dp_size: int) -> list[list[int]]:
    return list(GlobalBatchSampler(24, global_batch_size=8, seed=3, dp_rank=dp_rank, dp_size=dp_size))


def _check_meshes(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    half, other = divmod(rank, 2)

    assert _samples() == _expected(rank, 4)
    assert _samples(mesh=init_device_mesh("cpu", (4,))) == _expected(rank, 4)

    tensor_parallel = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert _samples(mesh=tensor_parallel) == _expected(half, 2), "peers of tensor parallelism get the same samples"
    assert _samples(mesh=tensor_parallel["dp"]) == _expected(half, 2)
    assert _samples(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))) == _expected(other, 2)

    hybrid = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "cp", "dp_shard"))
    assert _samples(mesh=hybrid) == _expected(rank, 4)
    shard = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp_shard"))
    assert _samples(mesh=shard) == _expected(other, 2)

    for unclear in (
        init_device_mesh("cpu", (2, 2)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "tp")),
    ):
        with pytest.raises(ValueError, match="'dp_shard'"):
            _samples(mesh=unclear)
    assert _samples(dp_rank=0, dp_size=1) == _expected(0, 1), "numbers are taken at their word"
    dist.destroy_process_group()


@pytest.mark.slow
def test_meshes_and_the_process_group_say_which_ranks_get_different_samples(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_check_meshes, args=(str(tmp_path / "store"),), nprocs=WORLD)


def test_alone_there_is_one_rank() -> None:
    assert _samples() == _expected(0, 1)


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="init_process_group"):
        _samples()
    assert _samples(dp_rank=3, dp_size=4) == _expected(3, 4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert _samples() == _expected(0, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dp_rank": 1}, "both"),
        ({"dp_size": 2}, "both"),
        ({"dp_rank": 2, "dp_size": 2}, "fewer"),
        ({"dp_rank": -1, "dp_size": 2}, "from 0"),
        ({"dp_rank": 0, "dp_size": 3}, "6 and 9 fit"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _samples(**arguments)
