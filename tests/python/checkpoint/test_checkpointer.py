"""What the Checkpointer does when it is called: when it saves, what it refuses, what it returns."""

import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from checkpoint_parts import Training, differences, reseal

import unbroken
from unbroken import errors


class Loader:
    """As the Checkpointer sees one: batches are numbers; it counts those that are done."""

    def __init__(self, identity="data"):
        self.identity = identity
        self.done = 0
        self.delivered = 0
        self.attached = False

    def attach(self):
        self.attached = True

    def detach(self):
        self.attached = False

    def complete(self, batches=1):
        assert self.done + batches <= self.delivered
        self.done += batches

    def state_dict(self):
        return {"done": self.done, "identity": self.identity}

    def load_state_dict(self, state, strict=False):
        if state["identity"] != self.identity:
            raise errors.InvalidArgumentError(f"load data state: it is of {state['identity']!r}, not {self.identity!r}")
        self.done = self.delivered = state["done"]

    def forever(self):
        while True:
            self.delivered += 1
            yield self.delivered


def attempts(root):
    return sorted((p.name for p in root.glob("step-*")), key=lambda name: int(name.split("-")[1]))


def steps(root):
    return [int(name.split("-")[1]) for name in attempts(root)]


def test_importing_unbroken_imports_no_torch():
    script = "import unbroken, sys; assert 'torch' not in sys.modules; unbroken.Every(steps=1); unbroken.load"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_batches_resumes_steps_saves_and_ends(tmp_path):
    seen = []
    for until in (5, 5, 12):
        loader, state = Loader(), {"x": torch.zeros(1)}
        with unbroken.Checkpointer(tmp_path, state, loader, unbroken.Every(steps=4), keep=None) as run:
            for batch in run.batches(until=until):
                assert run.step_number == batch - 1
                state["x"] += batch
                seen.append(batch)
                assert loader.attached
                run._await_background()  # so that no due save is deferred, however slow the machine is
            assert run.step_number == until
            assert run.last_save is None or run.last_save.durable.done()
        assert not loader.attached
        assert loader.done == until
        assert state["x"].item() == sum(range(1, until + 1))
    assert seen == list(range(1, 13))
    assert steps(tmp_path) == [4, 5, 8, 12]


def test_a_batch_whose_body_was_left_is_not_done(tmp_path):
    with unbroken.Checkpointer(tmp_path, {"x": 1}, loader := Loader()) as run:
        for _ in run.batches(until=10):
            if loader.delivered == 3:
                break
        assert (run.step_number, loader.done) == (2, 2)
        run.save().wait()
    with unbroken.Checkpointer(tmp_path, {"x": 1}, loader := Loader()) as run:
        assert next(run.batches(until=10)) == 3


def test_batches_without_a_loader_is_refused(tmp_path):
    with unbroken.Checkpointer(tmp_path, {"x": 1}) as run, pytest.raises(ValueError, match="loader="):
        run.batches(until=3)


def test_fetched_ahead_is_not_done_and_several_batches_can_be_one_step(tmp_path):
    loader = Loader()
    with unbroken.Checkpointer(tmp_path, {"x": 1}, loader) as run:
        run.resume()
        source = loader.forever()
        for _ in range(5):
            next(source)
        run.step(batches=2)
        run.step()
        run.save().wait()
    other = Loader()
    with unbroken.Checkpointer(tmp_path, {"x": 1}, other) as run:
        assert run.resume() == 2
    assert other.done == 3


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_every_due_step_is_saved_or_deferred_and_made_up_for(tmp_path, every):
    with unbroken.Checkpointer(tmp_path, {"x": torch.randn(100)}, every=unbroken.Every(steps=every), keep=None) as run:
        run.resume()
        for _ in range(21):
            run.step()
            time.sleep(0.005)
    assert run.stats.failed == 0
    assert run.stats.durable + run.stats.deferred >= 21 // every
    assert run.stats.durable == len(attempts(tmp_path)) == len(run.stats.saves)
    assert [one.step for one in run.stats.saves] == steps(tmp_path)


