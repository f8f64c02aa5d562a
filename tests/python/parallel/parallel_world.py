"""What four ranks do together: test_parallel.py runs `parallel_world.py <directory> <scenario>...` on each.

A scenario is a function of this rank's World; it asserts on every rank, and the test shows the trace of any.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import LAYOUTS, Groups, Training, differences, everything
from torch.distributed.tensor import DTensor

import unbroken

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
