"""The demonstration's audit must pass what is right and fail what is wrong, on the files of the real script.

One rank is enough for that: train.py is started as torchrun would start it. A run dies by SIGKILL after step 10, with
its last checkpoint at step 8; then the same command goes on, with and without something done wrong.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import free_port

HERE = Path(__file__).resolve().parent
DIGITS = HERE.parents[2] / "examples" / "digits"
STEPS, EVERY, BATCH, DIES_AFTER, RESUMES_AFTER = 16, 4, 64, 10, 8


def train(directory: Path, sabotage: str | None = None) -> subprocess.CompletedProcess[str]:
    """A life of the run in `directory`, from wherever it stands."""
    script = [str(DIGITS / "train.py"), str(directory / "run"), f"--ledger={directory / 'ledger'}"]
    script += [f"--steps={STEPS}", f"--every={EVERY}", f"--batch={BATCH}"]
    wrapper = [str(HERE / "sabotage.py"), sabotage] if sabotage else []
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = os.environ | ranks | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *wrapper, *script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def audit(calm: Path, fire: Path) -> tuple[int, str]:
    """(exit code, what it printed)."""
    command = [sys.executable, str(DIGITS / "audit.py"), str(calm), str(fire)]
    command += [f"--steps={STEPS}", f"--batch={BATCH}", "--ranks=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    done = train(directory)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first life is over and whose second has not begun. Tests work on copies."""
    directory = tmp_path_factory.mktemp("killed")
    done = train(directory, f"die-after:{DIES_AFTER}")
    assert done.returncode == -signal.SIGKILL, done.stderr
    return directory


@pytest.fixture(scope="module")
def survived(killed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = copy(killed, tmp_path_factory.mktemp("survived"))
    done = train(directory)
    assert done.returncode == 0, done.stderr
    return directory


def copy(source: Path, to: Path) -> Path:
    return Path(shutil.copytree(source, to / "copy"))


def last_checkpoint(directory: Path) -> Path:
    (found,) = (directory / "run").glob(f"step-{STEPS}-*")
    return found


def test_killed_run_that_went_on_passes(calm: Path, survived: Path) -> None:
    code, said = audit(calm, survived)
    assert (code, said.split(":")[0]) == (0, "equal"), said
    steps = [json.loads(line)["step"] for line in (survived / "ledger" / "rank-0.jsonl").read_text().splitlines()]
    assert steps == [*range(1, DIES_AFTER + 1), *range(RESUMES_AFTER + 1, STEPS + 1)]


@pytest.mark.parametrize("generator", ["python", "numpy", "torch"])
def test_generator_that_is_not_restored_fails(calm: Path, killed: Path, generator: str, tmp_path: Path) -> None:
    directory = copy(killed, tmp_path)
    done = train(directory, f"forget:{generator}")
    assert done.returncode == 0, done.stderr
    code, said = audit(calm, directory)
    assert code == 1
    assert "weights differ" in said
    assert "schedule and random numbers differ" in said


def test_batch_that_is_not_trained_fails(calm: Path, killed: Path, tmp_path: Path) -> None:
    directory = copy(killed, tmp_path)
    done = train(directory, "lose-batch")
    assert done.returncode == 0, done.stderr
    code, said = audit(calm, directory)
    assert code == 1
    assert f"rank 0 trained step {RESUMES_AFTER + 1} 0 times" in said
    assert f"{BATCH} skipped" in said
    assert "weights differ" in said


def test_sample_that_is_trained_twice_fails(calm: Path, survived: Path, tmp_path: Path) -> None:
    directory = copy(survived, tmp_path)
    path = directory / "ledger" / "rank-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["samples"][0] = lines[0]["samples"][0]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, said = audit(calm, directory)
    assert code == 1
    assert "1 samples repeated, 1 skipped" in said
    assert f"the order of samples differs from step {STEPS} on" in said


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0.json", ".metadata"])
def test_file_that_is_missing_fails(calm: Path, survived: Path, name: str, tmp_path: Path) -> None:
    directory = copy(survived, tmp_path)
    checkpoint = last_checkpoint(directory)
    (checkpoint / name).unlink()
    code, said = audit(calm, directory)
    assert code == 1
    without_marker = f"the last checkpoint is step-{STEPS - EVERY}-"
    assert (without_marker if name == ".metadata" else f"{checkpoint.name}: {name} is missing") in said


def test_flipped_bit_in_the_weights_fails(calm: Path, survived: Path, tmp_path: Path) -> None:
    directory = copy(survived, tmp_path)
    path = last_checkpoint(directory) / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, said = audit(calm, directory)
    assert code == 1
    assert "differ" in said or "dcp.load" in said
