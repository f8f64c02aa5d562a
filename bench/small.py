"""Small states and long runs: 1000 tiny tensors, and what 200 saves leave behind in a process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import floors
from ours import Ours
from peers import ASYNCHRONOUS, SYNCHRONOUS, drop_failed, open_peers
from rows import Effort, Row
from state import adam, nbytes_of, tiny


def measure_tiny(place: Path, effort: Effort, notes: list[str]) -> list[Row]:
    """1000 tensors, 1 MB in all: what a save costs beside its bytes. Saves after the first."""
    state = tiny()
    blocked = Row("1000 tensors, 1 MB: blocked", 3, unit="ms", absolute=True)
    durable = Row("1000 tensors, 1 MB: durable (floor: direct write)", 30, unit="ms", absolute=True)
    ours = Ours(place / "ours", state)
    ours.prepare()
    ours.save()
    write = floors.best_write(place / "floor", floors.Memory(nbytes_of(state)))
    peers = open_peers((*SYNCHRONOUS, *ASYNCHRONOUS), place, state, notes)
    for peer in peers:
        peer.save(state)
    for _ in effort.rounds([blocked, durable], "1000 tensors"):
        written = write()
        first, second = ours.save()
        blocked.add(1e3 * first)
        durable.add(1e3 * second, 1e3 * written)
        for peer in list(peers):
            try:
                first, second = peer.save(state)
            except Exception as error:  # noqa: BLE001  # a peer that fails is no reason to measure nothing
                drop_failed(peers, peer, error, notes)
            else:
                blocked.add_peer(peer.name, 1e3 * first)
                durable.add_peer(peer.name, 1e3 * second)
    for peer in peers:
        peer.close()
    ours.close()
    return [blocked, durable]


def measure_bounded(place: Path, saves: int, nbytes: int) -> list[Row]:
    """Descriptors, threads and memory after many saves against after three, in a process of its own."""
    command = [sys.executable, __file__, str(place / "ours"), str(saves), str(nbytes)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    rows = []
    for name, unit, target in (("descriptors", "", 1.0), ("threads", "", 1.0), ("RSS", "MiB", 1.02)):
        row = Row(f"{name} after {saves} saves (x after 3)", target, unit=unit, exact=True)
        row.add(found["last"][name], found["third"][name])
        rows.append(row)
    return rows


def _bounded(root: Path, saves: int, nbytes: int) -> None:
    ours = Ours(root, adam(nbytes))
    ours.prepare()
    found = {}
    for number in range(1, saves + 1):
        ours.step()
        ours.begin().wait()
        if number in (3, saves):
            time.sleep(1)  # what the save leaves to be done after it, is done
            found["third" if number == 3 else "last"] = _held()
    ours.close()
    print(json.dumps(found))


def _held() -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(status["Threads"]),
        "RSS": int(status["VmRSS"].split()[0]) / 1024,
    }


if __name__ == "__main__":
    _bounded(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
