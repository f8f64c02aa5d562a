"""Compares a run under fire with an undisturbed one, with stock torch only: here Unbroken cannot be imported.

    python audit.py UNDISTURBED FIRE --steps 480 --batch 64 --ranks 2 [--json FILE]

Each of the two directories holds `run` (the root that the Checkpointer wrote) and `ledger` (a file for each rank).
Said of each run: SHA-256 of the weights, of the optimizer's state and of everything else (schedule, random numbers) in
its last checkpoint; what became of each sample in the surviving history; how many steps had to be done again; the
accuracy on images that were not trained on. Exits with 1 when anything differs, and says what.
"""

import argparse
import hashlib
import itertools
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.modules["unbroken"] = None  # type: ignore[assignment]  # from here on `import unbroken` raises ModuleNotFoundError

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from ledger import Entry, read_ledger  # noqa: E402
from model import TRAINING_SAMPLES, Net, held_out  # noqa: E402
from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: E402

ATTEMPT = re.compile(r"step-(\d+)-g(\d+)-[0-9a-f]{8}")


class AuditError(Exception):
    """Something that the audit needs is not there or cannot be read. The message says what and where."""


@dataclass(frozen=True)
class Life:
    """One line of generations/: from one resume to the next."""

    generation: int
    start_step: int
    start_generation: int  # the life that had saved start_step; 0 when it started fresh
    refused: tuple[str, ...]


@dataclass(frozen=True)
class Audited:
    """What is said of one run."""

    checkpoint: str
    weights: str
    optimizer: str
    rest: str
    rest_keys: tuple[str, ...]
    accuracy: float
    blocked_ms: tuple[float, ...]  # how long each save held a rank's training up
    repeated: int
    skipped: int
    lives: tuple[Life, ...]
    trained_to: dict[int, int]  # generation: the last step that it trained
    redone: dict[int, int]  # generation: steps trained in it that the next one did again


# ---- the checkpoint ----------------------------------------------------------------------------------------------


def last_checkpoint(root: Path) -> Path:
    """The newest directory that has its marker."""
    found = []
    for path in root.iterdir():
        match = ATTEMPT.fullmatch(path.name)
        if match and (path / ".metadata").exists():
            found.append((int(match[1]), int(match[2]), path))
    if not found:
        raise AuditError(f"{root}: no checkpoint there has a .metadata")
    return max(found)[2]


def load_flat(path: Path) -> dict[str, Any]:
    """Everything in a checkpoint by its flat name, read by stock dcp.load."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    state: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            state[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
        else:
            state[key] = None
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def check_files(path: Path) -> Any:
    """Raises when a file that the manifest lists is missing or of another length; returns the loader's state."""
    body = json.loads((path / "manifest.json").read_text())["body"]
    expected = {".metadata": body["metadata"]["length"]}
    for rank, (length, _, _) in enumerate(body["parts"]):
        part = path / f"__{rank}.json"
        expected[part.name] = length
        if part.exists():
            expected |= {file["name"]: file["length"] for file in json.loads(part.read_text())["body"]["files"]}
    for name, length in expected.items():
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found != length:
            what = "is missing" if found is None else f"has {found} bytes where the manifest says {length}"
            raise AuditError(f"{path.name}: {name} {what}")
    return body["loader"]


def _feed(digest: "hashlib._Hash", value: Any) -> None:
    """Adds a value with its type and shape, so that no two different values feed the same bytes."""
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}\n".encode())
        for key in sorted(value, key=repr):
            digest.update(f"{key!r}\n".encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"{type(value).__name__} {len(value)}\n".encode())
        for item in value:
            _feed(digest, item)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        digest.update(f"{type(value).__name__} {value!r}\n".encode())
    else:
        raise AuditError(f"hash the checkpoint: do not know how to hash a {type(value).__qualname__}")


def sha256(state: Mapping[str, Any], keys: list[str]) -> str:
    digest = hashlib.sha256()
    _feed(digest, {key: state[key] for key in keys})
    return digest.hexdigest()


