"""Real worker processes: forked and spawned, kept and not, signalled, failing, left alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from loader_helpers import Failing, Numbers, closing, indices, take

from unbroken.data import DataLoader, LoaderBusyError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class WorkerIds(Numbers):
    """Sample i is (i, the process that read it)."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getpid()])


class Stuck(Numbers):
    """Sample 13 takes for ever."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            time.sleep(3600)
        return super().__getitem__(index)


def loader(samples: int = 40, batch: int = 4, **arguments: Any) -> DataLoader:
    return DataLoader(Numbers(samples), global_batch_size=batch, seed=5, **arguments)


def processes_of(loader: DataLoader) -> set[int]:
    return {int(process) for batch in loader for process in batch[:, 1]}


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": 1},
        {"num_workers": 3, "prefetch_factor": 4},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "micro_batches": 2},
        {"num_workers": 1, "multiprocessing_context": "spawn"},
    ],
)
def test_d5_any_number_and_kind_of_workers_gives_the_batches_of_none(arguments: dict[str, Any]) -> None:
    whole = take(loader().forever(), 25)
    ours = loader(**arguments)
    with closing(ours):
        assert [indices(batch) for _ in range(2) for batch in ours] == whole[:20]
        assert take(ours.forever(), 5) == whole[20:]


def test_d2_resume_with_fewer_samples_left_than_workers() -> None:
    whole = take(loader(14).forever(), 9)
    first = loader(14, num_workers=2)
    with closing(first):
        iterator = first.forever()
        states = [first.state_dict()]
        for _ in range(6):
            take(iterator, 1)
            states.append(first.state_dict())
    for stop in (2, 3, 5):
        second = loader(14, num_workers=3 if stop != 3 else 0)
        with closing(second):
            second.load_state_dict(states[stop])
            assert take(second.forever(), 9 - stop) == whole[stop:]


def test_batches_that_workers_had_ready_when_the_iterator_was_left_come_again() -> None:
    whole = take(loader().forever(), 10)
    for persistent in (False, True):
        ours = loader(num_workers=2, prefetch_factor=4, persistent_workers=persistent)
        with closing(ours):
            seen = []
            for stop in (1, 4, 0, 5):
                iterator = iter(ours)
                seen += take(iterator, stop)
                del iterator
            assert seen == whole


def test_d24_state_is_refused_under_a_live_iterator_of_persistent_workers_and_applied_after() -> None:
    whole = take(loader().forever(), 20)
    ours = loader(num_workers=2, persistent_workers=True)
    with closing(ours):
        iterator = iter(ours)
        state = ours.state_dict() | {"offset": 24, "samples_total": 24}
        with pytest.raises(LoaderBusyError):
            ours.load_state_dict(state)
        take(iterator, 1)
        del iterator
        ours.load_state_dict(state)
        assert [indices(batch) for batch in ours] == whole[6:10]
        assert [indices(batch) for batch in ours] == whole[10:20]


def test_persistent_workers_are_kept_over_epochs_and_others_are_not() -> None:
    for persistent, kept in ((True, True), (False, False)):
        ours = DataLoader(WorkerIds(16), global_batch_size=4, num_workers=2, persistent_workers=persistent)
        with closing(ours):
            first, second = processes_of(ours), processes_of(ours)
            assert (first == second) is kept
            assert os.getpid() not in first | second
        assert all(gone(process) for process in first | second)


def test_workers_ignore_what_a_scheduler_sends_before_it_ends_a_job() -> None:
    whole = take(loader(400).forever(), 60)
    dataset = WorkerIds(400)
    ours = DataLoader(dataset, global_batch_size=4, seed=5, num_workers=2, prefetch_factor=1)
    with closing(ours):
        iterator = iter(ours)
        seen = []
        for number in range(60):
            batch = next(iterator)
            seen.append(batch[:, 0].tolist())
            if number in (1, 2, 30):  # each worker has answered by then
                os.kill(int(batch[0, 1]), signal.SIGTERM)
                os.kill(int(batch[0, 1]), signal.SIGUSR1)
        assert seen == whole


def test_error_in_a_worker_names_the_sample_and_the_next_iterator_starts_at_its_batch() -> None:
    order = take(loader(16, num_workers=0).forever(), 4)
    bad = next(number for number, batch in enumerate(order) if 13 in batch)
    for persistent in (False, True):
        ours = DataLoader(Failing(16), global_batch_size=4, seed=5, num_workers=2, persistent_workers=persistent)
        with closing(ours):
            for _ in range(2):
                iterator = iter(ours)
                take(iterator, bad if ours.place == (0, 0) else 0)
                with pytest.raises(OSError, match=r"(?s)no such image.*sample 13 of epoch 0"):
                    next(iterator)
                assert ours.place == (0, 4 * bad)


def test_killed_worker_is_an_error_and_not_an_end_of_the_epoch() -> None:
    ours = DataLoader(WorkerIds(400), global_batch_size=4, num_workers=1)
    with closing(ours):
        iterator = iter(ours)
        batch = next(iterator)
        os.kill(int(batch[0, 1]), signal.SIGKILL)
        with pytest.raises((RuntimeError, OSError)) as raised:  # which, depends on where torch's loader notices it
            list(iterator)
        # torch's handler of SIGCHLD raises wherever the main thread is just then, and says the same in its own words.
        said = "".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
        assert re.search(r"exit code -9|killed by signal: Killed", said), said
        place = ours.place
        assert place.epoch == 0
        assert len(list(ours)) == (400 - place.offset) // 4


def test_stuck_worker_that_ignores_sigterm_is_ended_by_close() -> None:
    order = take(loader(16).forever(), 4)
    before = next(number for number, batch in enumerate(order) if 13 in batch)
    ours = DataLoader(Stuck(16), global_batch_size=4, seed=5, num_workers=1)
    iterator = iter(ours)
    take(iterator, before)
    workers = [int(name) for name in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    ours.close()
    assert not any(b"pt_data_worker" in Path(f"/proc/{one}/comm").read_bytes() for one in workers if not gone(one))


def test_worker_init_fn_runs_and_finds_the_dataset() -> None:
    ours = loader(8, num_workers=1, worker_init_fn=_check_worker)
    with closing(ours):
        assert len(list(ours)) == 2


def _check_worker(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert worker == info.id == 0
    assert isinstance(info.dataset, Numbers)


SCRIPT = """
import sys
sys.path.insert(0, {helpers!r})
from loader_helpers import Numbers
from unbroken.data import DataLoader

def main():
    loader = DataLoader(Numbers(400), global_batch_size=4, num_workers=2, persistent_workers={persistent})
    iterator = iter(loader)
    next(iterator)
    {last}

if __name__ == "__main__":
    {start}
"""

AS_A_CHILD = (
    "import multiprocessing; p = multiprocessing.Process(target=main); p.start(); p.join(); sys.exit(p.exitcode)"
)


@pytest.mark.parametrize(
    ("persistent", "last", "start", "status"),
    [
        (False, "globals()['kept'] = iterator", "main()", 0),
        (True, "globals()['kept'] = iterator", "main()", 0),
        (False, "globals()['kept'] = iterator; 1 / 0", "main()", 1),
        (True, "globals()['kept'] = iterator", AS_A_CHILD, 0),
    ],
)
def test_process_ends_with_live_workers(persistent: bool, last: str, start: str, status: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    helpers = str(Path(__file__).parent)
    text = textwrap.dedent(SCRIPT).format(helpers=helpers, persistent=persistent, last=last, start=start)
    script.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    if status == 0:
        assert done.stderr == ""
