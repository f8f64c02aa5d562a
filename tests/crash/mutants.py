#!/usr/bin/env python3
"""Tests the crash matrix itself: the engine with one step of a protocol broken must turn it red.

Each mutant changes one place of one source file in a copy, compiles that file alone and links it with the objects of
the crash tests before the engine's libraries, so that it takes the place of the original. Needs a build directory with
-DUNBROKEN_TESTS=ON in which unbroken_crash_test is built.

    mutants.py --build build/test              all
    mutants.py --build build/test --sample 3   so many, by chance (UNBROKEN_SEED repeats the choice)
    mutants.py --build build/test NAME ...     these
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Mutant:
    name: str
    step: str  # of the protocol, as the head of the file numbers it
    file: str  # below engine/
    original: str  # must occur exactly once
    broken: str
    tests: str  # that must turn red


COMMIT = "checkpoint/commit.cc"
GENERATION = "checkpoint/generation.cc"
RECOVERY = "checkpoint/recovery.cc"
RETENTION = "checkpoint/retention.cc"
CATALOG = "checkpoint/catalog.cc"
SHARD = "checkpoint/shard.cc"

MUTANTS = [
    Mutant(
        "attempts_share_a_directory",
        "commit 1",
        "checkpoint/manifest.cc",
        'return fmt::format("step-{}-g{}-{}", key.step, key.generation, attempt);',
        'return fmt::format("step-{}-g{}-{}", key.step, key.generation, attempt.empty() ? "" : "00000000");',
        "Invariant2*",
    ),
    Mutant(
        "part_bytes_not_durable",
        "commit 2",
        SHARD,
        "  UNBROKEN_TRY(unfinished.finish());\n  UNBROKEN_CRASH_POINT",
        "  UNBROKEN_CRASH_POINT",
        "Invariant1*:*CrashMatrix*",
    ),
    Mutant(
        "directory_not_synced",
        "commit 3",
        COMMIT,
        '    UNBROKEN_TRY(store_.sync_directory(directory_));\n    UNBROKEN_TRY(store_.sync_directory(""));\n',
        '    UNBROKEN_TRY(store_.sync_directory(""));\n',
        "Invariant1*",
    ),
    Mutant(
        "root_not_synced",
        "commit 3",
        COMMIT,
        '    UNBROKEN_TRY(store_.sync_directory(""));\n    UNBROKEN_CRASH_POINT("commit.3',
        '    UNBROKEN_CRASH_POINT("commit.3',
        "*CrashMatrix*",
    ),
    Mutant(
        "votes_not_waited_for",
        "commit 4",
        COMMIT,
        "      if (!count.carried) {",
        "      if (false) {",
        "Invariant1*:*ErrorMatrix*",
    ),
    Mutant(
        "marker_before_manifest",
        "commit 5",
        COMMIT,
        "    UNBROKEN_TRY(write_root(votes, marker));\n    UNBROKEN_TRY(check_fence(store_, life_));\n"
        '    UNBROKEN_CRASH_POINT("commit.6.generations_checked");\n    UNBROKEN_TRY(publish(marker));\n',
        "    UNBROKEN_TRY(check_fence(store_, life_));\n"
        '    UNBROKEN_CRASH_POINT("commit.6.generations_checked");\n    UNBROKEN_TRY(publish(marker));\n'
        "    UNBROKEN_TRY(write_root(votes, marker));\n",
        "*CrashMatrix*",
    ),
    Mutant(
        "manifest_not_durable",
        "commit 5",
        COMMIT,
        '    UNBROKEN_TRY(store_.sync_directory(directory_));\n    UNBROKEN_CRASH_POINT("commit.5.manifest_durable',
        '    UNBROKEN_CRASH_POINT("commit.5.manifest_durable',
        "Steps*",
    ),
    Mutant(
        "no_look_before_the_marker",
        "commit 6",
        COMMIT,
        '    UNBROKEN_TRY(check_fence(store_, life_));\n    UNBROKEN_CRASH_POINT("commit.6',
        '    UNBROKEN_CRASH_POINT("commit.6',
        "Fence*:*Races*",
    ),
    Mutant(
        "no_look_after_the_marker",
        "commit 6",
        COMMIT,
        "    Status overtaken = check_fence(store_, life_);",
        "    Status overtaken;",
        "Steps*",
    ),
    Mutant(
        "a_marker_that_another_may_have_taken_is_removed",
        "commit 6",
        COMMIT,
        "all_stopped && !published_) {",
        "all_stopped) {",
        "Steps*",
    ),
    Mutant(
        "marker_not_durable",
        "commit 6",
        COMMIT,
        '    UNBROKEN_TRY(store_.sync_directory(directory_));\n    UNBROKEN_CRASH_POINT("commit.6.marker_durable");',
        '    UNBROKEN_CRASH_POINT("commit.6.marker_durable");',
        "*CrashMatrix*:*ErrorMatrix*",
    ),
    Mutant(
        "unclear_answer_is_failure",
        "commit 6",
        COMMIT,
        "      const auto there = store_.read(path(kMarkerName), kMaxMetadataBytes);",
        "      if (!published) return published.error().code == Code::kUnknown"
        ' ? make_error(Code::kIo, "unclear") : published.error();\n'
        "      const auto there = store_.read(path(kMarkerName), kMaxMetadataBytes);",
        "*ErrorMatrix*",
    ),
    Mutant(
        "failed_sync_of_the_marker_is_failure",
        "commit 6",
        COMMIT,
        "    if (Status durable = make_marker_durable(); !durable) {\n      return make_error(Code::kUnknown,",
        "    if (Status durable = make_marker_durable(); !durable) {\n      return make_error(Code::kIo,",
        "*ErrorMatrix*",
    ),
    Mutant(
        "ranks_not_told",
        "commit 7",
        COMMIT,
        '    const Status told = board_.set(key("outcome"), encode_outcome(outcome_));',
        "    const Status told;",
        "*ErrorMatrix*",
    ),
    Mutant(
        "generations_directory_not_synced",
        "generation 1",
        GENERATION,
        '  UNBROKEN_TRY(store.sync_directory(""));\n  UNBROKEN_CRASH_POINT("generation.1',
        '  UNBROKEN_CRASH_POINT("generation.1',
        "Steps*",
    ),
    Mutant(
        "claim_replaces_another",
        "generation 2",
        GENERATION,
        "  const Status created = store.create_whole(path, bytes_of(document));",
        "  const Status created = store.publish(path, bytes_of(document));",
        "TwoStarts*",
    ),
    Mutant(
        "no_claim",
        "generation 2",
        RECOVERY,
        "  return claim_generation(store_, *claim_);",
        "  return store_.make_directory(kGenerationsDirectory);",
        "*Races*:TwoStarts*",
    ),
    Mutant(
        "claim_not_durable",
        "generation 3",
        GENERATION,
        '  UNBROKEN_TRY(store.sync_directory(kGenerationsDirectory));\n  UNBROKEN_CRASH_POINT("generation.3',
        '  UNBROKEN_CRASH_POINT("generation.3',
        "Steps*",
    ),
    Mutant(
        "no_record_before_the_load",
        "generation 4",
        RECOVERY,
        "  UNBROKEN_TRY(create_generation(store_, record));",
        "  static_cast<void>(&create_generation);",
        "*CrashMatrix*:*ErrorMatrix*",
    ),
    Mutant(
        "record_not_durable",
        "generation 5",
        GENERATION,
        '  UNBROKEN_TRY(store.sync_directory(kGenerationsDirectory));\n  UNBROKEN_CRASH_POINT("generation.5',
        '  UNBROKEN_CRASH_POINT("generation.5',
        "*CrashMatrix*",
    ),
    Mutant(
        "chooses_before_the_claim",
        "start 2",
        RECOVERY,
        '  UNBROKEN_CRASH_POINT("start.1.claimed");\n  UNBROKEN_ASSIGN(catalog, read_settled(deadline));  // S2',
        '  UNBROKEN_CRASH_POINT("start.1.claimed");',
        "*Races*",
    ),
    Mutant(
        "retired_not_looked_for",
        "start 2",
        CATALOG,
        "    if (in_force) set_state(info, AttemptState::kRetired,",
        "    if (in_force && false) set_state(info, AttemptState::kRetired,",
        "*Races*",
    ),
    Mutant(
        "choice_not_checked",
        "start 3",
        RECOVERY,
        "    if (info.state == AttemptState::kComplete) {\n      // A marker",
        "    if (true) {\n      // A marker",
        "Steps*",
    ),
    Mutant(
        "choice_not_durable",
        "start 3",
        RECOVERY,
        "      UNBROKEN_TRY(store_.sync_directory(info.name));\n      return choice;",
        "      return choice;",
        "Steps*",
    ),
    Mutant(
        "overtaken_start_goes_on",
        "start 4",
        RECOVERY,
        "  if (!numbers.empty() && numbers.back() > record.number) return overtaken_by(numbers.back());\n",
        "",
        "Steps*",
    ),
    Mutant(
        "ranks_not_told_what_was_chosen",
        "start 5",
        RECOVERY,
        '  UNBROKEN_TRY(board_.set(key("choice"), mine ? encode_start(*mine) : encode_error(mine.error())));',
        '  if (!mine) UNBROKEN_TRY(board_.set(key("choice"), encode_error(mine.error())));',
        "Invariant2*",
    ),
    Mutant(
        "what_stays_not_durable",
        "retention 0",
        RETENTION,
        "    UNBROKEN_TRY(store.sync_directory(info.name));\n    if (++counted",
        "    if (++counted",
        "Steps*",
    ),
    Mutant(
        "overtaken_life_condemns",
        "retention 0",
        RETENTION,
        '  UNBROKEN_TRY(check_fence(store, life));\n  UNBROKEN_CRASH_POINT("retention.0',
        '  UNBROKEN_CRASH_POINT("retention.0',
        "Steps*",
    ),
    Mutant(
        "nothing_is_condemned",
        "retention 1",
        RETENTION,
        '  UNBROKEN_TRY(condemn(store, life, name));\n  UNBROKEN_CRASH_POINT("retention.1',
        '  static_cast<void>(&condemn);\n  UNBROKEN_CRASH_POINT("retention.1',
        "*Races*:Steps*",
    ),
    Mutant(
        "no_look_before_the_removal",
        "retention 2",
        RETENTION,
        "  if (Status fence = check_fence(store, life); !fence) return pardon(",
        "  if (Status fence = Status(); !fence) return pardon(",
        "*Races*",
    ),
    Mutant(
        "nothing_is_pardoned",
        "retention 2",
        RETENTION,
        "  const Status removed = store.remove(path);",
        "  const Status removed = fence;",
        "Steps*",
    ),
    Mutant(
        "late_retired_counts",
        "retention 2",
        CATALOG,
        "    return entry.number > retirement->generation && entry.record &&",
        "    return false && entry.number > retirement->generation && entry.record &&",
        "*Races*",
    ),
    Mutant(
        "marker_not_removed_first",
        "retention 3",
        RETENTION,
        "  Status unmarked = store.remove(join_path(name, kMarkerName));",
        "  Status unmarked;",
        "Steps*",
    ),
    Mutant(
        "removal_of_the_marker_not_durable",
        "retention 3",
        RETENTION,
        '  UNBROKEN_TRY(store.sync_directory(name));\n  UNBROKEN_CRASH_POINT("retention.3',
        '  UNBROKEN_CRASH_POINT("retention.3',
        "Steps*",
    ),
    Mutant(
        "removal_not_durable",
        "retention 4",
        RETENTION,
        '  UNBROKEN_CRASH_POINT("retention.4.directory_removed");\n  return store.sync_directory("");',
        '  UNBROKEN_CRASH_POINT("retention.4.directory_removed");\n  return {};',
        "Steps*",
    ),
]


class MutantError(Exception):
    """The mutant could not be made: the source has changed, say."""


@dataclass(frozen=True)
class Build:
    """What is taken from a build directory."""

    directory: Path

    def compile_command(self, source: Path) -> list[str]:
        """The command that compiles the source with crash points, without its output."""
        for entry in json.loads((self.directory / "compile_commands.json").read_text()):
            if Path(entry["file"]) == source and "UNBROKEN_TESTING" in entry["command"]:
                words = shlex.split(entry["command"])
                while words[0] == "env" or "=" in words[0] or words[0].endswith("ccache"):
                    words.pop(0)
                output = words.index("-o")
                del words[output : output + 2]
                return [word for word in words if word not in ("-O2", "-O3", "-Werror", str(source))]
        raise MutantError(f"find how {source} is compiled: it is not in {self.directory}/compile_commands.json")

    def link_command(self, changed: Path, output: Path) -> list[str]:
        answer = subprocess.run(
            ["ninja", "-t", "commands", "-s", "tests/unbroken_crash_test"],
            cwd=self.directory,
            check=True,
            capture_output=True,
            text=True,
        )
        line = answer.stdout.strip().splitlines()[-1]
        words = shlex.split(line.removeprefix(": && ").removesuffix(" && :"))
        words[words.index("-o") + 1] = str(output)
        # Before the libraries, so that the original is not taken out of them.
        first = next(i for i, word in enumerate(words) if word.endswith(".o"))
        words.insert(first, str(changed))
        return words


def run(command: list[str], directory: Path, action: str) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    if done.returncode != 0:
        raise MutantError(f"{action}:\n{(done.stdout + done.stderr)[-3000:]}")


def make(mutant: Mutant, build: Build, scratch: Path) -> Path:
    """The crash tests with the broken engine."""
    source = SOURCES / "engine" / mutant.file
    broken = scratch / source.name
    broken.write_text(source.read_text().replace(mutant.original, mutant.broken))
    changed = scratch / (source.name + ".o")
    command = [*build.compile_command(source), "-O1", "-g0", "-w", "-o", str(changed)]
    run([*command, str(broken)], build.directory, f"compile {mutant.name}")
    program = scratch / "crash_test"
    run(build.link_command(changed, program), build.directory, f"link {mutant.name}")
    return program


def out_of_date() -> list[str]:
    """Mutants whose place is not found in the source any more. Looked for in all of them, whichever are run."""
    return [
        f"{mutant.name}: the text to change occurs {count} times in {mutant.file}, not once:\n{mutant.original}"
        for mutant in MUTANTS
        if (count := (SOURCES / "engine" / mutant.file).read_text().count(mutant.original)) != 1
    ]


def turns_red(program: Path, mutant: Mutant) -> tuple[bool, str]:
    """Whether a test failed, and which."""
    command = [str(program), f"--gtest_filter={mutant.tests}", "--gtest_fail_fast", "--gtest_brief=1"]
    environment = os.environ | {"UNBROKEN_CRASH": "full"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"nothing failed within {LIMIT_SECONDS} s"
    failed = [line.split("] ", 1)[1] for line in done.stdout.splitlines() if line.startswith("[  FAILED  ]")]
    if failed:
        return True, failed[0].split(",")[0].split(" (")[0]
    if done.returncode != 0:
        return False, f"ended with {done.returncode} without a failed test:\n{(done.stdout + done.stderr)[-2000:]}"
    return False, "all tests passed"


def choose(arguments: argparse.Namespace) -> list[Mutant]:
    if arguments.names:
        known = {mutant.name: mutant for mutant in MUTANTS}
        if unknown := set(arguments.names) - set(known):
            sys.exit(f"mutants: there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return [known[name] for name in arguments.names]
    if arguments.sample is None or os.environ.get("UNBROKEN_CRASH") == "full":
        return MUTANTS
    seed = int(os.environ.get("UNBROKEN_SEED") or random.randrange(2**32))
    print(f"UNBROKEN_SEED={seed}", flush=True)
    return random.Random(seed).sample(MUTANTS, min(arguments.sample, len(MUTANTS)))


def main() -> int:
    parser = argparse.ArgumentParser(description="test the crash matrix with broken engines")
    parser.add_argument("--build", type=Path, required=True, help="build directory with UNBROKEN_TESTS=ON")
    parser.add_argument("--sample", type=int, help="so many mutants; all with UNBROKEN_CRASH=full")
    parser.add_argument("names", nargs="*", help="mutants; all if none are named")
    arguments = parser.parse_args()
    if stale := out_of_date():
        print("\n".join(stale), file=sys.stderr)
        return 1
    build = Build(arguments.build.resolve())
    survived = 0
    for mutant in choose(arguments):
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="unbroken-mutant-") as scratch:
            try:
                red, why = turns_red(make(mutant, build, Path(scratch)), mutant)
            except MutantError as error:
                red, why = False, str(error)
        survived += not red
        seconds = time.monotonic() - begun
        print(
            f"{'red     ' if red else 'SURVIVED'} {mutant.step:13} {mutant.name}: {why} ({seconds:.0f} s)", flush=True
        )
    if survived:
        print(f"{survived} mutants survived: the crash matrix does not see these steps broken", file=sys.stderr)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
