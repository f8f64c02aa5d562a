"""What four ranks do together: test_parallel.py runs `parallel_world.py <directory> <scenario>...` on each.

A scenario is a function of this rank's World; it asserts on every rank, and the test shows the trace of any.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import LAYOUTS, Groups, Model, Training, differences, everything, whole
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import unbroken
from unbroken.checkpoint._metadata import read_metadata

SCENARIOS: dict[str, Callable[[World], None]] = {}


class World:
    def __init__(self, directory: Path, groups: Groups) -> None:
        self.directory = directory
        self.groups = groups
        self.rank = dist.get_rank()

    def root(self, name: str) -> Path:
        return self.directory / name


def scenario(function: Callable[[World], None]) -> Callable[[World], None]:
    SCENARIOS[function.__name__] = function
    return function


def fails(kind: type[BaseException], call: Callable[[], object], *words: str) -> None:
    """As pytest.raises, with all the words in the message."""
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert all(word in text for word in words), text


# --- save in one layout, load in another -----------------------------------------------------------------------------


def save(world: World, name: str) -> None:
    training = Training(world.groups, name)
    group = world.groups.group(name)
    with unbroken.Checkpointer(world.root(name), training.state, process_group=group, signals=False) as run:
        run.resume()
        for _ in range(2):
            training.step()
            run.step()
        run.save().wait()
    held = everything(training)
    if world.rank == 0:
        torch.save(held, world.root(name) / "held.pt")


@scenario
def every_layout_loads_what_every_layout_saved(world: World) -> None:
    for name in LAYOUTS:
        if world.groups.inside(name):
            save(world, name)
    dist.barrier()
    results = {}
    for here in LAYOUTS:
        if not world.groups.inside(here):
            continue
        for saved in LAYOUTS:
            held = torch.load(world.root(saved) / "held.pt", weights_only=False)
            training = Training(world.groups, here, seed=5)
            assert unbroken.load(world.root(saved), training.state) == 2
            results[here, saved] = differences(everything(training), held)
            for parameter, state in training.optimizer.state.items():
                for key in ("exp_avg", "exp_avg_sq"):
                    assert type(state[key]) is (DTensor if isinstance(parameter, DTensor) else torch.Tensor)
                    if isinstance(parameter, DTensor):
                        assert state[key].placements == parameter.placements
                        assert state[key].device_mesh == parameter.device_mesh
                assert type(state["step"]) is torch.Tensor
            training.step()  # the loaded state is one to go on from
    assert not any(results.values()), {pair: found[:3] for pair, found in results.items() if found}


# --- any mesh, any placements ----------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool, torch.float8_e4m3fn)
SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 9, 16)


class Spread:
    """A random way to hold a tensor of `shape` on some or all of four ranks."""

    def __init__(self, rng: random.Random, meshes: list[DeviceMesh], shape: tuple[int, ...]) -> None:
        self.mesh = rng.choice([*meshes, None])
        self.placements: list[Any] = []
        self.first = -1  # the mesh dimension whose shard is taken last although it stands first, as FSDP2 does
        if self.mesh is None:
            return
        ways = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        self.placements = [rng.choice(ways) for _ in range(self.mesh.ndim)]
        dims = [p.dim if isinstance(p, Shard) else None for p in self.placements]
        factor = math.prod(self.mesh.size(i) for i in range(1, self.mesh.ndim) if dims[i] == dims[0])
        if dims[0] is not None and factor > 1 and rng.random() < 0.7:
            self.placements[0] = _StridedShard(dims[0], split_factor=factor)
            self.first = dims[0]

    def hold(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of `full`, cut by torch and not by what is tested."""
        full = full.clone()
        if self.mesh is None:
            return full
        if self.first < 0 or self.mesh.get_coordinate() is None:
            return distribute_tensor(full, self.mesh, self.placements, src_data_rank=None)
        local = full
        for i in [*range(1, self.mesh.ndim), 0]:
            dim = self.first if i == 0 else getattr(self.placements[i], "dim", None)
            if dim is not None:
                parts = [*torch.chunk(local, self.mesh.size(i), dim)]
                empty = local.narrow(dim, 0, 0)
                at = self.mesh.get_coordinate()[i]
                local = parts[at] if at < len(parts) else empty
        return DTensor.from_local(
            local.contiguous(), self.mesh, self.placements, run_check=False, shape=full.shape, stride=full.stride()
        )

    def gathers(self, dtype: torch.dtype) -> bool:
        """full_tensor() is right here: of all ranks in their order (of others torch gathers in the wrong one)."""
        known = dtype in (torch.float32, torch.int64, torch.bfloat16)  # by gloo
        in_order = self.mesh is not None and self.mesh.mesh.flatten().tolist() == [0, 1, 2, 3]
        return known and in_order and self.first < 0

    def __repr__(self) -> str:
        return f"{None if self.mesh is None else self.mesh.mesh.tolist()} {self.placements}"


