"""`unbroken ls` shows every attempt with its true state, and the one that a start would take."""

import os
import pickle
import shutil

import pytest
from cli_roots import Life, flip, reseal, run, snapshot

from unbroken import _engine


def states(root):
    return {attempt["attempt"]: attempt["state"] for attempt in run("ls", root, "--json").json["attempts"]}


def test_attempts_are_listed_newest_first_with_their_states(root, names):
    answer = run("ls", root)
    assert answer.code == 0
    rows = answer.rows()
    assert list(rows) == [names[step] for step in ("40", "30", "25", "20", "10")]
    assert rows[names["40"]].startswith("*")
    assert all(not line.startswith("*") for name, line in rows.items() if name != names["40"])
    assert "orphan" in rows[names["30"]]
    assert "generation 2 went on from step 20" in rows[names["30"]]
    assert all("complete" in rows[names[step]] for step in ("40", "25", "20", "10"))
    assert "8.6 MiB" in rows[names["40"]]
    assert f"newest usable: step 40 ({names['40']})" in answer.err
    assert "4 complete, 1 orphan" in answer.err


def test_json_gives_exact_numbers(root, names):
    document = run("ls", root, "--json").json
    assert document["root"] == str(root)
    assert document["newest_usable"] == names["40"]
    newest = document["attempts"][0]
    directory = root / names["40"]
    assert newest["attempt"] == names["40"]
    assert (newest["step"], newest["generation"], newest["sequence"]) == (40, 3, 1)
    assert newest["bytes"] == sum(path.stat().st_size for path in directory.iterdir())
    assert newest["files"] == len(list(directory.iterdir()))
    assert newest["world_size"] == 1
    assert newest["run_id"] == document["run_id"]
    assert abs(newest["time_ms"] / 1000 - (directory / ".metadata").stat().st_mtime) < 60
    assert newest["parent"] == names["25"]


def test_the_newest_usable_is_the_one_that_loading_takes(root, names):
    flip(root / names["40"] / "manifest.json", 100)
    shutil.rmtree(root / names["25"])
    taken = _engine.find_attempt(_engine.open_store(str(root)))
    assert run("ls", root, "--json").json["newest_usable"] == taken == names["20"]


@pytest.mark.parametrize("file", ["manifest.json", ".metadata", "__0.json"])
def test_a_flipped_bit_in_what_ls_reads_is_damage(root, names, file):
    flip(root / names["40"] / file, 15)
    row = run("ls", root).rows()[names["40"]]
    assert "damaged" in row
    assert file in row


@pytest.mark.parametrize("file", ["manifest.json", "__0.json", "__0_0.distcp"])
def test_a_missing_file_is_damage(root, names, file):
    (root / names["40"] / file).unlink()
    row = run("ls", root).rows()[names["40"]]
    assert "damaged" in row
    assert file in row


@pytest.mark.parametrize("file", ["manifest.json", "__0.json", "__0_0.distcp"])
@pytest.mark.parametrize("cut", ["by one byte", "to nothing"])
def test_a_file_that_is_cut_off_is_damage(root, names, file, cut):
    path = root / names["40"] / file
    os.truncate(path, 0 if cut == "to nothing" else path.stat().st_size - 1)
    assert states(root)[names["40"]] == "damaged"


@pytest.mark.parametrize("cut", ["by one byte", "to nothing", "removed"])
def test_without_a_whole_marker_nothing_was_committed(root, names, cut):
    path = root / names["40"] / ".metadata"
    if cut == "removed":
        path.unlink()
    else:
        os.truncate(path, 0 if cut == "to nothing" else path.stat().st_size - 1)
    answer = run("ls", root)
    assert "incomplete" in answer.rows()[names["40"]]
    assert answer.rows()[names["25"]].startswith("*")


def test_a_save_that_may_be_under_way_is_not_called_dead(root, names):
    for step in ("40", "10"):
        (root / names[step] / ".metadata").unlink()
    rows = run("ls", root).rows()
    assert "still under way" in rows[names["40"]]
    assert "still under way" not in rows[names["10"]]


def test_a_renamed_directory_is_damage_that_says_so(root, names):
    (root / names["40"]).rename(root / "step-50-g3-00000000")
    row = run("ls", root).rows()["step-50-g3-00000000"]
    assert "damaged" in row
    assert names["40"] in row
    assert "renamed" in row


def test_a_newer_format_is_unsupported_and_not_damage(root, names):
    reseal(root / names["40"] / "manifest.json", lambda body: body.update(format=99))
    answer = run("ls", root)
    assert "unsupported" in answer.rows()[names["40"]]


def test_a_record_of_a_newer_format_ends_the_listing_with_what_to_do(root):
    reseal(root / "generations" / "000002.json", lambda body: body.update(format=99))
    answer = run("ls", root)
    assert answer.code == 3
    assert "generations/000002.json" in answer.err
    assert "newer" in answer.hints()[0]


def test_retired_beats_a_marker(root, names):
    (root / names["25"] / "retired").touch()
    assert "retired" in run("ls", root).rows()[names["25"]]


def test_a_checkpoint_that_a_life_refused_is_not_usable(root, names):
    Life(root).settle("damaged", "bytes 0 to 4 differ")
    answer = run("ls", root)
    row = answer.rows()[names["40"]]
    assert "refused by generation 5: rank 0: bytes 0 to 4 differ" in row
    assert "orphan" in row
    assert answer.rows()[names["25"]].startswith("*")


def test_a_foreign_checkpoint_comes_last_and_other_directories_not_at_all(root, names):
    (root / "stock").mkdir()
    (root / "stock" / ".metadata").write_bytes(pickle.dumps({}))
    (root / "logs").mkdir()
    (root / "logs" / "events").touch()
    attempts = run("ls", root, "--json").json["attempts"]
    assert [attempt["attempt"] for attempt in attempts] == [
        *(names[s] for s in ("40", "30", "25", "20", "10")),
        "stock",
    ]
    assert attempts[-1]["state"] == "foreign"
    assert attempts[-1]["step"] is None
    assert run("ls", root, "--json").json["newest_usable"] == names["40"]


def test_only_the_newest_thirty_unless_all_are_asked_for(tmp_path):
    life = Life(tmp_path / "run").settle()
    saved = [life.save(step, size=1000) for step in range(1, 34)]
    short = run("ls", tmp_path / "run")
    assert list(short.rows()) == saved[:-31:-1]
    assert "3 older ones are not shown; --all" in short.err
    assert list(run("ls", tmp_path / "run", "--all").rows()) == saved[::-1]
    assert len(run("ls", tmp_path / "run", "--json").json["attempts"]) == 33


def test_a_run_that_has_not_saved_yet(tmp_path):
    Life(tmp_path / "run").settle()
    answer = run("ls", tmp_path / "run")
    assert (answer.code, answer.out) == (0, "")
    assert "no checkpoint is here yet" in answer.err
    assert run("ls", tmp_path / "run", "--json").json["attempts"] == []


def test_nothing_is_written_by_any_command(root, names):
    flip(root / names["10"] / "__0_0.distcp", 0)
    before = snapshot(root)
    for command in (["ls"], ["ls", "--all"], ["verify"], ["verify", "--all"], ["why"]):
        for form in ([], ["--json"]):
            run(command[0], root, *command[1:], *form)
    assert snapshot(root) == before
