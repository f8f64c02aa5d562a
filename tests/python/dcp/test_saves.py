"""Saves one after the other: staging, the modes of async_save, and what they leave behind."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_parts import a_state, blank, differences, failure, load_ours, load_stock, same, save_stock
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import unbroken

HERE = Path(__file__).parent


@pytest.fixture
def slow_disk(monkeypatch):
    """Writes that wait until they are let go."""
    go = threading.Event()
    begun = threading.Event()
    write = unbroken._engine.write_plain_rank

    def slowly(*arguments, **options):
        begun.set()
        assert go.wait(60)
        return write(*arguments, **options)

    monkeypatch.setattr("unbroken._engine.write_plain_rank", slowly)
    yield begun, go
    go.set()


# --- one writer, many saves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_ours, load_stock])
def test_one_writer_saves_to_one_path_after_the_other(load, tmp_path):
    writer = unbroken.UnbrokenWriter(tmp_path / "0")
    for number in range(1, 5):
        dcp.save(a_state(number), storage_writer=writer, checkpoint_id=tmp_path / f"s{number}", no_dist=True)
        dcp.async_save(
            a_state(number + 10), storage_writer=writer, checkpoint_id=tmp_path / f"a{number}", no_dist=True
        ).result()
    for number in range(1, 5):
        same(load(blank(), tmp_path / f"s{number}"), number)
        same(load(blank(), tmp_path / f"a{number}"), number + 10)


def test_a_new_writer_for_each_save_has_the_arena_of_the_last(tmp_path):
    gc.collect()  # writers of other tests would give theirs back in between
    arenas = set()
    for number in range(1, 6):
        writer = unbroken.UnbrokenWriter(tmp_path / f"{number}")
        dcp.async_save(a_state(number), storage_writer=writer, no_dist=True).result()
        arenas.add(writer._arena._image.image.arena_address())
        gone = weakref.ref(writer)
        del writer
        deadline = time.monotonic() + 30
        while gone() is not None:  # the thread of the save lets go of it a little after the result is there
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert len(arenas) == 1
    for number in range(1, 6):
        same(load_ours(blank(), tmp_path / f"{number}"), number)


def test_a_state_that_changes_its_shape_between_saves(tmp_path):
    writer = unbroken.UnbrokenWriter(tmp_path)
    for number, tensors in enumerate([3, 9, 3, 1, 5, 5], 1):
        state = a_state(number, tensors)
        dcp.async_save(state, storage_writer=writer, checkpoint_id=tmp_path / f"{number}", no_dist=True).result()
        loaded = load_stock(a_state(0, tensors), tmp_path / f"{number}")
        assert not differences(loaded["model"], a_state(number, tensors)["model"])
        assert loaded["name"] == f"run {number}"


def test_the_first_async_save_of_a_single_process_copies_once(tmp_path, monkeypatch):
    """The guess is right: what stage() copied is what is written."""
    copies = []
    real = unbroken.checkpoint._image.SlotImage.copy
    monkeypatch.setattr(
        "unbroken.checkpoint._image.SlotImage.copy", lambda self, some: (copies.extend(some), real(self, some))[1]
    )
    state = a_state(3)
    dcp.async_save(state, storage_writer=unbroken.UnbrokenWriter(tmp_path / "c"), no_dist=True).result()
    tensors = [value for _, value in unbroken.checkpoint._dcp_stage._leaves(state) if isinstance(value, torch.Tensor)]
    assert len(copies) == len(tensors)
    same(load_stock(blank(), tmp_path / "c"), 3)


def test_values_that_are_no_tensors_are_of_the_moment_too(slow_disk, tmp_path):
    _, go = slow_disk
    state = a_state(4)
    saved = dcp.async_save(state, storage_writer=unbroken.UnbrokenWriter(tmp_path / "c"), no_dist=True)
    state["ordered"]["a"] = 99
    state["ordered"]["b"].append(99)
    state["list"][1]["deep"][1] = "other"
    state["model"].clear()
    go.set()
    saved.result()
    same(load_ours(blank(), tmp_path / "c"), 4)


def test_a_second_async_save_waits_for_the_first(slow_disk, tmp_path):
    begun, go = slow_disk
    writer = unbroken.UnbrokenWriter(tmp_path)
    first = dcp.async_save(a_state(1), storage_writer=writer, checkpoint_id=tmp_path / "1", no_dist=True)
    assert begun.wait(60)
    results = []

    def second():
        later = dcp.async_save(a_state(2), storage_writer=writer, checkpoint_id=tmp_path / "2", no_dist=True)
        results.append(first.done())
        later.result()

    thread = threading.Thread(target=second)
    thread.start()
    time.sleep(0.3)
    assert not results
    assert not first.done()
    go.set()
    thread.join(60)
    assert results == [True]
    same(load_ours(blank(), tmp_path / "1"), 1)
    same(load_ours(blank(), tmp_path / "2"), 2)


def test_a_synchronous_save_while_an_async_one_is_in_flight(slow_disk, tmp_path, monkeypatch):
    """It must not touch the bytes that are staged; nor is its path the other's."""
    begun, go = slow_disk
    writer = unbroken.UnbrokenWriter(tmp_path)
    first = dcp.async_save(a_state(1), storage_writer=writer, checkpoint_id=tmp_path / "1", no_dist=True)
    assert begun.wait(60)
    thread = threading.Thread(
        target=lambda: dcp.save(a_state(2), storage_writer=writer, checkpoint_id=tmp_path / "2", no_dist=True)
    )
    thread.start()
    time.sleep(0.2)
    go.set()
    thread.join(60)
    first.result()
    same(load_ours(blank(), tmp_path / "1"), 1)
    same(load_ours(blank(), tmp_path / "2"), 2)


