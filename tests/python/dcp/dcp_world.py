"""What several ranks do together: test_ranks.py runs `torchrun dcp_world.py <directory> <scenario>...`.

A scenario asserts on every rank, and leaves "ok" or its trace in <directory>/<scenario>.<rank>.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import itertools
import logging
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_parts import bits, differences, failure
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import unbroken
from unbroken import errors

SCENARIOS: dict[str, Callable[[Path], None]] = {}


def scenario(function: Callable[[Path], None]) -> Callable[[Path], None]:
    SCENARIOS[function.__name__] = function
    return function


def rank() -> int:
    return dist.get_rank()


def gather(value: object) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def save(how: str, state: dict[str, Any], path: Path, **options: Any) -> Any:
    """how: ours, stock, or async, which is ours."""
    if how == "stock":
        return dcp.save(state, checkpoint_id=path, **options)
    options.setdefault("storage_writer", unbroken.UnbrokenWriter(path))
    if how == "ours":
        return dcp.save(state, checkpoint_id=path, **options)
    return dcp.async_save(state, checkpoint_id=path, **options)


def load(how: str, state: dict[str, Any], path: Path, **options: Any) -> dict[str, Any]:
    reader = unbroken.UnbrokenReader(path) if how == "ours" else dcp.FileSystemReader(path)
    dcp.load(state, storage_reader=reader, **options)
    return state


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: full(one) for key, one in value.items()}
    return value


def error_everywhere(call: Callable[[], object]) -> str:
    """Every rank fails; the text is of the lowest rank that is to blame."""
    try:
        call()
    except CheckpointException as error:
        text = str(min(error.failures.items())[1][0])
    except Exception as error:  # noqa: BLE001
        text = str(error)
    else:
        text = ""
    assert all(gather(text)), gather(text)
    return text


def error_of_all(how: str, state: dict[str, Any], path: Path) -> str:
    def attempt() -> None:
        saved = save(how, state, path)
        if how == "async":
            saved.result()

    return error_everywhere(attempt)


def whole(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed))


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def layouts() -> dict[str, Callable[[torch.Tensor], DTensor]]:
    """Ways to spread a tensor of two dimensions."""
    flat, mesh = line(), square()
    made: dict[str, Callable[[torch.Tensor], DTensor]] = {}
    for name, on, placements in [
        ("rows", flat, [Shard(0)]),
        ("columns", flat, [Shard(1)]),
        ("replicated", flat, [Replicate()]),
        ("rows twice", mesh, [Shard(0), Shard(0)]),
        ("rows and columns", mesh, [Shard(0), Shard(1)]),
        ("columns and rows", mesh, [Shard(1), Shard(0)]),
        ("hybrid", mesh, [Replicate(), Shard(0)]),
        ("other hybrid", mesh, [Shard(1), Replicate()]),
    ]:
        made[name] = lambda tensor, on=on, placements=placements: distribute_tensor(tensor, on, placements)
    return made


# --- sharded tensors -------------------------------------------------------------------------------------------------


@scenario
def uneven_and_empty_shards(root: Path) -> None:
    """T2, T3: sizes that do not divide, and fewer rows than ranks."""
    sizes = [(1, 1), (2, 7), (3, 5), (5, 4), (6, 6), (7, 3), (9, 2), (0, 3), (4, 0)]
    state = {
        f"{name} {size}": make(whole(*size, seed=i)) for i, size in enumerate(sizes) for name, make in layouts().items()
    }
    wanted = {key: full(value).clone() for key, value in state.items()}
    for saver, loader in itertools.product(("ours", "async", "stock"), ("ours", "stock")):
        path = root / f"{saver}-{loader}"
        saved = save(saver, state, path)
        if saver == "async":
            kept = copy.deepcopy(state)
            for value in state.values():
                value.to_local().zero_()
            saved.result()
            state = kept
        loaded = load(loader, {key: torch.zeros_like(value) for key, value in state.items()}, path)
        for key, value in loaded.items():
            assert bits(full(value)) == bits(wanted[key]), (saver, loader, key)
        dist.barrier()


@scenario
def what_is_saved_in_one_layout_is_loaded_in_another(root: Path) -> None:
    seed = int(os.environ.get("UNBROKEN_SEED", "0")) or gather(random.SystemRandom().randrange(2**31))[0]
    print("seed", seed)
    draw = random.Random(seed)
    made = layouts()
    for number in range(6):
        tensors = {f"t{i}": whole(draw.randint(1, 13), draw.randint(1, 13), seed=i) for i in range(8)}
        state = {key: made[draw.choice(list(made))](tensor) for key, tensor in tensors.items()}
        path = root / f"{number}"
        saver, loader = draw.choice(["ours", "async", "stock"]), draw.choice(["ours", "stock"])
        loader = "ours" if saver == "stock" else loader
        saved = save(saver, state, path)
        if saver == "async":
            saved.result()
        blank = {key: made[draw.choice(list(made))](torch.zeros_like(tensor)) for key, tensor in tensors.items()}
        blank |= {"t0": torch.zeros_like(tensors["t0"]), "t1": torch.zeros(tensors["t1"].shape[::-1]).t()}
        for key, value in load(loader, blank, path).items():
            assert bits(full(value)) == bits(tensors[key]), (seed, number, saver, loader, key)


@scenario
def tensor_parallel_under_fully_shard(root: Path) -> None:
    """T5: strided shards, even and uneven."""
    mesh = square()

    def model(width: int) -> nn.Module:
        torch.manual_seed(width)
        made = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
        parallelize_module(made, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(made, mesh=mesh["outer"])
        return made

    def trained(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        made = model(width)
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
        for _ in range(2):
            made(whole(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return made, optimizer

    made, optimizer = trained(16)
    for saver, loader in itertools.product(("ours", "async", "stock"), ("ours", "stock")):
        path = root / f"{saver}-{loader}"
        weights, state = get_state_dict(made, optimizer)
        wanted = {name: full(value).clone() for name, value in weights.items()}
        saved = save(saver, {"model": weights, "optim": state}, path)
        if saver == "async":
            saved.result()
        other, other_optimizer = trained(16)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        weights, state = get_state_dict(other, other_optimizer)
        blank = {"model": weights, "optim": state}
        load(loader, blank, path)
        set_state_dict(other, other_optimizer, model_state_dict=blank["model"], optim_state_dict=blank["optim"])
        for name, value in other.state_dict().items():
            assert bits(full(value)) == bits(wanted[name]), (saver, loader, name)
        for one, two in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
            for name in one:
                assert bits(full(one[name])) == bits(full(two[name])), (saver, loader, name)
        plain = {name: torch.zeros_like(value) for name, value in wanted.items()}
        load("ours", {"model": plain}, path)
        assert not differences(plain, wanted)
        dist.barrier()

    for width in (3, 5, 13, 14):
        torch.manual_seed(width)
        wanted = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)).state_dict()
        state = model(width).state_dict()
        for how in ("ours", "stock"):
            save(how, state, root / f"{width}-{how}")
            for loader in ("ours", "stock"):
                plain = {name: torch.zeros_like(value) for name, value in wanted.items()}
                assert not differences(load(loader, plain, root / f"{width}-{how}"), wanted)
            before = {name: value.to_local().clone() for name, value in state.items()}
            for value in state.values():
                value.to_local().zero_()
            load("ours", state, root / f"{width}-{how}")
            assert not differences({name: value.to_local() for name, value in state.items()}, before)


@scenario
def shards_of_several_stretches_are_refused_by_name(root: Path) -> None:
    """DCP takes them for one, in the wrong place: it would save and load other rows."""
    tensor = whole(16, 2)
    save("ours", {"w": tensor.clone()}, root / "whole")
    for placements, mesh in (
        ([_StridedShard(0, split_factor=2)], line()),
        ([_StridedShard(0, split_factor=3), Shard(0)], square()),
    ):
        strided = distribute_tensor(tensor, mesh, placements)
        text = error_everywhere(lambda strided=strided: save("ours", {"w": strided}, root / "strided"))
        assert "w" in text, text
        assert not (root / "strided" / ".metadata").exists()
        before = strided.to_local().clone()
        text = error_everywhere(lambda strided=strided: load("ours", {"w": strided}, root / "whole"))
        assert "'w'" in text, text
        assert torch.equal(strided.to_local(), before)


@scenario
def partial_sums_are_refused(root: Path) -> None:
    """By name, where they are seen before DCP plans."""
    partial = DTensor.from_local(torch.ones(4, 4), line(), [Partial()])
    state = {"good": torch.ones(3), "partial": partial}
    assert "'partial'" in error_everywhere(lambda: save("async", state, root / "async"))
    assert "partial" in error_everywhere(lambda: save("ours", state, root / "ours"))
    assert not list(root.glob("*/.metadata"))


@scenario
def sharded_tensors_of_fsdp1(root: Path) -> None:
    def made(value: float) -> Any:
        local = torch.full((2 + rank() % 2, 3), value + rank())
        offset = sum(2 + r % 2 for r in range(rank()))
        shard = LocalShard.from_tensor_and_offsets(local, [offset, 0], rank())
        return init_from_local_shards([shard], 10, 3)

    for saver, loader in itertools.product(("ours", "async", "stock"), ("ours", "stock")):
        path = root / f"{saver}-{loader}"
        state = {"sharded": made(10.0)}
        saved = save(saver, state, path)
        if saver == "async":
            state["sharded"].local_shards()[0].tensor.zero_()
            saved.result()
        loaded = load(loader, {"sharded": made(0.0)}, path)
        local = loaded["sharded"].local_shards()[0].tensor
        assert torch.equal(local, torch.full_like(local, 10.0 + rank()))
        dist.barrier()


@scenario
def large_shards_are_cut(root: Path) -> None:
    unbroken.checkpoint._plan._PIECE_BYTES = 4096
    try:
        tensors = {"d": whole(40, 100), "r": whole(3000), "b": whole(7, 900)}
        state = {
            "d": distribute_tensor(tensors["d"], line(), [Shard(0)]),
            "r": tensors["r"].clone(),
            "b": distribute_tensor(tensors["b"], square(), [Shard(1), Replicate()]),
        }
        for how in ("ours", "async", "async"):
            path = gather(root / how / str(len(list(root.glob("*/*")))))[0]
            saved = save(how, state, path)
            metadata = saved.result() if how == "async" else saved
            assert len(metadata.state_dict_metadata["r"].chunks) == 3
            assert len(metadata.state_dict_metadata["b"].chunks) >= 4
            for loader in ("ours", "stock"):
                blank = {key: torch.zeros_like(value) for key, value in state.items()}
                for key, value in load(loader, blank, path).items():
                    assert bits(full(value)) == bits(tensors[key]), key
    finally:
        unbroken.checkpoint._plan._PIECE_BYTES = 1 << 30


# --- who writes what -------------------------------------------------------------------------------------------------


@scenario
def replicated_tensors_are_spread_and_later_saves_copy_once(root: Path) -> None:
    """The first stage() cannot know what this rank will write; the second does."""
    writer = unbroken.UnbrokenWriter(root)
    copied: list[int] = []
    real = unbroken.checkpoint._image.SlotImage.copy

    def counting(self: Any, copies: Any) -> None:
        copied.extend(bytes_ for _, _, bytes_ in copies)
        real(self, copies)

    unbroken.checkpoint._image.SlotImage.copy = counting  # type: ignore[method-assign]
    try:
        for number in range(4):
            state = {f"t{i}": torch.full((1000,), float(100 * number + i)) for i in range(16)} | {"n": number}
            copied.clear()
            saved = save("async", state, root / f"{number}", storage_writer=writer)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
            metadata = saved.result()
            written = [info for index, info in metadata.storage_data.items() if index.fqn != "n"]
            mine = [info for info in written if info.relative_path.startswith(f"__{rank()}_")]
            assert len(mine) == 4
            assert sum(copied) == 64_000 + (16_000 if number == 0 else 0)
            for loader in ("ours", "stock"):
                loaded = load(loader, {f"t{i}": torch.zeros(1000) for i in range(16)} | {"n": 0}, root / f"{number}")
                assert loaded["n"] == number
                assert all(
                    torch.equal(loaded[f"t{i}"], torch.full((1000,), float(100 * number + i))) for i in range(16)
                )
    finally:
        unbroken.checkpoint._image.SlotImage.copy = real  # type: ignore[method-assign]


@scenario
def plain_values_that_differ_between_ranks(root: Path) -> None:
    """DCP keeps one of them, so the save is refused, whatever other keys the ranks have; keys of each rank's own keep
    them apart."""
    world = dist.get_world_size()
    same = {"same": 5, "t": torch.ones(3), "list": [1, (2, "x")], "own": {f"{rank()}": rank() * 7}}
    state = same | {
        "seen": rank() * 10,
        "deep": {"name": f"rank {rank() // 2}"},
        "not all": {"have": rank() == 1} if rank() in (1, 2) else {},
        "array": np.arange(2) + (rank() == 3),
        "tuple": ({"a": rank() == 2},),
        "exact": 1 if rank() else True,
    }
    for how in ("ours", "async"):
        for keys in (list(state), ["same", "seen"], ["t", "own", "seen"]):
            path = root / f"{how}-{len(keys)}"
            text = error_of_all(how, {key: state[key] for key in keys}, path)
            ranks = ", ".join(map(str, range(1, world)))
            assert f"'seen' (ranks {ranks} not as rank 0)" in text, text
            assert "same" not in text, text
            assert "own" not in text.replace("of its own", ""), text
            assert not (path / ".metadata").exists()
        for wanted in (
            "'deep.name' (ranks 2, 3 not as rank 0)",
            "'not all.have' (rank 2 not as rank 1)",
            "'array' (rank 3 not as rank 0)",
            "'tuple' (rank 2 not as rank 0)",
            "'exact' (ranks 1, 2, 3 not as rank 0)",
        ):
            assert wanted in error_of_all(how, state, root / f"{how}-again"), wanted
        saved = save(how, same, root / how)
        if how == "async":
            saved.result()
        loaded = load("ours", {"same": 0, "own": {f"{rank()}": 0}}, root / how)
        assert loaded == {"same": 5, "own": {f"{rank()}": rank() * 7}}


@scenario
def one_of_several_values_is_saved_where_that_is_asked_for(root: Path) -> None:
    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    heard: list[str] = []
    handler = Heard()
    logging.getLogger("unbroken").addHandler(handler)
    try:
        for how in ("ours", "async"):
            heard.clear()
            writer = unbroken.UnbrokenWriter(root / how, allow_differing_values=True)
            saved = save(how, {"seen": rank() * 10, "same": 5}, root / how, storage_writer=writer)
            if how == "async":
                saved.result()
            told = [text for text in heard if "'seen'" in text and "same" not in text]
            assert len(told) == len(heard) == (rank() == 0), heard
            for loader in ("ours", "stock"):
                seen = gather(load(loader, {"seen": -1}, root / how)["seen"])
                assert seen[0] in (0, 10, 20, 30)
                assert len(set(seen)) == 1
    finally:
        logging.getLogger("unbroken").removeHandler(handler)


@scenario
def a_planner_that_gives_each_rank_a_key_of_its_own(root: Path) -> None:
    """What counts is what is saved: the names of the state are not those of the checkpoint."""

    class Apart(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            items = [
                dataclasses.replace(one, index=MetadataIndex(f"{one.index.fqn} of rank {rank()}")) for one in plan.items
            ]
            self.plan = dataclasses.replace(plan, items=items)
            return self.plan

        def lookup_object(self, index: Any) -> Any:
            return super().lookup_object(MetadataIndex(index.fqn.split(" of rank ")[0]))

    planner = Apart(flatten_state_dict=False)
    save("ours", {"seen": rank() * 10}, root / "c", planner=planner)
    for loader in ("ours", "stock"):
        key = f"seen of rank {rank()}"
        assert load(loader, {key: -1}, root / "c") == {key: rank() * 10}


@scenario
def every_rank_saves_alone(root: Path) -> None:
    state = {"mine": torch.full((5,), float(rank())), "who": rank()}
    for how, loader in itertools.product(("ours", "async", "stock"), ("ours", "stock")):
        path = root / f"{how}-{loader}"
        saved = save(how, state, path, use_collectives=False)
        if how == "async":
            saved.result()
        dist.barrier()
        loaded = load(loader, {"mine": torch.zeros(5), "who": -1}, path)
        assert loaded["who"] == rank()
        assert torch.equal(loaded["mine"], state["mine"])
        dist.barrier()


@scenario
def a_group_of_some_ranks(root: Path) -> None:
    """Ranks 1 and 3 of the world are 0 and 1 of the group."""
    group = dist.new_group([1, 3], backend="gloo")
    if rank() in (1, 3):
        writer = unbroken.UnbrokenWriter(root)
        for number in range(3):
            for how in ("ours", "async"):
                path = root / f"{how}{number}"
                state = {f"t{i}": torch.full((4,), float(number * 10 + i)) for i in range(6)} | {"n": number}
                saved = save(how, state, path, storage_writer=writer, process_group=group)
                if how == "async":
                    saved.result()
                for loader in ("ours", "stock"):
                    blank = {f"t{i}": torch.zeros(4) for i in range(6)} | {"n": -1}
                    assert not differences(load(loader, blank, path, process_group=group), state)
    dist.barrier()


@scenario
def each_rank_without_the_others(root: Path) -> None:
    path = root / f"of {rank()}"
    state = {"t": torch.full((3,), float(rank())), "n": rank()}
    for how in ("ours", "async"):
        saved = save(how, state, path / how, no_dist=True)
        if how == "async":
            saved.result()
        for loader in ("ours", "stock"):
            assert not differences(load(loader, {"t": torch.zeros(3), "n": -1}, path / how, no_dist=True), state)
    dist.barrier()


@scenario
def cached_plans(root: Path) -> None:
    """T13, on several ranks: two states in turn, sharded and replicated."""
    writer = unbroken.UnbrokenWriter(root)
    for number in range(1, 5):
        for which in range(2):
            size = (6 + which, 4)
            tensors = {f"w{which}": whole(*size, seed=number), "r": whole(50, seed=number + which), "n": number}
            state = {
                f"w{which}": distribute_tensor(tensors[f"w{which}"], line(), [Shard(0)]),
                "r": tensors["r"].clone(),
                "n": number,
            }
            how = "async" if number % 2 else "ours"
            path = root / f"{number}-{which}"
            planner = DefaultSavePlanner(enable_plan_caching=True)
            saved = save(how, state, path, storage_writer=writer, planner=planner)
            if how == "async":
                saved.result()
            for loader in ("ours", "stock"):
                blank = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else -1 for k, v in state.items()}
                assert not differences(full(load(loader, blank, path)), tensors)


# --- failures --------------------------------------------------------------------------------------------------------


@scenario
def what_one_rank_cannot_save_fails_on_all_by_name(root: Path) -> None:
    for how in ("ours", "async"):
        state = {"good": torch.ones(3), f"of {rank()}": torch.ones(2, device="meta" if rank() == 2 else "cpu")}
        path = root / how

        def attempt(how: str = how, path: Path = path, state: dict[str, Any] = state) -> None:
            try:
                saved = save(how, state, path)
            except errors.InvalidArgumentError:
                assert (how, rank()) == ("async", 2)  # refused before anything is begun: the others must not wait
                # as DCP does not know of it, this rank must take part all the same
                saved = save("ours", state, path)
            if how == "async":
                saved.result()

        text = error_everywhere(attempt)
        assert "'of 2'" in text, text
        assert not (path / ".metadata").exists()
        dist.barrier()
        state[f"of {rank()}"] = torch.ones(2)
        saved = save(how, state, path)
        if how == "async":
            saved.result()
        load("stock", {"good": torch.zeros(3)}, path)


@scenario
def a_rank_whose_disk_is_full_fails_the_save_on_all(root: Path) -> None:
    write = unbroken._engine.write_plain_rank
    state = {"t": torch.ones(8), f"of {rank()}": torch.ones(2)}
    writer = unbroken.UnbrokenWriter(root / "c")
    if rank() == 1:

        def full_disk(*arguments: Any, **options: Any) -> None:
            raise errors.NoSpaceError("write __1_0.distcp: No space left on device (ENOSPC)")

        unbroken._engine.write_plain_rank = full_disk
    try:
        for how in ("ours", "async"):
            text = error_everywhere(
                lambda how=how: (lambda saved: saved.result() if how == "async" else saved)(
                    save(how, state, root / "c", storage_writer=writer)
                )
            )
            assert "No space left" in text
            assert not (root / "c" / ".metadata").exists()
            dist.barrier()
    finally:
        unbroken._engine.write_plain_rank = write
    save("async", state, root / "c", storage_writer=writer).result()
    assert torch.equal(load("stock", {"t": torch.zeros(8)}, root / "c")["t"], torch.ones(8))


@scenario
def an_existing_checkpoint_is_refused_on_all(root: Path) -> None:
    state = {"t": torch.ones(8)}
    save("stock", state, root / "c")
    for how in ("ours", "async"):
        text = error_everywhere(
            lambda how=how: (lambda saved: saved.result() if how == "async" else saved)(save(how, state, root / "c"))
        )
        assert "overwrite=True" in text
    state["t"].fill_(2)
    save("ours", state, root / "c", storage_writer=unbroken.UnbrokenWriter(root / "c", overwrite=True))
    assert torch.equal(load("stock", {"t": torch.zeros(8)}, root / "c")["t"], torch.full((8,), 2.0))


# --- one after the other ---------------------------------------------------------------------------------------------


@scenario
def back_to_back_async_saves_with_barriers_in_the_trainer(root: Path) -> None:
    """S3: none is waited for; ranks are of different speed. The trainer's collectives have a group of their own."""
    group = dist.new_group(backend="gloo")
    writer = unbroken.UnbrokenWriter(root)
    draw = random.Random(rank())
    sharded = distribute_tensor(torch.zeros(6, 2), line(), [Shard(0)])
    state = {"d": sharded, "r": torch.zeros(100), "n": 0}
    saves = []
    for number in range(1, 9):
        time.sleep(draw.random() / 20)
        sharded.to_local().fill_(number)
        state["r"].fill_(number)
        state["n"] = number
        dist.barrier()
        saves.append(save("async", state, root / f"{number}", storage_writer=writer, process_group=group))
        dist.barrier()
    for saved in saves:
        saved.result()
    for number in range(1, 9):
        blank = {"d": torch.zeros(6, 2), "r": torch.zeros(100), "n": 0}
        wanted = {"d": torch.full((6, 2), float(number)), "r": torch.full((100,), float(number)), "n": number}
        assert not differences(load("ours" if number % 2 else "stock", blank, root / f"{number}"), wanted)