def accuracy(path: Path) -> float:
    """Of the weights as anyone would load them with stock DCP."""
    net = Net()
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    net.load_state_dict(state["model"])
    net.eval()
    images, labels = held_out()
    with torch.inference_mode():
        return float((net(images).argmax(dim=1) == labels).float().mean())


# ---- the ledger --------------------------------------------------------------------------------------------------


def read_lives(root: Path) -> list[Life]:
    """The generations' records, oldest first. No gaps; a start that was killed early leaves a claim alone."""
    lives = []
    for path in sorted((root / "generations").glob("*.json")):
        body = json.loads(path.read_text())["body"]
        origin = body["origin"]
        fresh = origin["kind"] != "attempt"
        refused = tuple(f"{entry['attempt']}: {entry['reason']}" for entry in body["refused"])
        lives.append(
            Life(
                generation=body["generation"],
                start_step=0 if fresh else origin["step"],
                start_generation=0 if fresh else origin["generation"],
                refused=refused,
            )
        )
    numbers = [life.generation for life in lives]
    taken = {int(path.stem) for path in (root / "generations").glob("*.claim")} | set(numbers)
    if not lives or sorted(taken) != list(range(1, len(taken) + 1)):
        raise AuditError(f"{root}/generations: records {numbers} where 1, 2, 3 ... without a gap must be")
    return lives


def survivors(lives: list[Life], steps: int) -> dict[int, int]:
    """Which generation's work on each step is in the final state: from the last life back along where each started."""
    by_number = {life.generation: life for life in lives}
    owner: dict[int, int] = {}
    life, end = lives[-1], steps
    while True:
        owner.update(dict.fromkeys(range(life.start_step + 1, end + 1), life.generation))
        if life.start_generation == 0:
            return owner
        life, end = by_number[life.start_generation], life.start_step


def surviving_history(
    ranks: list[list[Entry]], owner: Mapping[int, int], name: str, findings: list[str]
) -> dict[int, list[tuple[int, ...]]]:
    """Step: each rank's samples. What is missing or there twice is a finding."""
    history: dict[int, list[tuple[int, ...]]] = {step: [] for step in sorted(owner)}
    for rank, entries in enumerate(ranks):
        times = Counter((entry.generation, entry.step) for entry in entries)
        samples = {(entry.generation, entry.step): entry.samples for entry in entries}
        for step, generation in sorted(owner.items()):
            if times[generation, step] != 1:
                findings.append(
                    f"{name}: rank {rank} trained step {step} {times[generation, step]} times in generation"
                    f" {generation}, whose work on it survives; once is right"
                )
            history[step].append(samples.get((generation, step), ()))
    return history


def judge_samples(
    history: Mapping[int, list[tuple[int, ...]]], batch: int, name: str, findings: list[str]
) -> tuple[int, int]:
    """(repeated, skipped): within each epoch every sample must come once."""
    repeated = skipped = 0
    steps_per_epoch = TRAINING_SAMPLES // batch
    for first in range(1, len(history) + 1, steps_per_epoch):
        steps = [step for step in range(first, first + steps_per_epoch) if step in history]
        seen = Counter(sample for step in steps for share in history[step] for sample in share)
        epoch = (first - 1) // steps_per_epoch
        twice = sum(count - 1 for count in seen.values())
        left_out = len(steps) * batch - len(seen)
        if twice or left_out:
            findings.append(f"{name}: epoch {epoch}: {twice} samples repeated, {left_out} skipped")
        repeated, skipped = repeated + twice, skipped + left_out
    return repeated, skipped


def out_of_order(
    calm: Mapping[int, list[tuple[int, ...]]], fire: Mapping[int, list[tuple[int, ...]]], findings: list[str]
) -> int:
    """Samples that stand at another place (step, rank, position) than in the undisturbed run."""
    count = 0
    for step in sorted(set(calm) | set(fire)):
        pairs = zip(calm.get(step, []), fire.get(step, []), strict=False)
        differing = sum(abs(len(a) - len(b)) + sum(x != y for x, y in zip(a, b, strict=False)) for a, b in pairs)
        if differing and count == 0:
            findings.append(f"the order of samples differs from step {step} on")
        count += differing
    return count


