"""The same world for stock DCP: `python scale_stock.py RANKS TENSORS`. JSON on stdout.

What the coordinator does with what all ranks send it, pickles of plans and of results included, without the sending.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
import warnings
from dataclasses import replace

import torch
from scale_run import world_state
from stall import Stall
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult


def _of_rank(plan: SavePlan, rank: int) -> SavePlan:
    def item_of(item: WriteItem) -> WriteItem:
        data = item.tensor_data
        if data is None:
            return item
        offsets = torch.Size((rank, *data.chunk.offsets[1:]))
        chunk = replace(data.chunk, offsets=offsets)
        return replace(item, index=replace(item.index, offset=offsets), tensor_data=replace(data, chunk=chunk))

    return replace(plan, items=[item_of(item) for item in plan.items])


def _plan(planner: DefaultSavePlanner, told: list[bytes]) -> tuple[list[SavePlan], Metadata]:
    plans, metadata = planner.create_global_plan([pickle.loads(one) for one in told])
    for plan in plans:
        pickle.dumps(plan)
    return plans, metadata


def _finish(metadata: Metadata, told: list[bytes]) -> bytes:
    metadata.storage_data = {result.index: result.storage_data for one in told for result in pickle.loads(one)}
    return pickle.dumps(metadata)


def main() -> None:
    warnings.filterwarnings("ignore")
    ranks, tensors = int(sys.argv[1]), int(sys.argv[2])
    planner = DefaultSavePlanner()
    planner.set_up_planner(world_state(0, ranks, tensors), is_coordinator=True)
    local = planner.create_local_plan()
    told = [pickle.dumps(_of_rank(local, rank)) for rank in range(ranks)]
    begin = time.perf_counter()
    plans, metadata = _plan(planner, told)
    plan_seconds = time.perf_counter() - begin
    results = [
        pickle.dumps(
            [
                WriteResult(item.index, 64, _StorageInfo(f"__{rank}_0.distcp", 1024 * number, 1024))
                for number, item in enumerate(plan.items)
            ]
        )
        for rank, plan in enumerate(plans)
    ]
    begin, used = time.perf_counter(), time.thread_time()
    size = len(_finish(metadata, results))
    finish_seconds, finish_cpu = time.perf_counter() - begin, time.thread_time() - used
    with Stall() as stall:
        _finish(metadata, results)
    found = {
        "plan_seconds": plan_seconds,
        "first_commit_seconds": finish_seconds,
        "later_cpu_seconds": finish_cpu,
        "later_stall_seconds": stall.seconds,
        "metadata_bytes": size,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
