"""Saves one after the other: staging, planners, plan caches, the modes of async_save, and what they leave behind."""

import gc
import io
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_parts import differences, failure, load_ours, load_stock, save_ours, save_stock
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import unbroken
from unbroken import errors

HERE = Path(__file__).parent


def a_state(number, tensors=6):
    """Nested, with lists, numbers and strings; everything differs with the number."""
    return {
        "model": {f"layer{i}.weight": torch.full((7, i + 1), float(number * 100 + i)) for i in range(tensors)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(number))}}, "groups": [{"lr": 0.1 * number}]},
        "list": [torch.full((3,), float(number)), {"deep": [torch.full((2,), float(number)), "x" * number]}],
        "step": number,
        "name": f"run {number}",
        "ordered": OrderedDict(a=number, b=[number, number]),
    }


def blank():
    return a_state(0)


def same(loaded, number):
    # DCP gives every mapping string keys.
    wanted = a_state(number)
    assert json.dumps(loaded["step"]) == json.dumps(number)
    assert not differences(loaded["model"], wanted["model"])
    assert not differences(loaded["list"], wanted["list"])
    assert loaded["ordered"] == wanted["ordered"]
    assert loaded["name"] == wanted["name"]


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


# --- planners --------------------------------------------------------------------------------------------------------


class Renames(DefaultSavePlanner):
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner({f"foo_{key}": value for key, value in state_dict.items()}, storage_meta, is_coordinator)


