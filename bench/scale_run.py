"""One process that plays all ranks of a large world: `python scale_run.py save|load ROOT RANKS TENSORS`.

The board is memory and the process group is torch's fake one, so nothing is waited for but the work itself: what rank 0
does for the others is done by the code that does it in a run. Each rank has one row of each tensor, as under FSDP.

save: a plan of all ranks; a first save in which every rank writes its files and votes; then saves for which the other
ranks' votes are put on the board again (their own work does not change the coordinator's), the first of them by a
coordinator that has forgotten the `.metadata` of the plan.
load: what one rank in the middle does to read its part: as the first of its node, which finds nothing in the page
cache, and, timed, as another.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import floors
import torch
import torch.distributed as dist
from stall import Stall, beside_python
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import unbroken
from unbroken import _engine
from unbroken.checkpoint._arena import Arena, look_at
from unbroken.checkpoint._image import StagedImage
from unbroken.checkpoint._metadata import versions
from unbroken.checkpoint._pack import Packer
from unbroken.checkpoint._plan import Item, LocalPlan, agree
from unbroken.checkpoint._state import State

_WIDTH = 16
_SECONDS = 3600.0
_WRITING_AT_ONCE = 4
_LATER_SAVES = 6


def world_state(rank: int, ranks: int, tensors: int) -> dict[str, Any]:
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.Size((ranks, _WIDTH))
    return {
        "model": {
            f"layer{i}.weight": DTensor.from_local(
                torch.full((1, _WIDTH), float(i)), mesh, [Shard(0)], run_check=False, shape=whole, stride=(_WIDTH, 1)
            )
            for i in range(tensors)
        },
        "step": 1,
    }


def _of_rank(local: LocalPlan, rank: int) -> LocalPlan:
    """What another rank would say: the same, but that its rows are others."""

    def item_of(item: Item) -> Item:
        return item._replace(offsets=(rank, *item.offsets[1:])) if item.shard else item

    items = [item_of(item) for item in local.items]
    text = json.dumps(items, separators=(",", ":"))
    return replace(local, items=items, text=text, digest=f"rank {rank}")


class _World:
    """The coordinator's parts as they are in a run, and the other ranks one after another."""

    def __init__(self, root: Path, ranks: int, tensors: int) -> None:
        self.ranks = ranks
        self.board = _engine.MemoryBoard()
        self.store = _engine.open_store(str(root), create=True)
        self.state = State(world_state(0, ranks, tensors), rank=0)
        local, packer = look_at(self.state, 0)
        assert isinstance(local, LocalPlan)
        assert packer is not None
        self.local, self.packer = local, packer
        self.values = self.state.values()
        recovery = _engine.Recovery(self.store, self.board, rank=0, world_size=ranks, host="scale")
        self.start = recovery.begin()
        self.arena = Arena(self.state, self.board, 0, ranks, _SECONDS)
        self.step = 0
        self.votes: dict[int, bytes] = {}
        self.found: dict[str, Any] = {"ranks": ranks, "tensors": tensors}

    def _saver(self, rank: int) -> _engine.Saver:
        return _engine.Saver(
            self.store, self.board, self.start, rank=rank, world_size=self.ranks, vote_timeout_seconds=_SECONDS
        )

    def plan(self) -> None:
        """Twice: for the time, and beside a spinning thread."""
        bytes_told = 0
        for number in (0, 1):
            for rank in range(1, self.ranks):
                text = _of_rank(self.local, rank).text.encode()
                bytes_told += len(text)
                self.board.set(f"plan/{number}/local/{rank}", text)
        begin, used = time.perf_counter(), time.thread_time()
        agree(self.local, self.board, 0, 0, self.ranks, _SECONDS)
        self.found["plan_seconds"] = time.perf_counter() - begin
        self.found["plan_cpu_seconds"] = time.thread_time() - used
        with Stall() as stall:
            plan = agree(self.local, self.board, 1, 0, self.ranks, _SECONDS)
        self.found["plan_stall_seconds"] = stall.seconds
        self.found["plan_bytes_told"] = bytes_told / 2
        image = StagedImage(plan, self.packer, 0)
        self.arena.plans, self.arena.image, self.arena.error = 2, image, ""
        self.arena._places = [image.places()]

    def first_save(self) -> None:
        """Every rank writes and votes, and the coordinator commits. Not timed: the other ranks' threads, which wait for
        the outcome in this process, would be most of it."""
        self.step = 1
        self.saver = self._saver(0)
        decision = self.saver.decide(self.step, due=True, explicit=True)
        threading.stack_size(1 << 20)
        threads = [self._other(rank, decision.attempt) for rank in range(1, self.ranks)]
        names = self._vote_keys(decision.attempt)
        self._await(names)
        outcome = self._commit(decision)
        if outcome.state != "durable":
            raise RuntimeError(f"the first save: {outcome.reason}")
        for thread in threads:
            thread.join()
        self.votes = {rank: vote for rank, vote in enumerate(self.board.get(names), 1) if vote is not None}
        directory = Path(self.store.url.removeprefix("file://")) / outcome.attempt_path
        sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
        self.found["metadata_bytes"] = sizes[".metadata"]
        self.found["manifest_bytes"] = sizes["manifest.json"]
        self.found["parts_bytes"] = sum(
            size for name, size in sizes.items() if name.startswith("__") and name.endswith(".json")
        )

    def _other(self, rank: int, attempt: str) -> threading.Thread:
        """Rank `rank` from its plan to its vote; its thread ends when it hears of the outcome."""
        local = _of_rank(self.local, rank)
        begin = time.perf_counter()
        plan = agree(local, self.board, 1, rank, self.ranks, _SECONDS)
        self.found["other_plan_seconds"] = max(time.perf_counter() - begin, self.found.get("other_plan_seconds", 0.0))
        image = StagedImage(plan, Packer(local, self.values, rank), rank)
        self.board.set(f"places/1/{rank}", json.dumps(image.places()).encode())
        saver = self._saver(rank)
        decision = saver.decide(self.step, due=True, explicit=True)
        assert decision.attempt == attempt
        image.copy(image.prepare(self.values))

        def commit() -> None:
            saver.commit(
                image.image,
                step=self.step,
                attempt=decision.attempt,
                sequence=decision.sequence,
                structure=plan.digest,
                object_slots=image.object_slots,
                versions=versions(),
            )

        thread = threading.Thread(target=commit)
        thread.start()
        if rank > _WRITING_AT_ONCE:
            self._await(self._vote_keys(attempt)[rank - _WRITING_AT_ONCE - 1 : rank - _WRITING_AT_ONCE])
        return thread

    def first_commit(self) -> None:
        """What the coordinator does in a first save when all have voted: it has no `.metadata` of this plan yet."""
        self.arena._places, self.arena._writer, self.arena._metadata = self.arena._places[:1], None, []
        begin = time.perf_counter()
        self.found["first_commit_cpu_seconds"] = self._save_again(self.votes)
        self.found["first_commit_seconds"] = time.perf_counter() - begin

    def later_saves(self) -> None:
        cpu, stalls = [], []
        for _ in range(_LATER_SAVES):
            with Stall() as stall:
                cpu.append(self._save_again(self.votes))
            stalls.append(stall.seconds)
        self.found["later_cpu_seconds"], self.found["later_stall_seconds"] = cpu, stalls
        # An object of another length moves, and `.metadata` says where it is.
        vote = json.loads(self.votes[1])
        told = json.loads(vote.get("object_slots") or "{}")
        last = len(self.arena._places[1].files) - 1
        _, offset, length = self.arena._places[1].at(last)
        told["slots"] = {str(last): [offset, length + 64]}
        vote["object_slots"] = json.dumps(told)
        with Stall() as stall:
            seconds = self._save_again({**self.votes, 1: json.dumps(vote).encode()})
        self.found["moved_cpu_seconds"], self.found["moved_stall_seconds"] = seconds, stall.seconds
        self.found["python_stall_seconds"] = beside_python(max(1.0, seconds))

    def _save_again(self, votes: dict[int, bytes]) -> float:
        """CPU seconds of the coordinator's thread from the decision to the commit, without its own copy."""
        self.step += 1
        used = time.thread_time()
        self.arena.forget_values()
        decision = self.saver.decide(self.step, due=True, explicit=True, plan_anew=self.arena.needs_plan())
        seconds = time.thread_time() - used
        assert decision.action == "save"
        assert not decision.plan_anew
        for rank, vote in votes.items():
            self.board.set(f"{self._prefix(decision.attempt)}/vote/{rank}", vote)
            self.board.set(f"{self._prefix(decision.attempt)}/done/{rank}", b"1")
        used = time.thread_time()
        outcome = self._commit(decision)
        seconds += time.thread_time() - used
        if outcome.state != "durable":
            raise RuntimeError(f"a save: {outcome.reason}")
        return seconds

    def _commit(self, decision: _engine.StepDecision) -> _engine.SaveOutcome:
        image = self.arena.image
        assert image is not None
        plan = image.plan
        self.arena.prepare()()
        return self.saver.commit(
            image.image,
            step=self.step,
            attempt=decision.attempt,
            sequence=decision.sequence,
            structure=plan.digest,
            object_slots=image.object_slots,
            metadata=lambda slots: self.arena.metadata(plan, slots),
            versions=versions(),
        )

    def _prefix(self, attempt: str) -> str:
        return f"g{self.start.generation}/{attempt}"

    def _vote_keys(self, attempt: str) -> list[str]:
        return [f"{self._prefix(attempt)}/vote/{rank}" for rank in range(1, self.ranks)]

    def _await(self, names: list[str]) -> None:
        if None in _engine.board_collect(self.board, names, _SECONDS):
            raise RuntimeError("a rank did not vote")


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    begin, used = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - begin, time.thread_time() - used


