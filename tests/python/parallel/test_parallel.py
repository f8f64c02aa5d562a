"""Four ranks under every layout: real processes with gloo, as torchrun starts them. Scenarios are in parallel_world.py.

They share their processes, as starting them is what takes the time. SEED=... in the environment repeats a random one.
"""

import tempfile
from pathlib import Path

import pytest
from ranks import check, run_ranks

HERE = Path(__file__).parent
RANKS = 4
SCENARIOS = [
    "every_layout_loads_what_every_layout_saved",
    "any_placement_loads_what_any_placement_saved",
    "a_run_goes_on_under_other_layouts",
    "a_part_is_loaded_and_the_rest_left",
    "a_fresh_optimizer_goes_on_bit_for_bit",
    "all_that_people_keep_beside_model_and_optimizer",
    "gathered_parameters_are_saved_as_shards_and_nothing_hangs",
    "stock_dcp_reads_it_under_the_same_names",
    "different_values_are_kept_apart_and_come_back_to_their_ranks",
    "a_tensor_of_another_kind_on_one_rank_is_refused_by_name",
    "what_cannot_be_right_is_refused_by_name",
]


@pytest.fixture(scope="module")
def outcome():
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run_ranks(HERE / "parallel_world.py", RANKS, directory, SCENARIOS, timeout=570)
        yield directory


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_four_ranks(outcome, scenario):
    check(outcome, scenario, range(RANKS))
