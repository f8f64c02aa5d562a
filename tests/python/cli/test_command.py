"""The command line itself: help, exit codes, hints, streams, colour, hostile names, roots that cannot be read."""

import json
import os
import pathlib
import pty
import re
import shutil
import subprocess

import pytest
from cli_roots import Answer, binary, reseal, run

import unbroken

COMMANDS = ["ls", "verify", "why"]
MANUAL = pathlib.Path(__file__).parents[3] / "docs" / "cli.md"
NOBODY = 65534


def on_a_terminal(*arguments, stream="stdout", **env):
    """What the command writes to a terminal at `stream`."""
    primary, secondary = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    with subprocess.Popen(
        [binary(), *map(str, arguments)],
        env={**environment, "TERM": "xterm", **env},
        **{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: secondary},
    ):
        os.close(secondary)
        text = b""
        while True:
            try:
                text += os.read(primary, 4096)
            except OSError:  # the other end is closed
                break
    os.close(primary)
    return text.decode()


def test_version_is_that_of_the_package():
    answer = run("--version")
    assert answer.code == 0
    assert answer.out == f"unbroken {unbroken.__version__}\n"


@pytest.mark.parametrize("command", [[], *([c] for c in COMMANDS)])
def test_help_has_examples(command):
    answer = run(*command, "--help")
    assert answer.code == 0
    assert "Example" in answer.out
    assert f"unbroken {command[0] if command else 'ls'} runs/7" in answer.out
    assert answer.err == ""


def test_help_and_manual_give_the_same_exit_codes():
    manual = MANUAL.read_text()
    in_help = dict(re.findall(r"^  (\d)  (.+)$", run("--help").out, re.MULTILINE))
    in_manual = dict(re.findall(r"^\| (\d) \| (.+) \|$", manual, re.MULTILINE))
    assert list(in_help) == ["0", "1", "2", "3"]
    assert in_manual == in_help


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["lss"],
        ["ls"],
        ["ls", "a", "b"],
        ["ls", "--nonsense", "."],
        ["verify", ".", "--step", "-1"],
        ["verify", ".", "--step", "1.5"],
        ["verify", ".", "--step", "99999999999999999999"],
        ["verify", ".", "x", "--all"],
        ["verify", ".", "--step", "1", "--all"],
    ],
)
def test_a_wrong_command_line_is_code_2_with_a_hint(arguments):
    answer = run(*arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert "--help" in answer.hints()[0]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["absent", "file", "empty", "unrelated", "scheme", "nothing"])
