"""Four ranks under every layout: real processes with gloo, as torchrun starts them. Scenarios are in parallel_world.py.

They share their processes, as starting them is what takes the time. SEED=... in the environment repeats a random one.
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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


def run_ranks(directory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(RANKS):
        with (directory / f"log.{rank}").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, HERE / "parallel_world.py", directory, *SCENARIOS],
                    env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        for rank in ranks:
            rank.wait(570)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.fixture(scope="module")
def outcome():
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run_ranks(directory)
        yield directory


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_four_ranks(outcome, scenario):
    for rank in range(RANKS):
        said = outcome / f"{scenario}.{rank}"
        text = said.read_text() if said.exists() else "it did not come so far"
        log = (outcome / f"log.{rank}").read_text(errors="replace")[-6000:]
        assert text == "ok", f"rank {rank}: {text}\n{log}"