def test_a_due_save_that_finds_the_arena_in_use_is_made_when_it_is_free(tmp_path, monkeypatch):
    gate = threading.Event()
    real = unbroken.Checkpointer._commit

    def slow(self, *arguments):
        gate.wait(20)
        real(self, *arguments)

    monkeypatch.setattr(unbroken.Checkpointer, "_commit", slow)
    with unbroken.Checkpointer(tmp_path, {"x": torch.randn(100)}, every=unbroken.Every(steps=2), keep=None) as run:
        run.resume()
        run.step()
        run._await_background()
        run.step()  # saved, and held up
        for _ in range(4):
            run.step()  # due at 4 and at 6
        assert run.stats.deferred >= 2
        assert run.stats.durable == 0
        gate.set()
        run._await_background()
        run.step()  # not due, but wanted
        run._await_background()
        run.step()  # 8: due
    assert steps(tmp_path) == [2, 7, 8]


def test_saves_by_time(tmp_path):
    with unbroken.Checkpointer(tmp_path, {"x": 1}, every=unbroken.Every(seconds=0.3), keep=None) as run:
        run.resume()
        begin = time.monotonic()
        for _ in range(60):
            run.step()
            time.sleep(0.01)
        elapsed = time.monotonic() - begin
    assert 1 <= run.stats.durable <= elapsed / 0.3


def test_an_explicit_save_waits_and_saving_twice_is_one_save(tmp_path):
    with unbroken.Checkpointer(tmp_path, {"x": torch.randn(10)}, every=unbroken.Every(steps=1), keep=None) as run:
        run.resume()
        for _ in range(5):
            run.step()
            first = run.save()
            assert run.save() is first
            assert run.last_save is first
            assert first.step == run.step_number
        assert first.wait().state == "durable"
        assert run.save() is first
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_a_save_before_the_first_step(tmp_path):
    state = {"x": torch.arange(3.0)}
    with unbroken.Checkpointer(tmp_path, state) as run:
        run.resume()
        run.save().wait()
        state["x"] += 1
        run.step()
    state["x"].zero_()
    with unbroken.Checkpointer(tmp_path, state) as run:
        assert run.resume() == 0
        assert state["x"].tolist() == [0, 1, 2]


def test_the_same_step_in_a_later_life_is_a_checkpoint_of_its_own(tmp_path):
    state = {"x": torch.zeros(1)}
    for life in range(3):
        with unbroken.Checkpointer(tmp_path, state, keep=None) as run:
            run.resume()
            state["x"].fill_(life)
            if run.step_number == 0:
                run.step()
            run.save().wait()
    assert steps(tmp_path) == [1, 1, 1]
    assert unbroken.load(tmp_path, state) == 1
    assert state["x"].item() == 2


@pytest.mark.parametrize("call", ["step", "save"])
def test_calls_in_the_wrong_order_are_refused(tmp_path, call):
    run = unbroken.Checkpointer(tmp_path, {"x": 1})
    with pytest.raises(ValueError, match=r"resume\(\) first"):
        getattr(run, call)()
    run.resume()
    with pytest.raises(ValueError, match="called before"):
        run.resume()
    run.close()
    run.close()
    with pytest.raises(ValueError, match="closed"):
        getattr(run, call)()
    with pytest.raises(ValueError, match="closed"):
        run.resume()


def test_closing_without_a_resume_leaves_nothing(tmp_path):
    with unbroken.Checkpointer(tmp_path / "root", {"x": 1}):
        pass
    assert not (tmp_path / "root").exists()


def test_a_process_that_ends_without_close_ends_after_its_save(tmp_path):
    """32 MiB, so that the save is still in flight when the script is at its end."""
    script = """
import sys, torch, unbroken
run = unbroken.Checkpointer(sys.argv[1], {"x": torch.ones(1 << 23)})
run.resume()
run.step()
run.save()
"""
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True, timeout=100)
    assert unbroken.load(tmp_path, {"x": torch.zeros(1 << 23)}) == 1


