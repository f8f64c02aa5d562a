"""Trains one network twice, once left alone and once killed again and again, and shows that nobody could tell.

    python demo.py [--seed N] [--json FILE] [--keep DIR]

Both runs are train.py, under torchrun with two ranks on the CPU. The second one is hit by SIGKILL at moments drawn from
the seed: in the middle of saves and between them; one rank, all ranks, or torchrun with them. torchrun starts the ranks
again; when torchrun itself is dead, the same command is typed again. At the end audit.py, which cannot import Unbroken,
compares the last checkpoints and the ledgers of the two.

Exit code: 0 when nothing differs and every kind of kill was survived, 1 when something differs (it says what), 2 when a
run did not come to its end.
"""

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fire import BETWEEN, COMMIT, FireError, Training, draw_shots, torchrun_command
from report import Screen

HERE = Path(__file__).resolve().parent
RANKS = 2
NEEDED = 2  # kills of each kind
MAX_RESTARTS = 20  # by one torchrun; more than all kills together


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="repeats the kills of a run that printed it (default: a new one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that is shown there, too")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new directory for both runs, kept at the end")
    parser.add_argument("--steps", type=int, default=480, help="optimizer steps of each run (default %(default)s)")
    parser.add_argument("--every", type=int, default=20, help="steps from save to save (default %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, of both ranks (default %(default)s)")
    return parser.parse_args()


def train_both(args: argparse.Namespace, seed: int, directory: Path, screen: Screen) -> tuple[Training, Training]:
    arguments = [f"--steps={args.steps}", f"--every={args.every}", f"--batch={args.batch}"]
    script = HERE / "train.py"
    command = torchrun_command(script, RANKS, arguments, max_restarts=0)
    calm = Training(directory / "undisturbed", command, RANKS, args.every, screen.say, screen.progress)
    go(calm, "undisturbed", args.steps, screen)

    draw = random.Random(seed)
    fire = Training(
        directory / "under-fire",
        torchrun_command(script, RANKS, arguments, max_restarts=MAX_RESTARTS),
        RANKS,
        args.every,
        screen.say,
        screen.progress,
        shots=draw_shots(draw, args.every, RANKS),
        draw=draw,
        save_seconds=statistics.median(calm.commit_seconds()),
    )
    go(fire, "under fire", args.steps, screen)
    return calm, fire


def go(training: Training, name: str, steps: int, screen: Screen) -> None:
    screen.start(name, steps)
    try:
        training.run()
        screen.say(f"done in {training.seconds:.1f} s")
    finally:
        screen.stop()


