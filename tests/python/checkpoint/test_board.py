"""The board over torch's store, where torchrun starts ranks again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from unbroken import _engine
from unbroken._board import TorchBoard

SCRIPT = """
import os
import torch.distributed as dist
from unbroken._board import make_board

dist.init_process_group("gloo")
board = make_board(None)
first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
print("found", board.get(["start/0/choice"]), flush=True)
board.set("start/0/choice", b"of a life that is over")
os._exit(1 if first_start else 0)
"""


def test_rank_started_again_does_not_hear_the_dead(tmp_path: Path) -> None:
    """One rank is enough: torchrun's agent keeps the store, as by default, and the rank's second start asks it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    done = subprocess.run(
        [*launcher, "--max-restarts=1", str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["found [None]", "found [None]"]


@pytest.fixture
def server():
    return TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture
def boards(server):
    """Those of two ranks."""
    return TorchBoard(server, "test"), TorchBoard(TCPStore("127.0.0.1", server.port, is_master=False), "test")


@pytest.mark.parametrize("size", [0, 1, (4 << 20) - 1, 4 << 20, (4 << 20) + 1, 40 << 20])
def test_a_value_of_any_length_reaches_the_other_rank(boards, size):
    mine, theirs = boards
    value = bytes(range(256)) * (size // 256) + b"+" * (size % 256)
    mine.set("long", value)
    mine.set("short", b"=")
    assert _engine.board_wait(theirs, "short", 60) == b"="  # set() does not wait for the store's answer
    assert theirs.get(["absent", "long", "short"]) == [None, value, b"="]
    theirs.erase(["absent", "long"])
    assert mine.get(["long", "short"]) == [None, b"="]


def test_a_long_value_that_is_erased_leaves_nothing_behind(server, boards):
    mine, theirs = boards
    empty = server.num_keys()
    mine.set("long", bytes(9 << 20))
    assert _engine.board_wait(theirs, "long", 60) == bytes(9 << 20)
    theirs.erase(["long"])
    assert server.num_keys() == empty


def test_of_two_that_set_a_key_both_hear_the_first(boards):
    mine, theirs = boards
    assert mine.set_if_absent("key", b"+first") == b"+first"
    assert theirs.set_if_absent("key", b"second") == b"+first"
