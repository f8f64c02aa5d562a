"""What a start says when the root, the records or the arguments are not what one would expect."""

import logging
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

import unbroken
from unbroken import errors


def run_of(root, state, **options):
    return unbroken.Checkpointer(root, state, signals=False, **options)


def saved(root, state, steps, resume_at=None):
    with run_of(root, state, keep=None) as run:
        run.resume(resume_at)
        for _ in range(steps):
            state["x"] += 1
            run.step()
            run.save().wait()


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.INFO, "unbroken")


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_stock_checkpoint_on_the_root_is_named_and_not_trained_over_in_silence(tmp_path, caplog):
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "step-100", no_dist=True)
    with run_of(tmp_path, {"x": torch.zeros(3)}) as run:
        assert run.resume() == 0
    (warning,) = warnings_in(caplog)
    assert "step-100" in warning
    assert "unbroken.load()" in warning


def test_a_stock_checkpoint_does_not_become_the_root_of_a_run(tmp_path):
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    before = sorted(path.name for path in tmp_path.iterdir())
    with (
        run_of(tmp_path, {"x": torch.zeros(3)}) as run,
        pytest.raises(errors.InvalidArgumentError, match=r"\.metadata"),
    ):
        run.resume()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("at", [0, 20, -3])
def test_a_record_that_cannot_be_read_is_named(tmp_path, caplog, at):
    """What its life gave up counts again: that is better than no run at all, and must not happen in silence."""
    state = {"x": torch.zeros(3)}
    saved(tmp_path, state, 3)
    saved(tmp_path, state, 1, resume_at=1)
    record = tmp_path / "generations" / "000002.json"
    raw = bytearray(record.read_bytes())
    raw[at] ^= 4
    record.write_bytes(raw)
    caplog.clear()
    with run_of(tmp_path, state) as run:
        assert run.resume() == 3
    (warning,) = warnings_in(caplog)
    assert re.search(r"record of generation 2 cannot be read.*000002\.json", warning)


def test_a_start_without_surprises_warns_of_nothing(tmp_path, caplog):
    state = {"x": torch.zeros(3)}
    saved(tmp_path, state, 2)
    with run_of(tmp_path, state) as run:
        assert run.resume() == 2
    assert not warnings_in(caplog)


def test_a_step_that_was_asked_for_is_not_called_the_newest(tmp_path, caplog):
    state = {"x": torch.zeros(3)}
    saved(tmp_path, state, 3)
    caplog.clear()
    with run_of(tmp_path, state) as run:
        assert run.resume(step=1) == 1
    assert "as asked for" in caplog.text
    assert "newest" not in caplog.text
    assert "passed over" not in caplog.text


def test_a_loader_of_another_kind_is_refused_with_what_to_give(tmp_path):
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=4)
    with pytest.raises(errors.InvalidArgumentError, match=r"unbroken\.data\.DataLoader"):
        run_of(tmp_path, {"x": torch.zeros(3)}, loader=loader)


def test_a_loader_in_the_state_is_refused_as_its_place_would_be_that_of_delivered_batches(tmp_path):
    loader = unbroken.data.DataLoader(list(range(8)), global_batch_size=4, seed=1)
    with pytest.raises(errors.InvalidArgumentError, match=r"'data'.*loader="):
        run_of(tmp_path, {"x": torch.zeros(3), "data": loader})
