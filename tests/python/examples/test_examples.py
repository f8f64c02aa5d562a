"""The examples, started by the commands of their README: killed at random, they end as if they had not been.

SEED=... in the environment repeats the kills.
"""

import importlib.util
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import unbroken

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[2] / "examples"
STEPS, EVERY, BATCH = 48, 6, 32  # an epoch has 30 batches
RANKS = {"plain": 1, "ddp": 2, "fsdp2": 2, "fsdp2_tp": 4}
PEERS = {"fsdp2_tp": 2}  # ranks next to each other that train the same samples; else 1
ONE, EVERYTHING = "one rank", "torchrun and all ranks"
KILLS = {"plain": [EVERYTHING], "ddp": [ONE, EVERYTHING], "fsdp2": [EVERYTHING], "fsdp2_tp": [EVERYTHING]}
PATIENCE_SECONDS = 200.0
SEED = int(os.environ.get("SEED") or time.time_ns() % 10**6)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclass(frozen=True)
class Line:
    """A step that a rank trained."""

    pid: int
    generation: int
    step: int
    epoch: int
    samples: list[int]


class EndedTooSoonError(Exception):
    """The example was done before the moment to kill it had come."""


class Training:
    """An example on a root of its own, from the first start to its end."""

    def __init__(self, name: str, directory: Path, steps: int = STEPS) -> None:
        self.root, self.ranks, self._records = directory / "run", RANKS[name], directory / "records"
        self.log = directory / "log"
        self._records.mkdir(parents=True)
        said = re.search(
            rf"`((?:python|torchrun) [^`]*examples/{name}\.py [^`]*)`", (EXAMPLES / "README.md").read_text()
        )
        assert said, f"the README has no command for {name}"
        launcher, *arguments = shlex.split(said[1])
        start = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[launcher]
        at = arguments.index(f"examples/{name}.py")
        script = [str(HERE / "recorded.py"), str(self._records), str(EXAMPLES / f"{name}.py")]
        self._command = [*start, *arguments[:at], *script, *arguments[at + 1 : -1], str(self.root)]
        self._command += [f"--steps={steps}", f"--every={EVERY}"]
        self._process: subprocess.Popen[bytes] | None = None

    def lines(self) -> list[list[Line]]:
        """What each rank has trained, in the order in which it did."""
        files = [self._records / f"rank-{rank}" for rank in range(self.ranks)]
        texts = [file.read_text() if file.exists() else "" for file in files]
        return [[Line(**json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()] for text in texts]

    def run(self, kills: list[tuple[str, int]]) -> None:
        """Until it is done. A kill is of whom, and when all ranks have trained that step and something is committed."""
        generation = 0
        try:
            self._start()
            for who, step in kills:
                last = self._await_step(step, generation)
                generation = last[0].generation
                self._kill(who, last)
            self._await(lambda: self._running.poll() is not None)
            assert self._running.returncode == 0, self._end_of_log()
        finally:
            self._stop()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def _start(self) -> None:
        environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
            )

    def _await_step(self, step: int, after: int) -> list[Line]:
        """The last line of each rank, once all are of one life later than `after` and that far."""
        found: list[Line] = []

        def far_enough() -> bool:
            if self._running.poll() is not None:
                raise EndedTooSoonError(self._end_of_log())
            found[:] = [lines[-1] for lines in self.lines() if lines]
            return (
                len(found) == self.ranks
                and len({line.generation for line in found}) == 1
                and found[0].generation > after
                and min(line.step for line in found) >= step
                and any(self.root.glob("step-*/.metadata"))
            )

        self._await(far_enough)
        return found

    def _kill(self, who: str, last: list[Line]) -> None:
        print(f"SIGKILL of {who} in step {min(line.step for line in last) + 1}, generation {last[0].generation}")
        if who == ONE:
            os.kill(last[-1].pid, signal.SIGKILL)
            return
        for pid in {self._running.pid, *(line.pid for line in last)}:
            os.kill(pid, signal.SIGKILL)
        self._running.wait()
        self._start()

    def _stop(self) -> None:
        """Ends what is left after a failure; torchrun passes the signal on."""
        if self._running.poll() is None:
            self._running.terminate()
            try:
                self._running.wait(40)
            except subprocess.TimeoutExpired:
                self._running.kill()
                self._running.wait()

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"nothing happened for {PATIENCE_SECONDS} s. {self._end_of_log()}"
            time.sleep(0.003)

    def _end_of_log(self) -> str:
        return "The log's end:\n" + self.log.read_text(errors="replace")[-6000:]


def train(name: str, directory: Path, kills: list[str], draw: random.Random) -> Training:
    for again in range(5):
        training = Training(name, directory / str(again))
        begin, moments = 0, []
        for who in kills:
            begin = draw.randint(begin + EVERY + 2, begin + 2 * EVERY)
            moments.append((who, begin))
        try:
            training.run(moments)
        except EndedTooSoonError as error:
            print(f"not killed in time: {error}")
        else:
            return training
    raise AssertionError("the example was always done before it could be killed")


def whole(root: Path) -> dict[str, Any]:
    """The newest checkpoint as whole tensors and values by flat name, read by stock DCP."""
    newest = max(root.glob("step-*/.metadata"), key=lambda path: int(path.parent.name.split("-")[1])).parent
    stored = dcp.FileSystemReader(newest).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(one.size, dtype=one.properties.dtype) if isinstance(one, TensorStorageMetadata) else None
        for key, one in stored.items()
    }
    dcp.load(state, checkpoint_id=newest, no_dist=True)
    return state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    return type(a) is type(b) and repr(a) == repr(b)


