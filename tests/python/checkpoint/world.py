"""What several ranks do together, each in its own process: test_world.py runs `world.py <directory> <scenario>...`.

A scenario is a function of this rank's World; it asserts on every rank, and the test fails with the trace of any.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_parts import Net, Training, differences
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import unbroken
from unbroken import errors

SCENARIOS: dict[str, Callable[[World], None]] = {}


class World:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def gather(self, value: object) -> list[object]:
        values: list[object] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def equal(self, value: object) -> None:
        values = self.gather(value)
        assert all(one == values[0] for one in values), values

    def attempts(self) -> list[str]:
        dist.barrier()
        found = sorted((p.name for p in self.root.glob("step-*")), key=lambda name: int(name.split("-")[1]))
        return [name for name in found if (self.root / name / ".metadata").exists()]


def fails(kind: type[BaseException], call: Callable[[], object], *words: str) -> None:
    """As pytest.raises, with all the words in the message."""
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert all(word in text for word in words), text


def scenario(function: Callable[[World], None]) -> Callable[[World], None]:
    SCENARIOS[function.__name__] = function
    return function


class Ddp(Training):
    """The model under DDP; ranks draw different numbers."""

    def __init__(self, rank: int, optimizer: str = "adamw", seed: int = 0) -> None:
        super().__init__(optimizer, seed=seed)
        self.plain = self.model
        # DDP orders its buckets anew after its first backward, and with three ranks and more the order changes the last
        # bit of a sum: the first step after a restart would not be bit-equal. With this option it keeps the order.
        self.model = DistributedDataParallel(self.plain, find_unused_parameters=True)
        self.state["model"] = self.model
        torch.manual_seed(100 * seed + rank)


@scenario
def ddp_resumes_exactly_on_every_rank(world: World) -> None:
    first = Ddp(world.rank)
    with unbroken.Checkpointer(world.root, first.state) as run:
        run.resume()
        for _ in range(3):
            first.step()
            run.step()
        run.save().wait()
        world.equal(run.last_save.attempt)
        for _ in range(3):
            first.step()
    second = Ddp(world.rank, seed=9)
    with unbroken.Checkpointer(world.root, second.state) as run:
        assert run.resume() == 3
        for _ in range(3):
            second.step()
    mine, theirs = second.everything(), first.everything()
    if world.rank > 0:
        # What is no parameter comes from the lowest rank; DDP evens out only the model's own buffers.
        for part in ("notes", "average"):
            del mine[part], theirs[part]
    assert not differences(mine, theirs)
    assert not any(name.startswith("module.") for name in keys(world.root))


def keys(root: Path) -> list[str]:
    from unbroken.checkpoint._metadata import read_metadata

    newest = max(root.glob("step-*/.metadata"), key=lambda p: p.stat().st_mtime_ns)
    return list(read_metadata(newest.read_bytes()).state_dict_metadata)


@scenario
def replicated_tensors_are_written_once_and_spread_by_size(world: World) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(100, 100 * (i + 1)) for i in range(8)])
    with unbroken.Checkpointer(world.root, {"model": model}) as run:
        run.resume()
        run.step()
        written = run.save().wait().bytes
    total = sum(p.nbytes for p in model.parameters())
    shares = world.gather(written)
    assert total <= sum(shares) < 1.2 * total + world.size * 65536
    assert max(shares) < 1.2 * total / world.size + 65536


@scenario
def a_late_rank_fails_the_attempt_by_name_and_the_next_succeeds(world: World) -> None:
    state = {"x": torch.zeros(1000)}
    with unbroken.Checkpointer(world.root, state, keep=None, vote_timeout=1.5) as run:
        run.resume()
        run.step()
        run.save().wait()
        real, gate = unbroken.Checkpointer._commit, threading.Event()
        if world.rank == 1:

            def late(self, *arguments):
                gate.wait(60)
                real(self, *arguments)

            unbroken.Checkpointer._commit = late
        try:
            run.step()
            saving = run.save()
            if world.rank == 0:
                fails(errors.SaveFailedError, saving.wait, "rank 1", "step 2")
            dist.barrier()
        finally:
            unbroken.Checkpointer._commit = real
            gate.set()
        run.step()
        run.save().wait()
    assert [int(name.split("-")[1]) for name in world.attempts()] == [1, 3]


@scenario
def a_rank_that_cannot_write_fails_the_attempt_on_all_ranks(world: World) -> None:
    """C1: the error of one rank's file is named on all of them; nothing is published; the next save succeeds."""
    state = {"x": torch.randn(2000, 100), "y": torch.randn(2000, 100)}
    model = torch.nn.ModuleList([torch.nn.Linear(300, 300) for _ in range(4)])
    with unbroken.Checkpointer(world.root, {"model": model, **state}, keep=None, vote_timeout=20) as run:
        run.resume()
        run.step()
        run.save().wait()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        run.step()
        fails(errors.SaveFailedError, run.save().wait, "rank 1", "__1_0.distcp")
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [int(name.split("-")[1]) for name in world.attempts()] == [1]
        run.step()
        run.save().wait()
    assert [int(name.split("-")[1]) for name in world.attempts()] == [1, 3]
    assert run.stats.failed == 1