@scenario
def in_processes_of_their_own(root: Path) -> None:
    writer = unbroken.UnbrokenWriter(root)
    sharded = distribute_tensor(torch.zeros(6, 2), line(), [Shard(0)])
    for number in range(1, 4):
        sharded.to_local().fill_(number)
        state = {"d": sharded, "r": torch.full((5,), float(number)), "n": number}
        options = {"storage_writer": writer, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
        saved = save("async", state, root / f"{number}", **options)
        sharded.to_local().fill_(-1)
        saved.result()
        blank = {"d": torch.zeros(6, 2), "r": torch.zeros(5), "n": 0}
        wanted = {"d": torch.full((6, 2), float(number)), "r": torch.full((5,), float(number)), "n": number}
        assert not differences(load("ours" if number % 2 else "stock", blank, root / f"{number}"), wanted)


@scenario
def a_rank_dies_before_the_marker(root: Path) -> None:
    """The last of its world: rank 1 is gone when its files are written."""
    state = {"t": torch.ones(8), f"of {rank()}": torch.ones(2)}
    write = unbroken._engine.write_plain_rank

    def dies(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        os._exit(9)

    if rank() == 1:
        unbroken._engine.write_plain_rank = dies
    error = failure(lambda: save("ours", state, root / "c"))
    assert not (root / "c" / ".metadata").exists(), error
    for reader in (unbroken.UnbrokenReader(root / "c"), dcp.FileSystemReader(root / "c")):
        failure(lambda reader=reader: dcp.load({"t": torch.zeros(8)}, storage_reader=reader, no_dist=True))


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    for name in names:
        said = directory / f"{name}.{rank()}"
        root = directory / name
        try:
            SCENARIOS[name](root)
            said.write_text("ok")
        except BaseException:
            said.write_text(traceback.format_exc())
            raise
        if name != "a_rank_dies_before_the_marker":
            dist.barrier()
    if names[-1] != "a_rank_dies_before_the_marker":
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