def random_tensor(rng: random.Random) -> torch.Tensor:
    shape = tuple(rng.choice(SIZES) for _ in range(rng.randint(0, 3)))
    dtype = rng.choice(DTYPES)
    raw = torch.tensor([rng.randrange(2 if dtype is torch.bool else 256) for _ in range(math.prod(shape))])
    if dtype in (torch.bool, torch.uint8, torch.float8_e4m3fn):
        return raw.to(torch.uint8).view(dtype).reshape(shape)
    return raw.to(dtype).reshape(shape) / (1 if dtype is torch.int64 else 3)


def same_local(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (one.to_local() if isinstance(one, DTensor) else one for one in (a, b))
    return not differences(a.detach(), b.detach())


@scenario
def any_placement_loads_what_any_placement_saved(world: World) -> None:
    seed = int(os.environ.get("SEED") or time.time_ns() % 10**6)
    seeds = [seed]
    dist.broadcast_object_list(seeds)
    seed = seeds[0]
    print(f"SEED={seed}", file=sys.stderr, flush=True)
    meshes = [
        DeviceMesh("cpu", torch.arange(4).view(shape)) for shape in ((4,), (2, 2), (4, 1), (1, 4), (2, 1, 2), (1, 2, 2))
    ]
    meshes += [DeviceMesh("cpu", ranks) for ranks in ([3, 1, 0, 2], [2, 0], [[3, 2], [1, 0]])]
    rng = random.Random(seed)
    for number in range(3):
        tensors = [random_tensor(rng) for _ in range(60)]
        saved = [Spread(rng, meshes, tuple(one.shape)) for one in tensors]
        state = {"x": [how.hold(one) for how, one in zip(saved, tensors, strict=True)]}
        root = world.root(str(number))
        with unbroken.Checkpointer(root, state, signals=False) as run:
            run.resume()
            run.step()
            run.save().wait()
            for one in state["x"]:  # what was saved is what was there at the call
                local = one.to_local() if isinstance(one, DTensor) else one
                local.zero_()
        for _ in range(2):
            here = [Spread(rng, meshes, tuple(one.shape)) for one in tensors]
            target = {"x": [how.hold(torch.zeros_like(one)) for how, one in zip(here, tensors, strict=True)]}
            unbroken.load(root, target)
            for i, (loaded, how, one) in enumerate(zip(target["x"], here, tensors, strict=True)):
                about = f"x.{i} {one.dtype} {tuple(one.shape)} saved {saved[i]}, loaded {how}"
                assert same_local(loaded, how.hold(one)), about
                if i % 3 == 0 and how.gathers(one.dtype):
                    assert not (found := differences(loaded.full_tensor(), one)), f"{about}: {found}"


@scenario
def a_run_goes_on_under_other_layouts(world: World) -> None:
    """One root, resumed by each layout in turn: each start goes on from what the one before saved."""
    root, held = world.root("run"), None
    for at, name in enumerate(("fsdp2", "fsdp4", "plain", "fsdp2-tp2", "tp2", "hsdp", "ddp4", "tp4")):
        if world.groups.inside(name):
            training = Training(world.groups, name, seed=at)
            group = world.groups.group(name)
            with unbroken.Checkpointer(root, training.state, process_group=group, signals=False) as run:
                assert run.resume() == at
                found = differences(everything(training), held) if held is not None else []
                assert not found, f"{name}: {found[:3]}"
                training.step()
                run.step()
                run.save().wait()
            held = everything(training)
        said = [held]
        dist.broadcast_object_list(said)
        held = said[0]


@scenario
def stock_dcp_reads_it_under_the_same_names(world: World) -> None:
    for name in ("fsdp4", "hsdp", "fsdp2-tp2"):
        root = world.root(name)
        held = everything(saved_run(world, name, root))
        again = Training(world.groups, name, seed=6)
        again.step()  # stock DCP loads into optimizer state that is there
        state = {
            "model": get_model_state_dict(again.model),
            "optim": get_optimizer_state_dict(again.model, again.optimizer),
            "sched": again.scheduler,
        }
        attempt = max(root.glob("step-*"))
        saved = read_metadata((attempt / ".metadata").read_bytes())
        stock, _ = flatten_state_dict({**state, "sched": again.scheduler.state_dict()})
        ours = {key for key in saved.state_dict_metadata if not key.startswith(("rng/", "unbroken/"))}
        assert set(stock) == ours
        dcp.load(state, checkpoint_id=attempt)
        set_model_state_dict(again.model, state["model"])
        set_optimizer_state_dict(again.model, again.optimizer, state["optim"])
        found = differences(everything(again), held)
        assert not found, f"{name}: {found[:3]}"


# --- parts of a checkpoint, and states of all kinds ------------------------------------------------------------------


def saved_run(world: World, name: str, root: Path, steps: int = 2) -> Training:
    training = Training(world.groups, name)
    with unbroken.Checkpointer(root, training.state, signals=False) as run:
        run.resume()
        for _ in range(steps):
            training.step()
            run.step()
        run.save().wait()
    return training


@scenario
def a_part_is_loaded_and_the_rest_left(world: World) -> None:
    root = world.root("run")
    held = everything(saved_run(world, "fsdp2-tp2", root))
    for name in ("fsdp4", "tp4", "fsdp2-tp2", "plain"):
        if not world.groups.inside(name):
            continue
        one = Training(world.groups, name, seed=3)
        before = everything(one)
        unbroken.load(root, {"model": one.run})
        found = everything(one)
        assert not differences(found["model"], held["model"])
        assert not differences(found["groups"], before["groups"])
        assert not one.optimizer.state
        # The optimizer alone: its parameters go by their places.
        two = Training(world.groups, name, seed=3)
        unbroken.load(root, {"optim": two.optimizer})
        found = everything(two)
        assert not differences(found["model"], before["model"])
        assert not differences((found["state"], found["groups"]), (held["state"], held["groups"]))
        two.step()
        # Chosen keys.
        chosen = {"model": {"head.weight": dict(two.model.named_parameters())["head.weight"]}}
        unbroken.load(root, chosen)
        assert list(chosen["model"]) == ["head.weight"]
        assert not differences(whole(chosen["model"]["head.weight"]), held["model"]["head.weight"])
        some: dict[str, Any] = {"sched": {}}
        unbroken.load(root, some)
        assert some["sched"]["last_epoch"] == held["sched"]["last_epoch"]
        # A model that has more, and less, and a tensor of another shape.
        three = Training(world.groups, name, seed=3)
        three.model.register_buffer("more", torch.ones(2))
        three.model.steps = torch.zeros(3)
        less = ["model.blocks.1.norm.bias"] if name == "plain" else []  # fully_shard wants its parameters to stay
        if less:
            three.model.blocks[1].norm.register_parameter("bias", None)
        before = whole(dict(three.model.state_dict()))
        fails(
            unbroken.errors.InvalidArgumentError,
            lambda state={"model": three.model}: unbroken.load(root, state),
            "model.more",
            "model.steps",
            *less,
        )
        assert not differences(whole(dict(three.model.state_dict())), before)
        unbroken.load(root, {"model": three.model}, strict=False)
        found = whole(dict(three.model.state_dict()))
        for key, value in found.items():
            assert not differences(value, before[key] if key in ("more", "steps") else held["model"][key]), key


OPTIMIZERS: dict[str, Any] = {
    "AdamW amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True, foreach=False),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "AdamW lr tensor": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01)),
    "SGD momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "ASGD": lambda groups: torch.optim.ASGD(groups, lr=0.01, t0=1),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
}


@scenario
def a_fresh_optimizer_goes_on_bit_for_bit(world: World) -> None:
    for layout, kinds in (("fsdp4", OPTIMIZERS), ("fsdp2-tp2", ["AdamW amsgrad", "ASGD"]), ("hsdp", ["NAdam"])):
        for kind in kinds:
            root = world.root(f"{layout} {kind}")
            first = Training(world.groups, layout, make=OPTIMIZERS[kind])
            with unbroken.Checkpointer(root, first.state, signals=False) as run:
                run.resume()
                for _ in range(2):
                    first.step()
                    run.step()
                run.save().wait()
                held = everything(first)
                first.step()
            second = Training(world.groups, layout, seed=8, make=OPTIMIZERS[kind])
            with unbroken.Checkpointer(root, second.state, signals=False) as run:
                assert run.resume() == 2
                found = differences(everything(second), held)
                assert not found, f"{layout} {kind}: {found[:3]}"
                for mine, theirs in zip(second.model.parameters(), first.model.parameters(), strict=True):
                    for key, value in second.optimizer.state[mine].items():
                        like = first.optimizer.state[theirs][key]
                        assert type(value) is type(like), (kind, key)
                        if isinstance(value, DTensor):
                            assert value.placements == like.placements
                second.step()
            found = differences(everything(second), everything(first))
            assert not found, f"{layout} {kind}: {found[:3]}"


@scenario
def all_that_people_keep_beside_model_and_optimizer(world: World) -> None:
    def make(seed: int) -> tuple[Training, dict[str, Any]]:
        training = Training(world.groups, "fsdp2-tp2", seed=seed)
        averages = {name: p.detach().clone() for name, p in training.model.named_parameters()}
        mine: dict[str, Any] = {
            "ema": averages,
            "scaler": torch.amp.GradScaler("cpu", init_scale=64.0 + seed),
            "nested": {7: {"again": [averages["head.weight"] * 2, {True: seed, None: [seed]}]}, 1.5: ("a", seed)},
            "list": [averages["head.bias"] + 1, {"x": seed}],
            "empty": {},
            "stock": get_model_state_dict(training.model),
        }
        return training, training.state | mine

    def held(training: Training, state: dict[str, Any]) -> list[Any]:
        parts = [whole(state[name]) for name in ("ema", "nested", "list", "empty", "stock")]
        return [everything(training), *parts, state["scaler"].state_dict()]

    root = world.root("run")
    training, state = make(1)
    with unbroken.Checkpointer(root, state, signals=False) as run:
        run.resume()
        training.step()
        for name, parameter in training.model.named_parameters():
            state["ema"][name].lerp_(parameter.detach(), 0.1)
        run.step()
        run.save().wait()
        before = held(training, state)
    again, other = make(2)
    with unbroken.Checkpointer(root, other, signals=False) as run:
        assert run.resume() == 1
        assert not differences(held(again, other), before)
    for value in (other["ema"]["head.weight"], other["nested"][7]["again"][0], other["list"][0]):
        assert isinstance(value, DTensor)


@scenario
def gathered_parameters_are_saved_as_shards_and_nothing_hangs(world: World) -> None:
    """After an evaluation the outermost module of fully_shard holds whole parameters; saves by time look alone."""
    root = world.root("run")
    training = Training(world.groups, "fsdp4")
    every = unbroken.Every(seconds=0.2)
    with unbroken.Checkpointer(root, training.state, every=every, keep=None, signals=False) as run:
        run.resume()
        for _ in range(12):
            training.step()
            with torch.no_grad():
                training.run(torch.ones(2, Model.WIDTH))
            assert not isinstance(training.model.head.weight, DTensor)
            run.step()
            time.sleep(0.05)
        run.save().wait()
        assert run.stats.failed == 0
        assert run.stats.durable >= 1
        assert run.stats.plans == 1
    held = everything(training)
    again = Training(world.groups, "fsdp4", seed=4)
    with torch.no_grad():
        again.run(torch.ones(2, Model.WIDTH))
    assert unbroken.load(root, again.state, step=12) == 12
    assert not differences(everything(again), held)


class Odd(torch.Tensor):
    """Its bytes may not be all of it."""


@scenario
def what_cannot_be_right_is_refused_by_name(world: World) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4))

    def refused(state: dict[str, Any], *words: str) -> None:
        fails(
            unbroken.errors.InvalidArgumentError,
            lambda: unbroken.Checkpointer(world.root("run"), state, signals=False).resume(),
            *words,
        )

    refused({"a": {"sum": DTensor.from_local(torch.ones(3), mesh, [Partial()])}}, "'a.sum'", "Partial", "redistribute")
    odd = DTensor.from_local(torch.eye(2).as_subclass(Odd), mesh, [Replicate()], run_check=False)
    refused({"a": {"odd": odd}}, "'a.odd'", "Odd")
    uneven = torch.ones(world.rank + 1)
    refused(
        {"a": DTensor.from_local(uneven, mesh, [Shard(0)], run_check=False, shape=(10,), stride=(1,))}, "'a'", "(10,)"
    )
    old = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    refused({"model": torch.nn.Sequential(old)}, "'model'", "fully_shard")
    refused({"m": torch.nn.Linear(2, 2, device="meta")}, "'m.weight'", "meta")


