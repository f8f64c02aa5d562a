"""Planners of one's own, and plans that torch keeps from save to save."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_parts import a_state, blank, differences, failure, load_ours, load_stock, same, save_ours
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import unbroken
from unbroken import errors


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
