"""A seeded sample of the faults that strace injects into the real process; `make crash` injects all of them."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "crash" / "strace_campaign.py"


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_fault_at_any_system_call_keeps_what_was_durable() -> None:
    seed = int(os.environ.get("UNBROKEN_SEED", random.SystemRandom().randrange(2**32)))
    command = [sys.executable, CAMPAIGN, "--sample", "8", "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    assert re.search(r"^[1-9]\d* passed, 0 failed$", done.stdout, re.MULTILINE)