# --- what ranks hold under one key and is not equal ------------------------------------------------------------------


class Counter:
    """An object with a state of its own on each rank, as a loader of the user's has."""

    def __init__(self, start: int) -> None:
        self.count, self.generator = start, torch.Generator().manual_seed(start)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "generator": self.generator.get_state(), "seen": {self.count: "x"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.generator.set_state(state["generator"])
        assert state["seen"] == {self.count: "x"}


def listed(root: Path) -> list[str]:
    """The keys of values that are kept apart, in the newest checkpoint."""
    newest = max(root.glob("step-*/.metadata"), key=lambda path: int(path.parent.name.split("-")[1]))
    return [key for key in read_metadata(newest.read_bytes()).state_dict_metadata if key.endswith("/values")]


@scenario
def different_values_are_kept_apart_and_come_back_to_their_ranks(world: World) -> None:
    rank, root = world.rank, world.root("run")

    def make(start: int) -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        return {
            "optim": torch.optim.SGD(model.parameters(), lr=0.1 + start),
            "model": model,
            "notes": {"losses": [0.5 * start], "best": start, "same": "x", "large": torch.full((20_000,), 0.0 + start)},
            "counter": Counter(start),
            "small": torch.tensor([start, 1]),
        }

    state = make(7)
    with unbroken.Checkpointer(root, state, keep=None, signals=False) as run:
        run.resume()
        run.step()
        run.save().wait()
        dist.barrier()
        assert not listed(root)  # nothing differs
        state["notes"].update(best=rank, losses=[rank] * (1 + 3000 * rank))  # grows out of its slot
        state["counter"].count = 10 + rank
        state["counter"].generator.manual_seed(rank)
        state["small"].add_(rank)
        state["optim"].param_groups[0]["lr"] = 1.0 + rank
        run.step()
        run.save().wait()
        dist.barrier()
        assert listed(root) == [f"unbroken/rank_{r:05d}/values" for r in range(4)]
        state["notes"]["best"] = -1
    again = make(0)
    with unbroken.Checkpointer(root, again, keep=None, signals=False) as run:
        assert run.resume() == 2
        assert again["notes"]["best"] == rank
        assert again["notes"]["losses"] == [rank] * (1 + 3000 * rank)
        assert again["notes"]["large"].unique().tolist() == [7]
        assert again["counter"].count == 10 + rank
        assert torch.equal(again["counter"].generator.get_state(), torch.Generator().manual_seed(rank).get_state())
        assert again["small"].tolist() == [7 + rank, 1 + rank]
        assert again["optim"].param_groups[0]["lr"] == 1.0 + rank
        if rank > 1:  # two ranks with the values of rank 0, and one without
            again["notes"] = {**again["notes"], "best": 0, "losses": [0]}
            again["counter"], again["small"][:] = Counter(10), torch.tensor([7, 1])
        dist.barrier()
    # Another world: what the lowest rank had, and a word about it.
    if rank == 0:
        logs = Logs("unbroken.checkpoint._load")
        alone = make(0)
        assert unbroken.load(root, alone) == 2
        assert (alone["notes"]["best"], alone["counter"].count, alone["small"].tolist()) == (0, 10, [7, 1])
        (text,) = logs.lines()
        for key in ("notes.losses", "notes.best", "counter.count", "counter.generator", "small", "param_groups.0.lr"):
            assert key in text, text
        assert "notes.same" not in text
        assert "notes.large" not in text


@scenario
def a_tensor_of_another_kind_on_one_rank_is_refused_by_name(world: World) -> None:
    for name, other in (("dtype", torch.ones(3, dtype=torch.int32)), ("shape", torch.ones(4)), ("kind", "text")):
        state = {"x": torch.ones(3) if world.rank != 2 else other}
        with unbroken.Checkpointer(world.root(name), state, signals=False) as run:
            run.resume()
            run.step()
            fails(unbroken.errors.SaveFailedError, run.save().wait, "'x'", "rank 2")


class Logs(logging.Handler):
    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self._records: list[logging.LogRecord] = []
        logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._records]


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(float(os.environ.get("HANG", "300")), exit=True)
    dist.init_process_group("gloo")
    groups = Groups(list(LAYOUTS))
    for name in names:
        begin = time.monotonic()
        where = directory / name
        where.mkdir(parents=True, exist_ok=True)
        said = "ok"
        try:
            SCENARIOS[name](World(where, groups))
        except BaseException:  # noqa: BLE001  # it is the test's, to show
            said = traceback.format_exc()
        print(f"--- {name}: {said} ({time.monotonic() - begin:.1f} s)", file=sys.stderr, flush=True)
        (directory / f"{name}.{dist.get_rank()}").write_text(said)
        if said != "ok":
            os._exit(1)  # the others may be waiting for this rank in a collective: so they fail, too
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