@scenario
def a_structure_that_changes_on_one_rank_fails_by_name_and_is_planned_anew(world: World) -> None:
    for changing in range(world.size):
        state = {"x": torch.ones(10), "more": {}}
        root = world.root / str(changing)
        with unbroken.Checkpointer(root, state, keep=None, vote_timeout=20) as run:
            run.resume()
            run.step()
            run.save().wait()
            if world.rank == changing:
                state["more"]["y"] = torch.full((3,), 7.0)
            run.step()
            if changing == 0:
                run.save().wait()  # the coordinator sees it in time
            else:
                fails(errors.SaveFailedError, run.save().wait, f"rank {changing}", "more.y")
                run.step()
                run.save().wait()
            step = run.step_number
            assert run.stats.plans == 2
        loaded = {"x": torch.zeros(10), "more": {}}
        assert unbroken.load(root, loaded) == step
        assert loaded["more"]["y"].tolist() == [7, 7, 7]


@scenario
def a_rank_that_cannot_start_is_named_on_all(world: World) -> None:
    state = {"x": torch.ones(10), "bad": 3 if world.rank == 0 else lambda: 0}
    with unbroken.Checkpointer(world.root / "a", state) as run:
        fails(errors.InvalidArgumentError, run.resume, "'bad'", *(["rank 1"] if world.rank == 0 else []))
    every = unbroken.Every(steps=5 + world.rank)
    with unbroken.Checkpointer(world.root / "b", {"x": 1}, every=every) as run:
        fails(errors.InvalidArgumentError, run.resume, "every", "steps=5", "steps=6", "rank 1")
    own = world.root / ("c" if world.rank == 0 else "file")
    (world.root / "file").write_text("in the way")
    with unbroken.Checkpointer(own, {"x": 1}) as run:
        fails(errors.Error, run.resume, "file")


@scenario
def a_state_that_one_rank_cannot_save_is_named_on_all(world: World) -> None:
    state = {"x": torch.ones(10), "more": {"y": 0}}
    with unbroken.Checkpointer(world.root, state, vote_timeout=20) as run:
        run.resume()
        if world.rank == 1:
            state["more"]["z"] = lambda: 0
        run.step()
        for _ in range(2):
            fails(errors.SaveFailedError, run.save().wait, "rank 1", "more.z")
            run.step()
        state["more"].pop("z", None)
        run.step()
        run.save().wait()


@scenario
def back_to_back_saves_with_barriers_in_the_trainer(world: World) -> None:
    """S3: saves use no collectives, so they cannot tangle with the trainer's."""
    training = Ddp(world.rank)
    with unbroken.Checkpointer(world.root, training.state, every=unbroken.Every(steps=1)) as run:
        run.resume()
        for _ in range(25):
            training.step()
            dist.barrier()
            run.step()
            dist.all_reduce(torch.ones(1000))
    world.equal((run.stats.durable, run.stats.deferred))
    assert run.stats.failed == 0
    assert run.stats.durable >= 1


@scenario
def saves_by_time_fall_on_the_same_steps(world: World) -> None:
    with unbroken.Checkpointer(world.root, {"x": 1}, every=unbroken.Every(seconds=0.2), keep=None) as run:
        run.resume()
        for _ in range(60):
            dist.barrier()
            run.step()
            time.sleep(0.01 * world.rank)
    saved = [one.step for one in run.stats.saves]
    world.equal(saved)
    assert run.stats.durable >= 1
    assert run.stats.failed == 0
    assert all(b - a > 1 for a, b in itertools.pairwise(saved)), saved  # one save for each time that came


