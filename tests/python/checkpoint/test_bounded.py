"""Memory, descriptors and threads do not grow with saves or tensors; loader workers do not slow saves down."""

import gc
import os
import pathlib
import resource
import threading

import pytest
import torch

import unbroken


def measure():
    gc.collect()
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    resident = int(status["VmRSS"].split()[0]) * 1024
    return {
        "resident": resident,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "python threads": threading.active_count(),
    }


def test_200_saves_leave_what_the_third_left(tmp_path):
    """S4, S5, S7. Of 8 MB, or of UNBROKEN_TEST_SAVE_MB, and a value that changes its length each time."""
    state = {
        "x": [torch.randn(1 << 18) for _ in range(int(os.environ.get("UNBROKEN_TEST_SAVE_MB", "8")))],
        "log": "",
        "deep": {str(i): i for i in range(50)},
    }
    with unbroken.Checkpointer(tmp_path, state, keep=unbroken.Keep(last=2)) as run:
        run.resume()
        seen = []
        for i in range(200):
            state["log"] = "x" * (i * 37 % 5000)
            run.step()
            run.save().wait()
            if i in (2, 20, 199):
                seen.append(measure())
    assert run.stats.durable == 200
    assert run.stats.plans == 1
    for name in ("descriptors", "threads", "python threads"):
        assert len({one[name] for one in seen}) == 1, (name, seen)
    assert seen[-1]["resident"] - seen[1]["resident"] < 8 << 20, seen
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_a_failed_save_leaks_nothing(tmp_path):
    state = {"x": torch.randn(1 << 18), "bad": 0}
    with unbroken.Checkpointer(tmp_path, state) as run:
        run.resume()
        seen = []
        for i in range(60):
            state["bad"] = (lambda: 0) if i % 2 else i
            run.step()
            run.save().durable.exception()
            if i in (9, 59):
                seen.append(measure())
        run.step()
        state["bad"] = 1
        run.save().wait()
    assert run.stats.failed == 30
    for name in ("descriptors", "threads"):
        assert seen[0][name] == seen[1][name], seen
    assert seen[1]["resident"] - seen[0]["resident"] < 8 << 20, seen


def test_thousands_of_tensors_take_no_descriptor_each(tmp_path):
    """S9."""
    state = {"x": {str(i): torch.full((3,), float(i)) for i in range(3000)}}
    before = measure()["descriptors"]
    with unbroken.Checkpointer(tmp_path, state) as run:
        run.resume()
        run.step()
        run.save().wait()
        assert measure()["descriptors"] - before < 20
    loaded = {"x": {str(i): torch.zeros(3) for i in range(3000)}}
    unbroken.load(tmp_path, loaded)
    assert all(torch.equal(loaded["x"][name], tensor) for name, tensor in state["x"].items())


def test_starting_again_and_again_in_one_process_leaves_nothing(tmp_path):
    state = {"x": torch.randn(1000)}
    seen = []
    for i in range(30):
        with unbroken.Checkpointer(tmp_path, state) as run:
            assert run.resume() == i
            run.step()
            run.save().wait()
        if i in (5, 29):
            seen.append(measure())
    for name in ("descriptors", "threads"):
        assert seen[0][name] == seen[1][name], seen


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        return torch.tensor(float(index))


@pytest.mark.parametrize("workers", [0, 3])
def test_saves_with_forked_loader_workers_alive_cost_no_page_faults(tmp_path, workers):
    """A fork shares memory until it is written to: an arena that a forked worker holds would fault in every page of
    every copy. It is kept out of forks. Counted here in faults, as time on a busy machine says little."""
    nbytes = 64 << 20
    state = {"x": torch.zeros(nbytes // 4)}
    loader = unbroken.data.DataLoader(Numbers(), global_batch_size=8, seed=1, num_workers=workers)
    faults = []
    with unbroken.Checkpointer(tmp_path, state, loader, keep=unbroken.Keep(last=1)) as run:
        for _ in run.batches(until=8):
            if run.step_number >= 2:
                run.last_save.wait() if run.last_save else None
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                run.save()
                faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    pages = nbytes // 4096
    assert sorted(faults)[len(faults) // 2] < pages // 20, faults