def _read_bytes() -> tuple[int, int]:
    """By system calls, and from the disk."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]), int(fields["read_bytes"])


def _load(root: Path, ranks: int, tensors: int) -> dict[str, Any]:
    rank = ranks // 2 + 1
    state = world_state(rank, ranks, tensors)
    for tensor in state["model"].values():
        tensor.to_local().zero_()
    floors.drop_cache([root])
    _, start = _read_bytes()
    unbroken.load(root, state, step=1)  # the first rank of its node
    called, from_disk = _read_bytes()
    seconds, cpu = _timed(lambda: unbroken.load(root, state, step=1))  # another one
    called_again, from_disk_again = _read_bytes()
    assert all(float(t.to_local()[0, 0]) == i for i, t in enumerate(state["model"].values()))
    with Stall() as stall:
        unbroken.load(root, state, step=1)
    return {
        "ranks": ranks,
        "load_seconds": seconds,
        "load_cpu_seconds": cpu,
        "load_stall_seconds": stall.seconds,
        "load_read_bytes": called_again - called,
        "load_disk_bytes": from_disk - start,
        "load_again_disk_bytes": from_disk_again - from_disk,
        "load_own_bytes": sum(tensor.to_local().nbytes for tensor in state["model"].values()),
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("unbroken").setLevel(logging.ERROR)
    mode, root, ranks, tensors = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if mode == "load":
        print(json.dumps(_load(root, ranks, tensors)))
        return
    world = _World(root, ranks, tensors)
    world.plan()
    world.first_save()
    world.first_commit()
    world.later_saves()
    print(json.dumps(world.found))


if __name__ == "__main__":
    main()
