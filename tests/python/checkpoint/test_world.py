"""Several ranks: real processes with gloo, as torchrun starts them. The scenarios are in world.py.

The scenarios of a world share its processes, as starting them is what takes the time.
"""

import json
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from ranks import check, run_ranks

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


def run_world(size, directory, names, **environment):
    return run_ranks(HERE / "world.py", size, directory, names, timeout=240, **environment)


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
    check(worlds(size), name, range(size))


@pytest.mark.slow
def test_every_global_batch_is_the_same_across_worlds_of_2_1_4_and_3(tmp_path):
    for size in (2, 1, 4, 3):
        assert run_world(size, tmp_path, ["train_on"], STEPS="5", ROOT="all") == [0] * size
        check(tmp_path, "train_on", range(size))
    changed = json.loads((tmp_path / "all" / "taken.json").read_text())
    assert run_world(1, tmp_path, ["train_on"], STEPS="20", ROOT="one") == [0]
    check(tmp_path, "train_on", range(1))
    undisturbed = json.loads((tmp_path / "one" / "taken.json").read_text())
    assert changed == undisturbed
    assert len(changed) == 20


@pytest.mark.slow
def test_sharded_state_goes_from_2_to_4_to_3_ranks(tmp_path):
    assert run_world(2, tmp_path, ["sharded_modules_and_their_optimizer"], ROOT="run") == [0, 0]
    check(tmp_path, "sharded_modules_and_their_optimizer", range(2))
    for size in (4, 3):
        assert run_world(size, tmp_path, ["sharded_state_of_another_world_is_resharded"], ROOT="run") == [0] * size
        check(tmp_path, "sharded_state_of_another_world_is_resharded", range(size))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_rank_that_dies_in_a_save_costs_that_save(tmp_path):
    assert run_world(2, tmp_path, ["die_in_a_save"], ROOT="run") == [0, -signal.SIGKILL]
    assert (tmp_path / "run" / "survivor").read_text() == "saw it"
    assert run_world(2, tmp_path, ["save_the_same_step_again"], ROOT="run") == [0, 0]
    check(tmp_path, "save_the_same_step_again", range(2))