@scenario
def a_signal_on_one_rank_stops_all_at_one_step(world: World) -> None:
    for sender in range(world.size):
        training = Ddp(world.rank)
        root = world.root / str(sender)
        code, run = None, unbroken.Checkpointer(root, training.state)
        try:
            with run:
                run.resume()
                for i in range(100):
                    training.step()
                    if i == 4 and world.rank == sender:
                        os.kill(os.getpid(), signal.SIGTERM)
                    run.step()
        except SystemExit as stop:
            code = stop.code
        assert code == unbroken.EXIT_STOPPED == 75
        world.equal(run.step_number)
        assert run.step_number in (5, 6, 7)
        again = Ddp(world.rank, seed=4)
        with unbroken.Checkpointer(root, again.state) as resumed:
            assert resumed.resume() == run.step_number
        if world.rank == 0:
            assert not differences(again.everything(), training.everything())


@scenario
def a_signal_after_the_structure_changed_saves_all_the_same(world: World) -> None:
    state = {"x": torch.ones(3), "more": {}}
    code, run = None, unbroken.Checkpointer(world.root, state)
    try:
        with run:
            run.resume()
            for i in range(100):
                if i == 4:
                    state["more"]["y"] = torch.ones(2)
                    if world.rank == world.size - 1:
                        os.kill(os.getpid(), signal.SIGUSR1)
                dist.barrier()
                run.step()
    except SystemExit as stop:
        code = stop.code
    assert code == 75
    loaded = {"x": torch.zeros(3), "more": {}}
    assert unbroken.load(world.root, loaded) == run.step_number
    assert loaded["more"]["y"].tolist() == [1, 1]


@scenario
def damage_that_one_rank_finds_makes_all_fall_back(world: World) -> None:
    # Sharded, so that each rank reads only its own part.
    mesh = init_device_mesh("cpu", (world.size,))

    def make(value: float) -> dict[str, object]:
        sharded = torch.distributed.tensor.distribute_tensor(
            torch.full((world.size * 1000, 400), value), mesh, [torch.distributed.tensor.Shard(0)]
        )
        return {"x": sharded}

    state = make(1.0)
    names = []
    with unbroken.Checkpointer(world.root, state, keep=None) as run:
        run.resume()
        for _ in range(2):
            run.step()
            names.append(run.save().wait().attempt)
            state["x"].mul_(2)
    dist.barrier()
    if world.rank == 0:
        with (world.root / names[1] / "__1_0.distcp").open("r+b") as file:
            file.seek(800_000)
            file.write(b"\xff\xff")
    dist.barrier()
    with unbroken.Checkpointer(world.root, state) as run:
        assert run.resume() == 1
    assert state["x"].to_local().unique().tolist() == [1]


@scenario
def one_rank_with_another_model_stops_all(world: World) -> None:
    with unbroken.Checkpointer(world.root, {"model": Net()}) as run:
        run.resume()
        run.step()
        run.save().wait()
    model = Net(width=16 if world.rank == 0 else 17)
    with unbroken.Checkpointer(world.root, {"model": model}) as run:
        fails(errors.InvalidArgumentError, run.resume, "model.embed.weight")
        fails(errors.InvalidArgumentError, run.step)


@scenario
def sharded_modules_and_their_optimizer(world: World) -> None:
    """FSDP2: sizes that the ranks do not divide, and a rank without any (T2, T5)."""
    mesh = init_device_mesh("cpu", (world.size,))

    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1), torch.nn.Linear(1, 7))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 6)).square().sum().backward()
        optimizer.step()

    def full(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        found = {name: p.full_tensor() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            for key, value in optimizer.state[p].items():
                whole = value.full_tensor() if isinstance(value, torch.distributed.tensor.DTensor) else value
                found[f"{name}.{key}"] = whole
        return {name: value.detach().clone() for name, value in found.items()}

    model, optimizer = make(0)
    with unbroken.Checkpointer(world.root, {"model": model, "optimizer": optimizer}) as run:
        run.resume()
        for _ in range(2):
            train(model, optimizer)
            run.step()
        run.save().wait()
        saved = full(model, optimizer)
        torch.save(saved, world.root / "full.pt") if world.rank == 0 else None
        train(model, optimizer)
    again, other = make(1)
    with unbroken.Checkpointer(world.root, {"model": again, "optimizer": other}) as run:
        assert run.resume() == 2
        assert not differences(full(again, other), saved)
        train(again, other)
    assert not differences(full(again, other), full(model, optimizer))
    # And into a module that is not sharded.
    plain = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1), torch.nn.Linear(1, 7))
    alone = torch.optim.AdamW(plain.parameters(), lr=0.1)
    unbroken.load(world.root, {"model": plain, "optimizer": alone})
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, saved[name])
        assert torch.equal(alone.state[parameter]["exp_avg"], saved[f"{name}.exp_avg"])


