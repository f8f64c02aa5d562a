"""The board over torch's store, where torchrun starts ranks again."""

import os
import subprocess
import sys
from pathlib import Path

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
