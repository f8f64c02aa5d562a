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
    """S4, S5, S7. Of 16 MB, or of UNBROKEN_TEST_SAVE_MB, and a value that changes its length each time."""
    megabytes = int(os.environ.get("UNBROKEN_TEST_SAVE_MB", "16"))
    state = {
        "x": [torch.randn(1 << 18) for _ in range(megabytes)],
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
            if i in (2, 199):
                seen.append(measure())
    assert run.stats.durable == 200
    assert run.stats.plans == 1
    for name in ("descriptors", "threads", "python threads"):
        assert len({one[name] for one in seen}) == 1, (name, seen)
    # What the allocator keeps varies by some MB; one more image, or 16 kB a save, would show.
    assert seen[1]["resident"] - seen[0]["resident"] < 3 << 20, seen
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


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_saves_with_forked_loader_workers_alive_cost_no_page_faults(tmp_path, workers):
    """A fork shares memory until it is written to: an arena that a forked worker holds would fault in every page of
    the next copy. It is kept out of forks. Counted here in faults, as time on a busy machine says little.

    Each epoch forks workers anew, and the arena is there from the first save on: of the faults that the copies cost, an
    epoch's first one would show all. It is not let run into the next epoch, so that its workers stay alive.
    """
    nbytes = 64 << 20
    state = {"x": torch.zeros(nbytes // 4)}
    faults = []
    with unbroken.Checkpointer(tmp_path, state, keep=unbroken.Keep(last=1), signals=False) as run:
        run.resume()
        run.step()
        run.save().wait()
        for _ in range(3):
            loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=workers)
            batches = iter(loader)
            next(batches)
            run.step()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            run.save()
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            run.last_save.wait()
            next(batches)  # they were alive all the time
            del batches
    pages = nbytes // 4096
    assert max(faults) < pages // 4, faults