def audit(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The verdict of audit.py, run as a process of its own."""
    result = directory / "audit.json"
    command = [sys.executable, str(HERE / "audit.py"), str(directory / "undisturbed"), str(directory / "under-fire")]
    command += [f"--steps={args.steps}", f"--batch={args.batch}", f"--ranks={RANKS}", f"--json={result}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not result.exists():
        return {"findings": [f"audit.py ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}"]}
    verdict: dict[str, Any] = json.loads(result.read_text())
    if done.returncode and not verdict["findings"]:
        verdict["findings"].append(f"audit.py ended with exit code {done.returncode}")
    return verdict


def count_kills(fire: Training, lives: int, redone: dict[str, int]) -> list[str]:
    """What the run under fire was spared, so that its survival would prove too little; and what it died of besides."""
    in_saves = sum(hit.fell == COMMIT for hit in fire.hits)
    between = sum(hit.fell == BETWEEN and redone.get(str(hit.generation), 0) > 0 for hit in fire.hits)
    findings = []
    if in_saves < NEEDED:
        findings.append(f"only {in_saves} kills fell in a save, where {NEEDED} must; try another --seed")
    if between < NEEDED:
        findings.append(f"only {between} kills fell between saves with steps to do again, where {NEEDED} must")
    if lives != len(fire.hits) + 1:
        findings.append(f"under fire: {lives} lives, where {len(fire.hits)} kills make {len(fire.hits) + 1}")
    return findings


def show(screen: Screen, fire: Training, verdict: dict[str, Any]) -> None:
    shot = verdict.get("fire", {})
    redone = shot.get("redone", {})
    starts = {life["generation"]: life["start_step"] for life in shot.get("lives", [])}
    rows = []
    for number, hit in enumerate(fire.hits, start=1):
        after = starts.get(hit.generation + 1)
        step = hit.step if hit.save_step is None else hit.save_step
        went_on = "?" if after is None else f"step {after}" if after else "the start"
        again = str(redone.get(str(hit.generation), "?"))
        where = [hit.shot.target, hit.fell, str(step), hit.commit_step]
        rows.append([str(number), f"{hit.seconds:.1f} s", *where, hit.shot.restarted_by, went_on, again])
    head = ["", "at", "SIGKILL of", "fell", "step", "of the commit", "restarted by", "went on from", "steps again"]
    screen.table("Kills", head, rows)
    if not shot:
        return

    calm = verdict["undisturbed"]
    committed = (str(run["saves_committed"]) for run in (calm, shot))
    both = (calm, shot)
    rows = []
    for key, title in (("weights", "weights"), ("optimizer", "optimizer state"), ("rest", "schedule, random numbers")):
        rows.append(["", f"{title}: {'equal' if calm[key] == shot[key] else 'DIFFERENT'}"])
        rows += [["undisturbed", calm[key]], ["under fire", shot[key]]]
    screen.table("The last checkpoint, as stock dcp.load reads it", ["", "SHA-256"], rows)

    rows = [
        ["samples repeated", str(calm["repeated"]), str(shot["repeated"])],
        ["samples skipped", str(calm["skipped"]), str(shot["skipped"])],
        ["samples out of order", "-", str(verdict["out_of_order"])],
        ["restarts survived", "-", str(len(shot["lives"]) - 1)],
        ["saves committed", *committed],
        ["training blocked by a save, median", *(f"{statistics.median(run['blocked_ms']):.1f} ms" for run in both)],
        ["training blocked by a save, at most", *(f"{max(run['blocked_ms']):.1f} ms" for run in both)],
        ["accuracy on 261 images by other hands", f"{calm['accuracy']:.2%}", f"{shot['accuracy']:.2%}"],
    ]
    screen.table("The surviving history", ["", "undisturbed", "under fire"], rows)


def main() -> int:
    args = options()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 31)
    screen = Screen()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no torchrun is left behind
    screen.say(f"the moments of the kills are drawn from --seed {seed}")
    if args.keep and args.keep.exists():
        screen.verdict(False, f"error: --keep {args.keep}: it exists already\nhint: name a directory that does not")
        return 2
    if args.keep:
        args.keep.mkdir(parents=True)
    directory = args.keep or Path(tempfile.mkdtemp(prefix="unbroken-demo-"))
    try:
        calm, fire = train_both(args, seed, directory, screen)
    except FireError as error:
        screen.verdict(False, f"error: {error}\nhint: both runs are in {directory}")
        return 2
    except KeyboardInterrupt:
        screen.verdict(False, f"interrupted; both runs are in {directory}")
        return 128 + signal.SIGINT
    screen.say("audit.py compares the two, without Unbroken")
    verdict = audit(args, directory)
    if "fire" in verdict:
        verdict["undisturbed"]["saves_committed"] = len(calm.commit_seconds())
        verdict["fire"]["saves_committed"] = len(fire.commit_seconds())
        verdict["findings"] += count_kills(fire, len(verdict["fire"]["lives"]), verdict["fire"]["redone"])
    verdict |= {"seed": seed, "kills": [asdict(hit) for hit in fire.hits], "commands_typed": fire.starts}
    show(screen, fire, verdict)
    if args.json:
        args.json.write_text(json.dumps(verdict, indent=2) + "\n")
    if verdict["findings"]:
        lines = "\n".join(f"  - {finding}" for finding in verdict["findings"])
        screen.verdict(False, f"\nNOT the same (--seed {seed}; both runs are in {directory}):\n{lines}")
        return 1
    screen.verdict(True, f"\nThe same to the last bit after {len(fire.hits)} kills (--seed {seed}).")
    if not args.keep:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
