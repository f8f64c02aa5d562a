"""Several ranks: real processes with gloo, as torchrun starts them. The scenarios are in world.py.

The scenarios of a world share its processes, as starting them is what takes the time.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOGETHER = {
    2: [
        "ddp_resumes_exactly_on_every_rank",
        "replicated_tensors_are_written_once_and_spread_by_size",
        "a_late_rank_fails_the_attempt_by_name_and_the_next_succeeds",
        "a_rank_that_cannot_write_fails_the_attempt_on_all_ranks",
        "a_structure_that_changes_on_one_rank_fails_by_name_and_is_planned_anew",
        "a_rank_that_cannot_start_is_named_on_all",
        "a_state_that_one_rank_cannot_save_is_named_on_all",
        "back_to_back_saves_with_barriers_in_the_trainer",
        "saves_by_time_fall_on_the_same_steps",
        "a_signal_on_one_rank_stops_all_at_one_step",
        "a_signal_after_the_structure_changed_saves_all_the_same",
        "damage_that_one_rank_finds_makes_all_fall_back",
        "one_rank_with_another_model_stops_all",
        "sharded_modules_and_their_optimizer",
    ],
    3: [
        "ddp_resumes_exactly_on_every_rank",
        "replicated_tensors_are_written_once_and_spread_by_size",
        "a_structure_that_changes_on_one_rank_fails_by_name_and_is_planned_anew",
        "a_signal_on_one_rank_stops_all_at_one_step",
        "damage_that_one_rank_finds_makes_all_fall_back",
    ],
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_world(size, directory, names, timeout=240, **environment):
    """Runs the scenarios; returns for each rank the exit code, and leaves what they said in the directory."""
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environment
    ranks = []
    for rank in range(size):
        with (directory / f"log.{rank}").open("ab") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, HERE / "world.py", directory, *names],
                    env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        return [rank.wait(timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def check(size, directory, name):
    for rank in range(size):
        said = directory / f"{name}.{rank}"
        log = (directory / f"log.{rank}").read_text()[-6000:]
        text = said.read_text() if said.exists() else "it did not come so far"
        assert text == "ok", f"rank {rank}: {text}\n{log}"


@pytest.fixture(scope="module")
def worlds():
    """Runs each world once, when its first test asks for it."""
    done = {}
    with tempfile.TemporaryDirectory() as place:

        def get(size):
            if size not in done:
                done[size] = Path(place) / str(size)
                done[size].mkdir()
                run_world(size, done[size], TOGETHER[size])
            return done[size]

        yield get


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in TOGETHER.items() for name in names])
def test_world(worlds, size, name):
    check(size, worlds(size), name)


@pytest.mark.slow
def test_every_global_batch_is_the_same_across_worlds_of_2_1_4_and_3(tmp_path):
    for size in (2, 1, 4, 3):
        assert run_world(size, tmp_path, ["train_on"], STEPS="5", ROOT="all") == [0] * size
        check(size, tmp_path, "train_on")
    changed = json.loads((tmp_path / "all" / "taken.json").read_text())
    assert run_world(1, tmp_path, ["train_on"], STEPS="20", ROOT="one") == [0]
    check(1, tmp_path, "train_on")
    undisturbed = json.loads((tmp_path / "one" / "taken.json").read_text())
    assert changed == undisturbed
    assert len(changed) == 20


@pytest.mark.slow
def test_sharded_state_goes_from_2_to_4_to_3_ranks(tmp_path):
    assert run_world(2, tmp_path, ["sharded_modules_and_their_optimizer"], ROOT="run") == [0, 0]
    check(2, tmp_path, "sharded_modules_and_their_optimizer")
    for size in (4, 3):
        assert run_world(size, tmp_path, ["sharded_state_of_another_world_is_resharded"], ROOT="run") == [0] * size
        check(size, tmp_path, "sharded_state_of_another_world_is_resharded")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_rank_that_dies_in_a_save_costs_that_save(tmp_path):
    assert run_world(2, tmp_path, ["die_in_a_save"], ROOT="run") == [0, -signal.SIGKILL]
    assert (tmp_path / "run" / "survivor").read_text() == "saw it"
    assert run_world(2, tmp_path, ["save_the_same_step_again"], ROOT="run") == [0, 0]
    check(2, tmp_path, "save_the_same_step_again")
