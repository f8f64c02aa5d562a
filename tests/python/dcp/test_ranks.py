"""Four ranks: real processes with gloo. The scenarios are in dcp_world.py; they share the processes of one world, as
starting them is what takes the time.
"""

from pathlib import Path

import pytest
import torch
from dcp_parts import load_ours, load_stock
from ranks import check, run_ranks

HERE = Path(__file__).parent
TOGETHER = [
    "uneven_and_empty_shards",
    "what_is_saved_in_one_layout_is_loaded_in_another",
    "tensor_parallel_under_fully_shard",
    "shards_of_several_stretches_are_refused_by_name",
    "partial_sums_are_refused",
    "sharded_tensors_of_fsdp1",
    "large_shards_are_cut",
    "replicated_tensors_are_spread_and_later_saves_copy_once",
    "plain_values_that_differ_between_ranks",
    "one_of_several_values_is_saved_where_that_is_asked_for",
    "a_planner_that_gives_each_rank_a_key_of_its_own",
    "every_rank_saves_alone",
    "a_group_of_some_ranks",
    "each_rank_without_the_others",
    "cached_plans",
    "what_one_rank_cannot_save_fails_on_all_by_name",
    "a_rank_whose_disk_is_full_fails_the_save_on_all",
    "an_existing_checkpoint_is_refused_on_all",
    "back_to_back_async_saves_with_barriers_in_the_trainer",
    "in_processes_of_their_own",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    directory = tmp_path_factory.mktemp("world")
    run_ranks(HERE / "dcp_world.py", 4, directory, TOGETHER, timeout=500)
    return directory


@pytest.mark.parametrize("name", TOGETHER)
def test_four_ranks(name, world):
    check(world, name, range(4))


def test_what_four_ranks_saved_is_loaded_by_one(world):
    for load in (load_ours, load_stock):
        path = world / "back_to_back_async_saves_with_barriers_in_the_trainer" / "5"
        loaded = load({"d": torch.zeros(6, 2), "n": 0}, path)
        assert torch.equal(loaded["d"], torch.full((6, 2), 5.0))
        assert loaded["n"] == 5


def test_a_rank_that_dies_before_the_marker_leaves_no_checkpoint(tmp_path):
    codes = run_ranks(HERE / "dcp_world.py", 2, tmp_path, ["a_rank_dies_before_the_marker"], timeout=500)
    assert codes == [0, 9]
    check(tmp_path, "a_rank_dies_before_the_marker", [0])