def surviving(lines: list[Line]) -> dict[int, Line]:
    """Each step as the last life that trained it did."""
    return {line.step: line for line in sorted(lines, key=lambda line: line.generation)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Training]:
    done: dict[str, Training] = {}

    def get(name: str) -> Training:
        if name not in done:
            done[name] = train(name, tmp_path_factory.mktemp(name), [], random.Random(0))
        return done[name]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_killed_example_ends_as_the_undisturbed_one(
    name: str, undisturbed: Callable[[str], Training], tmp_path: Path
) -> None:
    print(f"SEED={SEED}")
    calm = undisturbed(name)
    fire = train(name, tmp_path, KILLS[name], random.Random(f"{SEED} {name}"))

    # All of them but the generators that an example neither seeds nor uses.
    expected, found = whole(calm.root), whole(fire.root)
    for key in [key for key in expected if re.fullmatch(r"rng/rank_\d+/(python|numpy)", key)]:
        del expected[key], found[key]
    assert {"model.head.weight", "optim.state.head.weight.exp_avg", "sched.last_epoch"} <= set(expected)
    assert set(found) == set(expected)
    assert not [key for key in expected if not same(found[key], expected[key])]

    said = re.findall(r"generation (\d+) goes on from step (\d+)", fire.log.read_text())
    resumed = {int(generation): int(step) for generation, step in said}
    assert list(resumed) == list(range(2, len(KILLS[name]) + 2))
    assert min(resumed.values()) > 0
    for undisturbed_lines, lines in zip(calm.lines(), fire.lines(), strict=True):
        history = surviving(undisturbed_lines)
        assert [line.step for line in undisturbed_lines] == list(range(1, STEPS + 1))
        assert sorted(surviving(lines)) == list(range(1, STEPS + 1))
        # In the order of the undisturbed run, those included that a kill undid and that were trained again.
        for line in lines:
            assert (line.epoch, line.samples) == (history[line.step].epoch, history[line.step].samples)
        for generation, step in resumed.items():
            mine = [line.step for line in lines if line.generation == generation]
            assert mine == list(range(step + 1, step + 1 + len(mine)))


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_every_batch_has_the_samples_of_its_step_on_any_layout(
    name: str, undisturbed: Callable[[str], Training]
) -> None:
    plain = surviving(undisturbed("plain").lines()[0])
    ranks = [surviving(lines) for lines in undisturbed(name).lines()]
    seen: Counter[tuple[int, int]] = Counter()
    for step in range(1, STEPS + 1):
        parts = [rank[step].samples for rank in ranks]
        peers = PEERS.get(name, 1)
        assert all(parts[i] == parts[i - i % peers] for i in range(len(parts)))
        samples = [sample for part in parts[::peers] for sample in part]
        assert len(samples) == BATCH
        assert sorted(samples) == sorted(plain[step].samples)
        seen.update((plain[step].epoch, sample) for sample in samples)
    assert set(seen.values()) == {1}
    assert_peers_draw_the_same_numbers(undisturbed(name), PEERS.get(name, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_tp"])
def test_plain_model_loads_what_was_sharded(name: str, undisturbed: Callable[[str], Training]) -> None:
    root = undisturbed(name).root
    found = importlib.util.spec_from_file_location("example_plain", EXAMPLES / "plain.py")
    assert found is not None
    assert found.loader is not None
    plain = importlib.util.module_from_spec(found)
    found.loader.exec_module(plain)
    model = plain.Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    assert unbroken.load(root, {"model": model, "optim": optimizer}) == STEPS
    saved = whole(root)
    for key, weight in model.state_dict().items():
        assert same(weight, saved[f"model.{key}"])
    for key, parameter in model.named_parameters():
        for part in ("exp_avg", "exp_avg_sq", "step"):
            assert same(optimizer.state[parameter][part], saved[f"optim.state.{key}.{part}"])


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("fsdp2", "plain"), ("plain", "fsdp2_tp")])
def test_example_goes_on_from_what_another_layout_saved(
    before: str, after: str, undisturbed: Callable[[str], Training], tmp_path: Path
) -> None:
    training = Training(after, tmp_path, steps=STEPS + EVERY)
    shutil.copytree(undisturbed(before).root, training.root)
    training.run([])
    assert f"generation 2 goes on from step {STEPS}" in training.log.read_text()
    peers = PEERS.get(after, 1)
    lines = training.lines()[::peers]
    for rank in lines:
        assert [line.step for line in rank] == list(range(STEPS + 1, STEPS + EVERY + 1))
    history = [line for rank in undisturbed(before).lines() for line in rank]
    epoch = lines[0][0].epoch
    trained = Counter(n for line in itertools.chain(history, *lines) if line.epoch == epoch for n in line.samples)
    assert set(trained.values()) == {1}
    assert len(trained) > BATCH * EVERY
    assert_peers_draw_the_same_numbers(training, peers)


def assert_peers_draw_the_same_numbers(training: Training, peers: int) -> None:
    """Else the copies that tensor-parallel peers have of a weight would grow apart, and nothing would say so."""
    state = whole(training.root)
    drawn = [state[f"rng/rank_{rank:05d}/torch"] for rank in range(training.ranks)]
    for a, b in itertools.combinations(range(training.ranks), 2):
        assert same(drawn[a], drawn[b]) == (a // peers == b // peers)