def test_a_root_that_is_none_is_code_3(command, kind, tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unrelated" / "photos").mkdir(parents=True)
    root = {"scheme": "s4://bucket/run", "nothing": ""}.get(kind, tmp_path / kind)
    answer = run(command, root)
    assert answer.code == 3
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert str(root) in answer.err
    if kind == "scheme":
        assert "file:///path" in answer.err
    else:
        assert answer.hints()


def test_a_hint_names_the_roots_below(root):
    answer = run("ls", root.parent)
    assert answer.code == 3
    assert f"there are run roots in it: {root}" in answer.err


@pytest.mark.parametrize("command", ["ls", "why"])
def test_a_hint_names_the_root_of_an_attempt(command, root, names):
    answer = run(command, root / names["40"])
    assert answer.code == 3
    assert f"unbroken ls {root}" in answer.err


def run_as_another(directory, *arguments):
    """As a user who owns nothing there; as ourselves where we are not root."""
    if os.geteuid() != 0:
        return run(*arguments)
    command = shutil.copy(binary(), directory / "unbroken-command")
    os.chmod(command, 0o755)
    done = subprocess.run(
        [command, *map(str, arguments)],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def reachable(root, open_directory):
    return shutil.copytree(root, open_directory / "run")


def test_reading_needs_no_right_to_write(reachable, open_directory):
    for path in [*reachable.rglob("*"), reachable]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for command in COMMANDS:
        assert run_as_another(open_directory, command, reachable).code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_root_without_permission_is_code_3_with_a_hint(command, reachable, open_directory):
    reachable.chmod(0)
    answer = run_as_another(open_directory, command, reachable)
    reachable.chmod(0o755)
    assert answer.code == 3
    assert "Permission denied" in answer.err
    assert answer.hints()


def test_an_attempt_without_permission_hides_no_other(reachable, open_directory, names):
    (reachable / names["25"]).chmod(0)
    listed = run_as_another(open_directory, "ls", reachable)
    told = run_as_another(open_directory, "why", reachable)
    checked = run_as_another(open_directory, "verify", reachable, "--all")
    (reachable / names["25"]).chmod(0o755)
    assert "unreadable" in listed.rows()[names["25"]]
    assert "complete" in listed.rows()[names["40"]]
    assert "a start now would stop with an error" in told.out
    assert f"{names['25']}  unreadable" in checked.out
    assert f"{names['10']}  verified" in checked.out
    for answer in (listed, told, checked):
        assert answer.code == 3
        assert "Permission denied" in answer.err + answer.out


def test_a_shard_without_permission_is_not_called_damaged(reachable, open_directory, names):
    shard = reachable / names["40"] / "__0_0.distcp"
    shard.chmod(0)
    answer = run_as_another(open_directory, "verify", reachable)
    shard.chmod(0o644)
    assert answer.code == 3
    assert f"{names['40']}  unreadable" in answer.out
    assert "damaged" not in answer.out


def test_a_directory_of_someone_else_beside_the_attempts_is_no_matter(reachable, open_directory):
    (reachable / "lost+found").mkdir(mode=0o700)
    assert run_as_another(open_directory, "ls", reachable).code == 0
    (reachable / "lost+found").chmod(0)


HOSTILE = [
    "step-50-g3-\x1b[2J\x1b[31mred",
    "step-50-g3-a\nhint: rm -rf x",
    "step-50-g3-\r\x08\x7f",
    "step-50-g3-\u202egnp.exe",
    "step-50-g3-\u009b31m",
    "step-50-g3-\udcff\udcfe",
    "\x1b]0;title\x07",
]


def assert_harmless(text):
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f]", text)
    assert "\nhint: rm" not in text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_do_not_reach_the_terminal(root, name):
    directory = root / name
    directory.mkdir()
    (directory / ".metadata").touch()
    (directory / "manifest.json").touch()
    for arguments in (
        ["ls", root],
        ["verify", root, "--all"],
        ["verify", root, name],
        ["verify", directory],
        ["why", root],
    ):
        for form in ([], ["--json"]):
            answer = run(*arguments, *form)
            assert_harmless(answer.out)
            assert_harmless(answer.err)
    answer = run("ls", root / (name + "-absent"))
    assert answer.code == 3
    assert_harmless(answer.err)
    answer = run(name)
    assert answer.code == 2
    assert_harmless(answer.err)


def test_hostile_texts_in_records_do_not_reach_the_terminal(root):
    def poison(body):
        body["host"] = "\x1b[2Jnode"
        body["refused"] = [{"attempt": "a\nhint: rm -rf /", "reason": "\u202e\x07\r"}]
        body["time_ms"] = 2**63 - 1

    reseal(root / "generations" / "000003.json", poison)
    answer = run("why", root)
    assert answer.code == 0
    assert_harmless(answer.out)
    assert "\\x1b[2Jnode" in answer.out
    assert_harmless(run("why", root, "--json").out)


def test_json_survives_hostile_names(root):
    for name in HOSTILE:
        (root / name).mkdir()
        (root / name / ".metadata").touch()
    listed = {attempt["attempt"] for attempt in run("ls", root, "--json").json["attempts"]}
    assert {os.fsencode(name).decode(errors="replace") for name in HOSTILE} <= listed


def test_times_beyond_reason_do_no_harm(root, names):
    for time_ms in (-(2**63), 2**63 - 1, 0):
        reseal(root / names["40"] / "manifest.json", lambda body, time_ms=time_ms: body.update(time_ms=time_ms))
        answer = run("ls", root)
        assert answer.code == 0
        assert "complete" in answer.rows()[names["40"]]


def test_colour_is_on_a_terminal_only_and_never_the_only_sign(root, names):
    coloured = on_a_terminal("ls", root)
    plain = re.sub(r"\x1b\[\d+m", "", coloured)
    assert "\x1b[32mcomplete\x1b[0m" in coloured
    assert plain == on_a_terminal("ls", root, NO_COLOR="1") == on_a_terminal("ls", root, TERM="dumb")
    assert "\x1b" not in plain
    assert plain.replace("\r\n", "\n") == run("ls", root).out
    assert "\x1b[32mcomplete" in on_a_terminal("ls", root, NO_COLOR="")


def test_json_is_never_coloured(root):
    assert json.loads(on_a_terminal("ls", root, "--json"))["newest_usable"]


def test_progress_is_shown_on_a_terminal_only(root):
    assert "% of" in on_a_terminal("verify", root, stream="stderr")
    assert "% of" not in run("verify", root).err


def test_output_that_does_not_get_through_is_an_error(root):
    with open("/dev/full", "wb") as full:
        done = subprocess.run([binary(), "ls", root], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert "standard output" in done.stderr


def test_a_relative_root_and_a_url_are_the_same_root(root, names):
    relative = run("ls", root.name, "--json", cwd=root.parent)
    assert relative.json == run("ls", f"file://{root}", "--json").json == run("ls", f"{root}/", "--json").json
