"""Several ranks that do something together: real processes with gloo, as torchrun starts them.

What they run is a script that is given a directory and names of scenarios. Each rank writes what became of a scenario
into the directory, as `<scenario>.<rank>`: "ok", or the trace of what it raised.
"""

import os
import socket
import subprocess
import sys

_LOG_SHOWN = 6000


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(script, size, directory, names, timeout, **environment):
    """Runs the scenarios; returns for each rank the exit code, and leaves what they said in the directory."""
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"} | environment
    ranks = []
    for rank in range(size):
        with _log(directory, rank).open("ab") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, script, directory, *names],
                    env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [rank.wait(timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, code in enumerate(codes):
        with _log(directory, rank).open("a") as log:
            log.write(f"--- rank {rank} ended with exit code {code}\n")
    return codes


def check(directory, name, ranks):
    """All these ranks came through the scenario. If not, all that they said is shown: one may have died of another."""
    said = {rank: directory / f"{name}.{rank}" for rank in ranks}
    told = {rank: path.read_text() if path.exists() else "it did not come so far" for rank, path in said.items()}
    wrong = [rank for rank, text in told.items() if text != "ok"]
    shown = []
    for rank in wrong:
        log = _log(directory, rank).read_text(errors="replace")[-_LOG_SHOWN:]
        shown.append(f"rank {rank}: {told[rank]}\n{log}")
    assert not wrong, "\n".join([f"{name} on ranks {wrong}", *shown])


def _log(directory, rank):
    return directory / f"log.{rank}"