def test_a_checkpointer_that_is_dropped_takes_its_thread_along(tmp_path):
    before = set(threading.enumerate())
    run = unbroken.Checkpointer(tmp_path, {"x": torch.ones(3)}, signals=False)
    run.resume()
    run.step()
    run.save().wait()
    (thread,) = set(threading.enumerate()) - before
    del run
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_forked_child_cannot_use_it(tmp_path):
    with unbroken.Checkpointer(tmp_path, {"x": torch.ones(3)}) as run:
        run.resume()
        run.step()
        run.save().wait()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run.step()
            except errors.InvalidArgumentError as error:
                code = 0 if "forked child" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        run.step()
        run.save().wait()


def test_retention_keeps_the_last_and_the_milestones(tmp_path):
    keep = unbroken.Keep(last=2, every_steps=5)
    with unbroken.Checkpointer(tmp_path, {"x": 1}, keep=keep) as run:
        run.resume()
        for _ in range(12):
            run.step()
            run.save().wait()
    assert steps(tmp_path) == [5, 10, 11, 12]


def test_resume_of_a_step(tmp_path):
    state = {"x": torch.zeros(1)}
    with unbroken.Checkpointer(tmp_path, state, keep=None) as run:
        run.resume()
        for _ in range(4):
            state["x"] += 1
            run.step()
            run.save().wait()
    with unbroken.Checkpointer(tmp_path, state, keep=None) as run, pytest.raises(errors.NotFoundError, match="step-4"):
        run.resume(step=9)
    with unbroken.Checkpointer(tmp_path, state, keep=None) as run:
        assert run.resume(step=2) == 2
        assert state["x"].item() == 2
        run.step()
        run.save().wait()
    # What was given up does not come back.
    with unbroken.Checkpointer(tmp_path, state) as run:
        assert run.resume() == 3
        assert state["x"].item() == 2


def test_loading_for_evaluation_claims_nothing(tmp_path):
    training = Training()
    with unbroken.Checkpointer(tmp_path, training.state) as run:
        run.resume()
        training.step()
        run.step()
        run.save().wait()
    before = sorted(p.name for p in tmp_path.rglob("*"))
    other = Training(seed=3)
    generators = torch.get_rng_state()
    assert unbroken.load(tmp_path, {"model": other.model}) == 1
    assert torch.equal(torch.get_rng_state(), generators)
    assert not differences(dict(other.model.state_dict()), dict(training.model.state_dict()))
    assert sorted(p.name for p in tmp_path.rglob("*")) == before
    with pytest.raises(errors.NotFoundError):
        unbroken.load(tmp_path, {"model": other.model}, step=7)
    with pytest.raises(errors.NotFoundError):
        unbroken.load(tmp_path / "absent", {"model": other.model})


def test_resume_says_what_it_chose(tmp_path, caplog):
    caplog.set_level(logging.INFO, "unbroken")
    with unbroken.Checkpointer(tmp_path, {"x": 1}) as run:
        run.resume()
        run.step()
        run.save().wait()
    assert "fresh" in caplog.text
    caplog.clear()
    with unbroken.Checkpointer(tmp_path, {"x": 1}) as run:
        run.resume()
    assert "step 1" in caplog.text
    assert attempts(tmp_path)[0] in caplog.text


def test_numbers_of_saves(tmp_path):
    with unbroken.Checkpointer(tmp_path, {"x": torch.randn(1000)}) as run:
        run.resume()
        run.step()
        one = run.save().wait()
    assert run.stats.durable == 1
    assert list(run.stats.saves) == [one]
    assert one.step == 1
    assert one.state == "durable"
    assert one.attempt == attempts(tmp_path)[0]
    assert one.bytes >= 4000
    assert one.blocked_seconds >= one.stage_seconds > 0
    assert one.plan_seconds == 0
    assert one.write_seconds > 0
    assert run.stats.arena_bytes >= 4000
    assert run.stats.plans == 1