@scenario
def sharded_state_of_another_world_is_resharded(world: World) -> None:
    """The root was written by a world of another size, by the scenario before."""
    mesh = init_device_mesh("cpu", (world.size,))
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1), torch.nn.Linear(1, 7))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saved = torch.load(world.root / "full.pt")
    with unbroken.Checkpointer(world.root, {"model": model, "optimizer": optimizer}) as run:
        run.resume()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), saved[name])
            assert torch.equal(optimizer.state[parameter]["exp_avg"].full_tensor(), saved[f"{name}.exp_avg"])
        run.step()
        run.save().wait()


@scenario
def train_on(world: World) -> None:
    """Some steps of a run that other worlds began, over the ends of epochs; what each step took is written down."""
    steps = int(os.environ["STEPS"])
    model = torch.nn.Linear(1, 1)
    loader = unbroken.data.DataLoader(list(range(90)), global_batch_size=12, seed=3, with_indices=True)
    taken: dict[int, list[int]] = {}
    draws = []
    with unbroken.Checkpointer(world.root / "run", {"model": model}, loader, seed=5) as run:
        start = run.resume()
        draws.append(torch.rand(1).item())
        for _, indices in run.batches(until=start + steps):
            whole = world.gather(list(map(int, indices)))
            taken[run.step_number + 1] = sorted(index for part in whole for index in part)
    assert len(set(world.gather(draws[0]))) == world.size or start == 0
    if world.rank == 0:
        record = world.root / "taken.json"
        before = json.loads(record.read_text()) if record.exists() else {}
        record.write_text(json.dumps(before | {str(k): v for k, v in taken.items()}))


@scenario
def die_in_a_save(world: World) -> None:
    """Rank 1 is killed as it writes to its file of step 2; rank 0's attempt fails and names it."""
    state = {"x": torch.full((5 << 20,), 1.0), "y": torch.full((5 << 20,), 1.0)}  # 20 MiB a rank
    run = unbroken.Checkpointer(world.root, state, keep=None, vote_timeout=2)
    run.resume()
    run.step()
    run.save().wait()
    dist.barrier()
    state["x"] += 1
    if world.rank == 1:
        fault = ["-e", "trace=pwrite64", "-e", "inject=pwrite64:signal=KILL:when=1"]
        tracer = subprocess.Popen(["strace", "-f", *fault, "-p", str(os.getpid())], stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        assert "attached" in tracer.stderr.readline()
    run.step()
    fails(errors.SaveFailedError, run.save().wait, "rank 1 had not finished")
    (world.root / "survivor").write_text("saw it")
    os._exit(0)


@scenario
def save_the_same_step_again(world: World) -> None:
    """C3, C9: after die_in_a_save. What was left of step 2 is never mixed with the new one."""
    (left,) = (path.parent for path in world.root.glob("step-2-*/__1_0.distcp"))
    assert not (left / "__1.json").exists()
    assert (left / "__1_0.distcp").stat().st_blocks > 0
    state = {"x": torch.zeros(5 << 20), "y": torch.zeros(5 << 20)}
    dist.barrier()
    with unbroken.Checkpointer(world.root, state, keep=None) as run:
        assert run.resume() == 1
        assert state["x"].unique().tolist() == [1]
        state["x"].fill_(9)
        run.step()
        run.save().wait()
    loaded = {"x": torch.zeros(5 << 20), "y": torch.zeros(5 << 20)}
    assert unbroken.load(world.root, loaded) == 2
    assert loaded["x"].unique().tolist() == [9]
    assert loaded["y"].unique().tolist() == [1]
    assert left.name not in world.attempts()
    assert [int(name.split("-")[1]) for name in world.attempts()] == [1, 2]


def main() -> None:
    begin = time.monotonic()
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(float(os.environ.get("HANG", "200")), exit=True)  # before the test gives up on it
    dist.init_process_group("gloo")
    for name in names:
        root = directory / os.environ.get("ROOT", name)
        root.mkdir(parents=True, exist_ok=True)
        print(f"--- {name} at {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
        said = "ok"
        try:
            SCENARIOS[name](World(root))
        except BaseException:  # noqa: BLE001  # it is the test's, to show
            said = traceback.format_exc()
            print(said, file=sys.stderr, flush=True)
        (directory / f"{name}.{dist.get_rank()}").write_text(said)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