# ---- both together -----------------------------------------------------------------------------------------------


def audit(
    directory: Path, name: str, args: argparse.Namespace, findings: list[str]
) -> tuple[Audited, dict[int, list[tuple[int, ...]]]]:
    root = directory / "run"
    checkpoint = last_checkpoint(root)
    if not checkpoint.name.startswith(f"step-{args.steps}-"):
        findings.append(f"{name}: the last checkpoint is {checkpoint.name}, not one of step {args.steps}")
    loader = check_files(checkpoint)
    try:
        state = load_flat(checkpoint)
        right = accuracy(checkpoint)
    except Exception as error:  # whatever stock DCP raises: it does not load, and that is the verdict
        raise AuditError(f"{name}: stock dcp.load of {checkpoint}: {type(error).__name__}: {error}") from error
    weights = [key for key in state if key.startswith("model.")]
    optimizer = [key for key in state if key.startswith("optim.")]
    state["the loader's place"] = loader
    rest = sorted(set(state) - set(weights) - set(optimizer))

    lives = read_lives(root)
    entries = [read_ledger(directory / "ledger", rank) for rank in range(args.ranks)]
    history = surviving_history(entries, survivors(lives, args.steps), name, findings)
    repeated, skipped = judge_samples(history, args.batch, name, findings)

    trained_to = {life.generation: life.start_step for life in lives}
    for entry in (entry for rank in entries for entry in rank):
        trained_to[entry.generation] = max(trained_to[entry.generation], entry.step)
    redone = {a.generation: trained_to[a.generation] - b.start_step for a, b in itertools.pairwise(lives)}

    return Audited(
        checkpoint=checkpoint.name,
        weights=sha256(state, weights),
        optimizer=sha256(state, optimizer),
        rest=sha256(state, rest),
        rest_keys=tuple(rest),
        accuracy=right,
        blocked_ms=tuple(ms for rank in entries for entry in rank for ms in entry.blocked_ms),
        repeated=repeated,
        skipped=skipped,
        lives=tuple(lives),
        trained_to=trained_to,
        redone=redone,
    ), history


def compare(args: argparse.Namespace) -> dict[str, Any]:
    findings: list[str] = []
    calm, calm_history = audit(args.undisturbed, "undisturbed", args, findings)
    fire, fire_history = audit(args.fire, "under fire", args, findings)
    moved = out_of_order(calm_history, fire_history, findings)
    for what in ("weights", "optimizer", "rest", "rest_keys", "accuracy"):
        a, b = getattr(calm, what), getattr(fire, what)
        if a != b:
            title = {"optimizer": "optimizer state", "rest": "schedule and random numbers"}.get(what, what)
            findings.append(f"{title} differ: {a} undisturbed, {b} under fire")
    return {
        "undisturbed": _plain(calm),
        "fire": _plain(fire),
        "out_of_order": moved,
        "findings": findings,
    }


def _plain(audited: Audited) -> dict[str, Any]:
    fields = dict(vars(audited))
    fields["lives"] = [vars(life) for life in audited.lives]
    return fields


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("undisturbed", type=Path)
    parser.add_argument("fire", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--json", type=Path, help="write the verdict there")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    try:
        verdict = compare(args)
    except (AuditError, OSError, ValueError, KeyError) as error:
        verdict = {"findings": [f"{error}" if isinstance(error, AuditError) else f"{type(error).__name__}: {error}"]}
    if args.json:
        args.json.write_text(json.dumps(verdict, indent=2))
    for finding in verdict["findings"]:
        print(finding)
    if not verdict["findings"]:
        print(f"equal: weights {verdict['fire']['weights']}, optimizer state {verdict['fire']['optimizer']}")
    return 1 if verdict["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