def test_the_structure_is_planned_once_and_anew_when_it_changes(tmp_path):
    state = {"x": torch.zeros(3), "more": {}}
    with unbroken.Checkpointer(tmp_path, state, keep=None) as run:
        run.resume()
        for i in range(6):
            if i == 4:
                state["more"]["y"] = torch.full((2,), 4.0)
            state["x"] += 1
            run.step()
            run.save().wait()
    assert run.stats.plans == 2
    assert [one.plan_seconds > 0 for one in run.stats.saves] == [False] * 4 + [True, False]
    loaded = {"x": torch.zeros(3), "more": {}}
    assert unbroken.load(tmp_path, loaded, step=6) == 6
    assert loaded["more"]["y"].tolist() == [4, 4]
    assert unbroken.load(tmp_path, {"x": torch.zeros(3), "more": {}}, step=4) == 4


def test_two_runs_side_by_side_do_not_share_a_plan(tmp_path):
    """T13: the plan belongs to the instance."""
    states = [{"a": torch.zeros(3)}, {"b": torch.ones(4, dtype=torch.int64)}]
    runs = [unbroken.Checkpointer(tmp_path / str(i), state) for i, state in enumerate(states)]
    for run in runs:
        run.resume()
    for _ in range(3):
        for run in runs:
            run.step()
            run.save().wait()
    for run in runs:
        run.close()
    loaded = {"b": torch.zeros(4, dtype=torch.int64)}
    assert unbroken.load(tmp_path / "1", loaded) == 3
    assert loaded["b"].tolist() == [1, 1, 1, 1]


def test_the_manifest_tells_step_data_and_versions(tmp_path):
    with unbroken.Checkpointer(tmp_path, {"x": 1}, Loader()) as run:
        for _ in run.batches(until=2):
            pass
    manifest = json.loads((tmp_path / attempts(tmp_path)[-1] / "manifest.json").read_text())
    text = json.dumps(manifest)
    assert '"done": 2' in text
    assert torch.__version__ in text
    assert str(tmp_path) not in text


def test_newest_is_by_step_and_not_by_clock(tmp_path):
    """C14: a clock that is wrong, or a copy, gives files any time."""
    state = {"x": torch.zeros(1)}
    with unbroken.Checkpointer(tmp_path, state, keep=None) as run:
        run.resume()
        for _ in range(3):
            state["x"] += 1
            run.step()
            run.save().wait()
    for age, name in enumerate(attempts(tmp_path)):
        reseal(tmp_path / name / "manifest.json", time_ms=1_000_000_000_000 - age * 1_000_000)
        for path in [tmp_path / name, *(tmp_path / name).iterdir()]:
            os.utime(path, (1_000_000_000 - age * 1000, 1_000_000_000 - age * 1000))
    with unbroken.Checkpointer(tmp_path, state) as run:
        assert run.resume() == 3
        assert state["x"].item() == 3


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stop", [1, 4, 9])
def test_delivered_but_not_trained_comes_again(tmp_path, ahead, micro_batches, stop):
    """The real loader, over the end of an epoch: a loop that fetches ahead, and gradient accumulation."""

    def make():
        return unbroken.data.DataLoader(list(range(30)), global_batch_size=6, seed=2, micro_batches=micro_batches)

    def flat(item):
        return [int(x) for part in (item if micro_batches > 1 else [item]) for x in part]

    reference = make().forever()
    expected = [flat(next(reference)) for _ in range(12)]
    trained = []
    with unbroken.Checkpointer(tmp_path, {"x": 1}, loader := make()) as run:
        run.resume()
        source = loader.forever()
        fetched = [next(source) for _ in range(ahead)]
        for _ in range(stop):
            fetched.append(next(source))
            trained.append(flat(fetched.pop(0)))
            run.step()
        run.save().wait()
    with unbroken.Checkpointer(tmp_path, {"x": 1}, loader := make()) as run:
        assert run.resume() == stop
        source = loader.forever()
        while len(trained) < 12:
            trained.append(flat(next(source)))
            run.step()
    assert trained == expected