class LoadsRenamed(DefaultLoadPlanner):
    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        self.given = state_dict
        renamed = {f"foo_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, metadata, is_coordinator)

    def load_bytes(self, read_item, value):
        self.given[read_item.dest_index.fqn.removeprefix("foo_")] = torch.load(value, weights_only=False)


class HalvesPrecision(DefaultSavePlanner):
    """Makes its tensors when they are asked for; the allocator gives them one memory in turn."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def transform_object(self, write_item, object):  # noqa: A002
        if write_item.type is dcp_planner.WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        return object.to(torch.float16)


class Casts(HalvesPrecision):
    """Like that, but the plan says float32: stock saves what it gets."""

    create_local_plan = DefaultSavePlanner.create_local_plan


class KeepsMore(DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = [metadata.planner_data, "of my own", 3]
        return plans, metadata


class Materialises(DefaultLoadPlanner):
    def resolve_tensor(self, read_item):
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item, tensor):
        self.state_dict[read_item.dest_index.fqn].copy_(tensor)


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_planner_that_renames(how, tmp_path):
    state = {"a": torch.arange(5.0), "b": torch.ones(3), "c": "text"}
    writer = unbroken.UnbrokenWriter(tmp_path)
    for number in range(3):
        state["a"].fill_(number)
        options = {"storage_writer": writer, "checkpoint_id": tmp_path / f"{number}", "planner": Renames()}
        saved = getattr(dcp, how)(dict(state), no_dist=True, **options)
        if how == "async_save":
            saved.result()
        for reader in (unbroken.UnbrokenReader(tmp_path / f"{number}"), None):
            loaded = {"a": torch.zeros(5), "b": torch.zeros(3), "c": ""}
            identifier = None if reader else tmp_path / f"{number}"
            dcp.load(loaded, storage_reader=reader, checkpoint_id=identifier, planner=LoadsRenamed(), no_dist=True)
            assert not differences(loaded, state)


@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("planner", [HalvesPrecision, Casts])
@pytest.mark.parametrize("load", [load_ours, load_stock])
def test_a_planner_that_makes_its_tensors_when_asked(how, planner, load, tmp_path):
    state = {f"t{i}": torch.full((1000,), float(i)) for i in range(40)} | {"n": 3}
    writer = unbroken.UnbrokenWriter(tmp_path / "c")
    saved = getattr(dcp, how)(state, storage_writer=writer, planner=planner(), no_dist=True)
    if how == "async_save":
        saved.result()
    blank = {f"t{i}": torch.zeros(1000) for i in range(40)} | {"n": 0}
    loaded = load(blank, tmp_path / "c")
    assert not differences(loaded, state)


def test_a_planner_whose_plan_and_state_are_not_flattened(tmp_path):
    state = {"a": torch.ones(3), "b": {"nested": torch.arange(1000.0), "n": 3}}
    for how in ("save", "async_save"):
        writer = unbroken.UnbrokenWriter(tmp_path / how)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        saved = getattr(dcp, how)(state, storage_writer=writer, planner=planner, no_dist=True)
        if how == "async_save":
            saved.result()
        assert sum(path.stat().st_size for path in (tmp_path / how).iterdir()) < 20_000
        loaded = {"a": torch.zeros(3), "b": None}
        dcp.load(
            loaded,
            storage_reader=unbroken.UnbrokenReader(tmp_path / how),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )
        assert not differences(loaded, state)


def test_a_planner_that_keeps_data_of_its_own(tmp_path):
    state = {"a": torch.ones(3)}
    writer = unbroken.UnbrokenWriter(tmp_path / "c")
    dcp.save(state, storage_writer=writer, planner=KeepsMore(), no_dist=True)
    assert torch.equal(load_ours({"a": torch.zeros(3)}, tmp_path / "c")["a"], torch.ones(3))


class Own:
    pass


class KeepsAnObject(KeepsMore):
    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = Own()
        return plans, metadata


def test_planner_data_that_would_not_be_read_is_warned_of(tmp_path, caplog):
    writer = unbroken.UnbrokenWriter(tmp_path / "c")
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, planner=KeepsAnObject(), no_dist=True)
    assert "planner" in caplog.text
    error = failure(lambda: load_ours({"a": torch.zeros(3)}, tmp_path / "c"))
    assert "Own" in str(error)
    assert torch.equal(load_stock({"a": torch.zeros(3)}, tmp_path / "c")["a"], torch.ones(3))


def test_bytes_that_torch_save_did_not_write_are_refused_by_name(tmp_path):
    class Raw(DefaultSavePlanner):
        def transform_object(self, write_item, object):  # noqa: A002
            return io.BytesIO(b"anything") if isinstance(object, str) else super().transform_object(write_item, object)

    writer = unbroken.UnbrokenWriter(tmp_path / "c")
    error = failure(lambda: dcp.save({"text": "x"}, storage_writer=writer, planner=Raw(), no_dist=True))
    assert isinstance(error, errors.InvalidArgumentError)
    assert "'text'" in str(error)


def test_a_planner_that_gives_another_tensor_each_time_is_refused(tmp_path):
    class Unsteady(DefaultSavePlanner):
        asked = 0

        def transform_object(self, write_item, object):  # noqa: A002
            Unsteady.asked += 1
            return object[: len(object) - (Unsteady.asked > 1)]

    writer = unbroken.UnbrokenWriter(tmp_path / "c")
    error = failure(lambda: dcp.save({"t": torch.ones(5)}, storage_writer=writer, planner=Unsteady(), no_dist=True))
    assert "'t'" in str(error)
    assert not (tmp_path / "c" / ".metadata").exists()


def test_a_load_planner_that_takes_copies(tmp_path):
    save_ours(a_state(5), tmp_path / "c")
    loaded = blank()
    dcp.load(loaded, storage_reader=unbroken.UnbrokenReader(tmp_path / "c"), planner=Materialises(), no_dist=True)
    same(loaded, 5)


def test_two_states_in_turn_with_cached_plans(tmp_path):
    """T13: torch keeps the plans in the planner's class, under its name, for all instances."""
    one = {"w": torch.zeros(10, 3), "step": 0}
    other = {"v": torch.zeros(4), "w": torch.zeros(7, 2), "more": "", "step": 0}
    writers = [unbroken.UnbrokenWriter(tmp_path / "0"), unbroken.UnbrokenWriter(tmp_path / "1")]
    for number in range(1, 7):
        for which, state in enumerate((one, other, other)):
            for key, value in state.items():
                state[key] = torch.full_like(value, number) if isinstance(value, torch.Tensor) else type(value)(number)
            path = tmp_path / f"{number}-{which}"
            planner = DefaultSavePlanner(enable_plan_caching=True)
            how = dcp.save if number % 2 else dcp.async_save
            saved = how(
                dict(state), storage_writer=writers[which % 2], checkpoint_id=path, planner=planner, no_dist=True
            )
            if how is dcp.async_save:
                saved.result()
            for load in (load_ours, load_stock):
                blank = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else type(v)() for k, v in state.items()}
                assert not differences(load(blank, path), state), (number, which)


def test_cut_tensors_with_cached_plans(tmp_path, monkeypatch):
    monkeypatch.setattr("unbroken.checkpoint._plan._PIECE_BYTES", 4096)
    writer = unbroken.UnbrokenWriter(tmp_path)
    for number in range(1, 5):
        state = {"w": torch.full((3000,), float(number)), "s": torch.full((3,), float(number))}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        path = tmp_path / f"{number}"
        how = dcp.save if number % 2 else dcp.async_save
        saved = how(state, storage_writer=writer, checkpoint_id=path, planner=planner, no_dist=True)
        if how is dcp.async_save:
            saved.result()
        assert not differences(load_stock({"w": torch.zeros(3000), "s": torch.zeros(3)}, path), state)


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