def test_a_synchronous_save_between_stage_and_its_save(tmp_path):
    writer = unbroken.UnbrokenWriter(tmp_path)
    staged = writer.stage(a_state(1))
    dcp.save(a_state(2), storage_writer=writer, checkpoint_id=tmp_path / "2", no_dist=True)
    dcp.save(staged, storage_writer=writer, checkpoint_id=tmp_path / "1", no_dist=True)
    same(load_ours(blank(), tmp_path / "1"), 1)
    same(load_ours(blank(), tmp_path / "2"), 2)


def test_saves_from_several_threads_with_one_writer_each(tmp_path):
    failures = []

    def saves(name):
        try:
            writer = unbroken.UnbrokenWriter(tmp_path / name)
            for number in range(1, 6):
                path = tmp_path / f"{name}{number}"
                dcp.async_save(a_state(number), storage_writer=writer, checkpoint_id=path, no_dist=True).result()
                same(load_ours(blank(), path), number)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=saves, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures


def test_an_async_save_that_fails_to_plan_does_not_block_the_next(tmp_path):
    class Fails(DefaultSavePlanner):
        def create_local_plan(self):
            raise OSError("no plan")

    writer = unbroken.UnbrokenWriter(tmp_path)
    kept = dcp.async_save(
        a_state(1), storage_writer=writer, checkpoint_id=tmp_path / "1", planner=Fails(), no_dist=True
    )
    assert "no plan" in str(failure(kept.result))
    dcp.async_save(a_state(2), storage_writer=writer, checkpoint_id=tmp_path / "2", no_dist=True).result()
    same(load_ours(blank(), tmp_path / "2"), 2)


def test_a_staged_state_that_nobody_saves_does_not_block_the_next(tmp_path):
    writer = unbroken.UnbrokenWriter(tmp_path / "c")
    writer.stage(a_state(1))
    dcp.async_save(a_state(2), storage_writer=writer, no_dist=True).result()
    same(load_ours(blank(), tmp_path / "c"), 2)


def test_staged_tensors_outlive_the_writer(tmp_path):
    writer = unbroken.UnbrokenWriter(tmp_path / "c")
    staged = writer.stage(a_state(3))
    writer.close()
    del writer
    gc.collect()
    assert not differences(staged["model"], a_state(3)["model"])
    save_stock(staged, tmp_path / "stock")
    same(load_ours(blank(), tmp_path / "stock"), 3)


def test_memory_is_given_back_by_close_and_the_writer_goes_on(tmp_path):
    writer = unbroken.UnbrokenWriter(tmp_path)
    for number in range(1, 4):
        dcp.async_save(
            a_state(number), storage_writer=writer, checkpoint_id=tmp_path / f"{number}", no_dist=True
        ).result()
        writer.close()
        assert writer._arena._image is None
        same(load_ours(blank(), tmp_path / f"{number}"), number)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_torchs_own_stager_given_explicitly(asynchronous, tmp_path):
    options = StagingOptions(False, False, use_async_staging=asynchronous, use_non_blocking_copy=False)
    stager = DefaultStager(options)
    writer = unbroken.UnbrokenWriter(tmp_path)
    for number in range(1, 4):
        saved = dcp.async_save(
            a_state(number),
            storage_writer=writer,
            checkpoint_id=tmp_path / f"{number}",
            async_stager=stager,
            no_dist=True,
        )
        (saved.upload_completion if asynchronous else saved).result()
        same(load_ours(blank(), tmp_path / f"{number}"), number)
    stager.close()


def test_the_drop_ins_are_what_dcp_looks_for(tmp_path):
    writer = unbroken.UnbrokenWriter(tmp_path / "c")
    assert isinstance(writer, dcp.StorageWriter)
    assert isinstance(writer, dcp.staging.AsyncStager)
    assert not writer.should_synchronize_after_execute
    assert isinstance(unbroken.UnbrokenReader(tmp_path), dcp.StorageReader)
    assert writer.storage_meta().checkpoint_id == str(tmp_path / "c")
    assert unbroken.UnbrokenWriter.validate_checkpoint_id(str(tmp_path / "c"))
    assert not unbroken.UnbrokenWriter.validate_checkpoint_id("s3://bucket/c")
    metadata = dcp.save(a_state(1), storage_writer=writer, no_dist=True)
    assert metadata.storage_meta.checkpoint_id == str(tmp_path / "c")
    assert metadata.storage_data
    assert str(tmp_path).encode() not in (tmp_path / "c" / ".metadata").read_bytes()


