"""The demonstration as a user starts it, shortened: two runs of two ranks under torchrun, all six kills, the audit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits"
SEED, STEPS, EVERY = 5, 240, 10


@pytest.mark.slow
def test_run_under_fire_equals_the_undisturbed_one(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, str(DIGITS / "demo.py"), f"--seed={SEED}", f"--json={result}"]
    command += [f"--steps={STEPS}", f"--every={EVERY}", f"--keep={tmp_path / 'runs'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    verdict = json.loads(result.read_text())
    calm, fire = verdict["undisturbed"], verdict["fire"]
    assert verdict["findings"] == []
    for what in ("weights", "optimizer", "rest"):
        assert len(calm[what]) == 64
        assert calm[what] == fire[what]
    assert (fire["repeated"], fire["skipped"], verdict["out_of_order"]) == (0, 0, 0)
    assert {kill["shot"]["who"] for kill in verdict["kills"]} == {"one rank", "all ranks", "everything"}
    assert len(fire["lives"]) == len(verdict["kills"]) + 1
    assert verdict["commands_typed"] > 1
