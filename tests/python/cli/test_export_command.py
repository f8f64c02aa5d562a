"""`unbroken export`: how the command hands over to Python, and what that says. The weights: tests/python/export."""

import contextlib
import io
import json
import os
import pathlib
import pty
import re
import shutil
import subprocess
import sys

import pytest
import torch
from cli_roots import Answer, binary, flip, run
from safetensors.torch import load_file

import unbroken
from unbroken.__main__ import main

MANUAL = pathlib.Path(__file__).parents[3] / "docs" / "cli.md"
SEARCH_PATH = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"


def export(*arguments, cwd="."):
    """The Python part by itself: for each command a new Python would import torch for seconds."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd):
        try:
            code = main(["export", *map(str, arguments)])
        except SystemExit as left:
            code = left.code or 0
    return Answer(code, out.getvalue(), err.getvalue())


def command(*arguments, **options):
    """The whole command. Where it is not installed beside this Python, it is to find this one all the same."""
    return run("export", *arguments, env={"PATH": SEARCH_PATH}, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved") / "run"
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 3))
    state = {"model": model, "ema": {"w": torch.ones(3)}, "optim": torch.optim.SGD(model.parameters(), momentum=0.9)}
    with unbroken.Checkpointer(root, state, keep=None, signals=False) as life:
        life.resume()
        for _ in range(2):
            life.step()
            life.save().wait()
    return root, model.state_dict()


@pytest.fixture
def root(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved[0], tmp_path / "run"))


def test_it_writes_what_it_says(root, saved, tmp_path):
    answer = command(root, tmp_path / "out", "--json")
    assert answer.code == 0
    assert answer.err == ""
    document = answer.json
    assert document["step"] == 2
    assert document["checkpoint"].startswith("step-2-")
    assert document["dry_run"] is False
    assert document["tensors"] == 4
    assert document["total_size"] == sum(tensor.nbytes for tensor in saved[1].values())
    assert (document["index"], document["skipped"]) == (None, [])
    assert document["files"] == [
        {"file": "model.safetensors", "bytes": (tmp_path / "out" / "model.safetensors").stat().st_size, "tensors": 4}
    ]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[key], value) for key, value in saved[1].items())


def test_it_says_in_words_what_it_wrote(root, tmp_path):
    answer = export(root, tmp_path / "out", "--max-shard-size", "100KB")
    assert answer.code == 0
    assert re.match(r"model-00001-of-00002\.safetensors +234\.\d KiB  1 tensors\n", answer.out)
    assert answer.out.endswith("model.safetensors.index.json\n")
    assert answer.err.endswith(": written\n")
    assert sorted(os.listdir(tmp_path / "out")) == re.findall(r"^model\S+", answer.out, re.MULTILINE)


def test_a_dry_run_says_the_same_and_writes_nothing(root, tmp_path):
    before = sorted(map(str, tmp_path.rglob("*")))
    dry = export(root, tmp_path / "out", "--dry-run", "--json", "--max-shard-size", "100KB")
    assert dry.code == 0
    assert sorted(map(str, tmp_path.rglob("*"))) == before
    wet = export(root, tmp_path / "out", "--json", "--max-shard-size", "100KB")
    assert {**wet.json, "dry_run": True} == dry.json
    for one in wet.json["files"]:
        assert (tmp_path / "out" / one["file"]).stat().st_size == one["bytes"]
    refused = export(root, tmp_path / "out", "--dry-run")
    assert refused.code == 3
    assert "would be written" in export(root, tmp_path / "out", "--dry-run", "--force").err


def test_what_it_took_and_from_where(root, tmp_path):
    assert export(root, tmp_path / "first", "--step", "1", "--json").json["step"] == 1
    attempt = next(root.glob("step-1-*"))
    assert export(attempt, tmp_path / "named", "--json").json["checkpoint"] == str(attempt)
    assert export(f"file://{root}", tmp_path / "url", "--json").code == 0
    assert export(root, tmp_path / "ema", "--key", "ema", "--json").json["tensors"] == 1
    everything = export(root, tmp_path / "all", "--key", "", "--json")
    assert everything.json["tensors"] == 5
    assert any(name.startswith("optim.param_groups") for name in everything.json["skipped"])
    assert "skipped, as no weights" in everything.err


def test_force_replaces(root, tmp_path):
    assert export(root, tmp_path / "out").code == 0
    answer = export(root, tmp_path / "out")
    assert answer.code == 3
    assert answer.out == ""
    assert "--force" in answer.hints()[0]
    assert export(root, tmp_path / "out", "--force").code == 0


def test_damage_is_code_1_with_a_hint_and_nothing_is_written(root, tmp_path):
    for shard in next(root.glob("step-2-*")).glob("*.distcp"):
        flip(shard, 3000)
    answer = export(root, tmp_path / "out")
    assert answer.code == 1
    assert "are not what was written" in answer.err
    assert "--step" in answer.hints()[0]
    assert not (tmp_path / "out").exists()
    assert export(root, tmp_path / "out", "--step", "1").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([], 2, "required"),
        (["run"], 2, "OUT"),
        (["run", "out", "--nonsense"], 2, "--nonsense"),
        (["run", "out", "more"], 2, "more"),
        (["run", "out", "--step", "-1"], 2, "not a step"),
        (["run", "out", "--step", "1.5"], 2, "not a step"),
        (["run", "out", "--st", "1"], 2, "--st"),
        (["run", "out", "--max-shard-size", "5 parsecs"], 2, "5 parsecs"),
        (["run", "out", "--key", "mdel"], 2, "'model', 'ema', or ''"),
        (["run", "model.safetensors"], 2, "give a directory"),
        (["run", "out", "--step", "9"], 1, "of step 9"),
        (["empty", "out"], 1, "no checkpoint"),
        (["absent", "out"], 3, "absent"),
        (["file", "out"], 3, "file"),
        (["s4://bucket", "out"], 3, "s4"),
        (["", "out"], 3, ""),
        (["run", "file/out"], 2, "Not a directory"),
    ],
)
def test_what_is_wrong_is_said_with_its_code(root, tmp_path, arguments, code, word):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    answer = export(*arguments, cwd=tmp_path)
    assert answer.code == code, answer.err
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert word in answer.err
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_code_3(root):
    answer = export(root, "/proc/unbroken/out")
    assert answer.code == 3
    assert "/proc/unbroken" in answer.err


def test_hostile_names_do_not_reach_the_terminal(tmp_path):
    names = ["\x1b[2J", "a\nhint: rm -rf x", "\u202egnp.exe", "\u009b31m"]
    state = {"model": {name: torch.ones(1, dtype=torch.complex128) for name in names}}
    with unbroken.Checkpointer(tmp_path / "run", state, signals=False) as life:
        life.resume()
        life.step()
        life.save().wait()
    for arguments in (["--key", "model"], ["--key", "\x1b[2J\n"], ["--dry-run", "--json"]):
        answer = export(tmp_path / "run", tmp_path / "out", *arguments)
        assert answer.code in (1, 2)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e]", answer.out + answer.err)
        assert "\nhint: rm" not in answer.err


def test_help_is_that_of_python_and_the_manual_has_its_options():
    answer = command("--help")
    assert answer.code == 0
    assert "unbroken export runs/7" in answer.out
    assert answer.err == ""
    options = set(re.findall(r"--[a-z-]+", answer.out)) - {"--help"}
    manual = MANUAL.read_text()
    assert all(option in manual for option in options)
    assert "export" in run("--help").out


def test_python_m_is_the_same(root, tmp_path):
    arguments = [sys.executable, "-m", "unbroken", "export", root, tmp_path / "out", "--dry-run", "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == export(root, tmp_path / "out", "--dry-run", "--json").json
    other = subprocess.run([sys.executable, "-m", "unbroken", "ls"], capture_output=True, text=True, check=False)
    assert other.returncode == 2
    assert other.stderr.startswith("error: ")


# --- which Python ----------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    """The command in a directory of its own, with no Python beside it."""
    (tmp_path / "bin").mkdir()
    return pathlib.Path(shutil.copy(binary(), tmp_path / "bin" / "unbroken"))


def call(command, *arguments, **env):
    done = subprocess.run(
        [command, "export", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={key: value for key, value in {**os.environ, **env}.items() if value is not None},
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("name", ["python3", "python"])
def test_the_python_beside_the_command_comes_first(root, tmp_path, alone, name):
    beside = alone.parent / name
    beside.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    beside.chmod(0o755)
    answer = call(alone, root, tmp_path / "out", PATH="/nowhere:/bin")
    assert answer.code == 0, answer.err
    through_a_link = tmp_path / "linked"
    through_a_link.symlink_to(alone)
    assert call(through_a_link, root, tmp_path / "out", "--force", PATH="/nowhere:/bin").code == 0


def test_then_that_of_the_search_path(root, tmp_path, alone):
    assert call(alone, root, tmp_path / "out", PATH=SEARCH_PATH).code == 0


def test_without_python_it_says_what_is_needed(tmp_path, alone):
    answer = call(alone, tmp_path, tmp_path / "out", PATH="/nowhere")
    assert answer.code == 3
    assert "start python3: No such file" in answer.err
    assert "pip install unbroken" in answer.hints()[0]


def test_a_python_without_the_package_is_named_with_the_remedy(tmp_path, alone):
    beside = alone.parent / "python3"
    beside.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # -S: without what is installed
    beside.chmod(0o755)
    answer = call(alone, tmp_path, tmp_path / "out")
    assert answer.code == 3
    assert "cannot import" in answer.err
    assert sys.executable in answer.err or "python" in answer.err
    assert "pip install unbroken" in answer.hints()[0]


def test_modules_that_lie_about_are_not_taken(root, tmp_path):
    for name in ("unbroken", "torch", "json", "argparse"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file that lay about was run')")
    answer = command("run", "out", cwd=tmp_path)
    assert answer.code == 0, answer.err


# --- terminals and streams -------------------------------------------------------------------------------------------


def test_progress_is_shown_on_a_terminal_only(tmp_path):
    state = {"model": {f"w{i}": torch.zeros(8 << 20) for i in range(4)}}
    with unbroken.Checkpointer(tmp_path / "run", state, signals=False) as life:
        life.resume()
        life.step()
        life.save().wait()
    primary, secondary = pty.openpty()
    with subprocess.Popen(
        [binary(), "export", tmp_path / "run", tmp_path / "out"],
        env={**os.environ, "PATH": SEARCH_PATH, "TERM": "xterm"},
        stdout=subprocess.DEVNULL,
        stderr=secondary,
    ):
        os.close(secondary)
        text = b""
        while True:
            try:
                text += os.read(primary, 4096)
            except OSError:  # the other end is closed
                break
    os.close(primary)
    assert b"% of 128.0 MiB" in text
    assert "% of" not in export(tmp_path / "run", tmp_path / "out", "--force").err


def test_output_that_does_not_get_through_is_an_error(root, tmp_path):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [binary(), "export", root, tmp_path / "out"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PATH": SEARCH_PATH},
        )
    assert done.returncode == 3
    assert "standard output" in done.stderr