# --- in a process of its own -----------------------------------------------------------------------------------------


def run(script, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done


def test_process_mode(tmp_path):
    """The state goes to another process in one piece of memory: with few descriptors, 3000 tensors still pass."""
    script = """
        import os, resource, socket, sys, warnings
        import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor
        from torch.distributed.device_mesh import init_device_mesh
        import unbroken
        warnings.simplefilter("ignore")

        if __name__ == "__main__":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
            dist.init_process_group("gloo")
            mesh = init_device_mesh("cpu", (1,))
            resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
            root = sys.argv[1]
            writer = unbroken.UnbrokenWriter(root)
            big = torch.arange(10000.0)
            for number in range(4):
                state = {
                    "many": {f"t{i}": torch.full((3,), float(number * 10000 + i)) for i in range(3000)},
                    "sharded": distribute_tensor(torch.full((8, 2), float(number)), mesh, [Shard(0)]),
                    "view": big[5:8],
                    "sparse": torch.eye(3).to_sparse(),
                    "empty": torch.zeros(0, 3),
                    "text": "x" * number,
                    "nested": [{"a": torch.tensor(number)}, (1, 2)],
                }
                saved = dcp.async_save(
                    state,
                    storage_writer=writer,
                    checkpoint_id=f"{root}/{number}",
                    async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                )
                for tensor in state["many"].values():
                    tensor.zero_()
                state["sharded"].to_local().zero_()
                # torch's process answers over one pipe: of two saves at once each may take the other's answer.
                saved.result()
            for number in range(4):
                for reader in (unbroken.UnbrokenReader(f"{root}/{number}"), dcp.FileSystemReader(f"{root}/{number}")):
                    state = {
                        "many": {f"t{i}": torch.zeros(3) for i in range(3000)},
                        "sharded": distribute_tensor(torch.zeros(8, 2), mesh, [Shard(0)]),
                        "view": torch.zeros(3), "empty": torch.zeros(0, 3), "text": "",
                        "nested": [{"a": torch.tensor(0)}, ()],
                    }
                    dcp.load(state, storage_reader=reader)
                    for i in range(3000):
                        assert torch.equal(state["many"][f"t{i}"], torch.full((3,), float(number * 10000 + i)))
                    assert torch.equal(state["sharded"].full_tensor(), torch.full((8, 2), float(number)))
                    assert torch.equal(state["view"], big[5:8])
                    assert state["text"] == "x" * number
                    assert state["nested"][0]["a"] == number and state["nested"][1] == (1, 2)
            dist.destroy_process_group()
            print("done")
    """
    # multiprocessing starts its child from a file
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path / "out"],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "done" in done.stdout


def test_twenty_saves_leave_memory_and_descriptors_and_threads_where_the_first_left_them(tmp_path):
    """S4, S5, S9: 3000 tensors of 100 KiB in all ways of saving; the arena is not made anew."""
    script = """
        import gc, os, sys, threading, time, warnings
        import torch, torch.distributed.checkpoint as dcp
        import unbroken
        warnings.simplefilter("ignore")

        def resident():
            gc.collect()
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

        state = {f"t{i}": torch.full((25_000,), float(i)) for i in range(int(sys.argv[3]))} | {"n": 0}
        reused = unbroken.UnbrokenWriter(sys.argv[1])
        after = []
        for number in range(20):
            path = f"{sys.argv[1]}/{number % 2}"
            state["n"] = number
            if sys.argv[2] == "one":
                writer = reused
                options = {"checkpoint_id": path}
                writer._overwrite = True
            else:
                writer = unbroken.UnbrokenWriter(path, overwrite=True)
                options = {}
            during = len(os.listdir("/proc/self/fd"))
            saved = dcp.async_save(state, storage_writer=writer, no_dist=True, **options)
            assert len(os.listdir("/proc/self/fd")) < during + 40
            saved.result()
            del saved, writer
            # DCP's own thread ends when it has been told of; until then it holds the arena.
            ends = time.monotonic() + 30
            while after and threading.active_count() > after[0][2] and time.monotonic() < ends:
                time.sleep(0.01)
            after.append((resident(), len(os.listdir("/proc/self/fd")), threading.active_count()))
        # While a save's thread ends there are two arenas, its own and that of the next one.
        early, last = [max(figures) for figures in zip(*after[:8])], after[-1]
        assert last[0] < early[0] + (32 << 20), after
        assert last[1] <= early[1] + 1, after
        assert last[2] <= early[2] + 1, after
    """
    run(script, tmp_path / "a", "one", 3000)
    run(script, tmp_path / "b", "many", 500)
