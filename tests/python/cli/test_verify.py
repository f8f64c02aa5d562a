"""`unbroken verify` reads every byte, and names every file and range that is not what was written."""

import os
import pickle
import shutil

import pytest
from cli_roots import CHUNK, STEP_BYTES, Life, flip, reseal, run

FILES = ["manifest.json", ".metadata", "__0.json", "__0_0.distcp"]


def verdicts(answer):
    return {attempt["attempt"]: attempt["verdict"] for attempt in answer.json["attempts"]}


def test_the_newest_usable_one_is_verified_and_named(root, names):
    answer = run("verify", root)
    assert answer.code == 0
    assert answer.out.startswith(f"{names['40']}  verified")
    assert f"newest usable: step 40 ({names['40']})" in answer.err
    document = run("verify", root, "--json").json
    assert document["ok"] is True
    assert document["attempts"][0]["verified_bytes"] == (root / names["40"] / "__0_0.distcp").stat().st_size


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_flipped_bit_in_any_file_is_found_and_named(root, names, file, place):
    path = root / names["40"] / file
    size = path.stat().st_size
    flip(path, {"first": 0, "middle": size // 2, "last": size - 1}[place])
    answer = run("verify", root, names["40"])
    assert answer.code == 1
    assert answer.out.startswith(f"{names['40']}  damaged")
    assert f"  {file}: " in answer.out
    assert answer.hints()
    problems = run("verify", root, names["40"], "--json").json["attempts"][0]["problems"]
    assert [problem["file"] for problem in problems] == [file]


def test_all_damaged_ranges_are_named_with_their_offsets(root, names):
    path = root / names["40"] / "__0_0.distcp"
    flip(path, 5)
    flip(path, STEP_BYTES - 5)
    flip(root / names["40"] / ".metadata", 3)
    problems = run("verify", root, "--step", "40", "--json").json["attempts"][0]["problems"]
    assert [(p["file"], p["begin"], p["end"]) for p in problems] == [
        (".metadata", None, None),
        ("__0_0.distcp", 0, CHUNK),
        ("__0_0.distcp", 2 * CHUNK, path.stat().st_size),
    ]
    flip(path, CHUNK)
    assert f"bytes 0 to {path.stat().st_size} are not what was written" in run("verify", root, names["40"]).out


@pytest.mark.parametrize("file", ["manifest.json", "__0.json", "__0_0.distcp"])
@pytest.mark.parametrize("harm", ["missing", "empty", "short", "long"])
def test_a_file_of_the_wrong_length_is_found(root, names, file, harm):
    path = root / names["40"] / file
    size = path.stat().st_size
    if harm == "missing":
        path.unlink()
    else:
        os.truncate(path, {"empty": 0, "short": size - 1, "long": size + 1}[harm])
    answer = run("verify", root, names["40"])
    assert answer.code == 1
    assert "damaged" in answer.out
    assert file in answer.out


def test_damage_that_lengths_do_not_show_counts_for_the_newest(root, names):
    flip(root / names["40"] / "__0_0.distcp", CHUNK + 1)
    answer = run("verify", root)
    assert answer.code == 1
    assert f"bytes {CHUNK} to {2 * CHUNK}" in answer.out


def test_all_verifies_every_attempt_and_one_bad_one_fails_it(root, names):
    assert run("verify", root, "--all").code == 0
    flip(root / names["10"] / "__0_0.distcp", 7)
    answer = run("verify", root, "--all", "--json")
    assert answer.code == 1
    assert verdicts(answer) == {name: "damaged" if name == names["10"] else "verified" for name in names.values()}
    assert "4 verified, 1 damaged" in answer.err


def test_what_was_never_committed_fails_only_when_it_was_asked_for(root, names):
    (root / names["10"] / ".metadata").unlink()
    assert run("verify", root, "--all").code == 0
    answer = run("verify", root, names["10"])
    assert answer.code == 1
    assert "not verified" in answer.out


def test_a_newer_format_is_never_called_verified(root, names):
    reseal(root / names["40"] / "manifest.json", lambda body: body.update(format=99))
    for arguments in ([names["40"]], ["--all"], ["--step", "40"]):
        answer = run("verify", root, *arguments)
        assert answer.code == 1
        assert f"{names['40']}  not verified" in answer.out


def test_an_orphan_is_verified_and_said_to_be_one(root, names):
    answer = run("verify", root, names["30"])
    assert answer.code == 0
    assert "orphan" in answer.err


def test_a_step_is_that_of_the_branch(root, names):
    twin = Life(root, step=20).settle().save(30)
    answer = run("verify", root, "--step", "30")
    assert answer.out.startswith(twin)
    assert twin != names["30"]


def test_a_usable_attempt_of_a_step_goes_before_a_newer_damaged_one(root, names):
    again = Life(root).settle().save(40, size=1000)
    assert run("verify", root, "--step", "40").out.startswith(again)
    (root / again / "__0_0.distcp").unlink()
    assert run("verify", root, "--step", "40").out.startswith(f"{names['40']}  verified")


def test_a_renamed_directory_is_damaged_although_each_file_is_right(root, names):
    (root / names["40"]).rename(root / "step-50-g3-00000000")
    answer = run("verify", root, "step-50-g3-00000000")
    assert answer.code == 1
    assert "damaged" in answer.out
    assert names["40"] in answer.out


@pytest.mark.parametrize("form", ["absolute", "slash", "dot", "link", "url", "with root"])
def test_the_directory_of_an_attempt_can_be_named_itself(root, names, tmp_path, form):
    directory = root / names["40"]
    (tmp_path / "latest").symlink_to(directory)
    arguments = {
        "absolute": [directory],
        "slash": [f"{directory}/"],
        "dot": ["."],
        "link": [tmp_path / "latest"],
        "url": [f"file://{directory}"],
        "with root": [root, f"{directory}/"],
    }[form]
    answer = run("verify", *arguments, cwd=directory if form == "dot" else tmp_path)
    assert answer.code == 0
    assert answer.out.startswith(f"{names['40']}  verified")


def test_an_attempt_outside_of_a_root_is_verified_by_its_manifest(root, names, tmp_path):
    copy = shutil.copytree(root / names["40"], tmp_path / "backup" / names["40"])
    assert run("verify", copy).code == 0
    flip(copy / "__0_0.distcp", 0)
    assert run("verify", copy).code == 1


def test_of_a_foreign_checkpoint_it_says_what_can_be_said(root):
    (root / "stock").mkdir()
    (root / "stock" / ".metadata").write_bytes(pickle.dumps({}))
    answer = run("verify", root / "stock")
    assert answer.code == 1
    assert "not verified" in answer.out
    assert "no checksums" in answer.out
    assert run("verify", root, "--all").code == 0


def test_nothing_to_verify_is_a_failed_check(root, names):
    for arguments in (["step-7-g1-00000000"], ["--step", "7"]):
        answer = run("verify", root, *arguments)
        assert answer.code == 1
        assert answer.hints()
    for name in names.values():
        (root / name / ".metadata").unlink()
    answer = run("verify", root)
    assert answer.code == 1
    assert "no checkpoint in it is usable" in answer.err
    assert names["40"] in answer.err


@pytest.mark.parametrize("name", ["..", "../run", "/etc", "a/b"])
def test_an_attempt_is_one_directory_of_the_root(root, name):
    answer = run("verify", root, name)
    assert answer.code == 2
    assert answer.hints()


def test_a_link_in_place_of_a_shard_is_not_followed(root, names, tmp_path):
    shard = root / names["40"] / "__0_0.distcp"
    shutil.move(shard, tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    answer = run("verify", root, names["40"])
    assert answer.code == 1
    assert "__0_0.distcp" in answer.out


def test_a_manifest_that_points_outside_is_refused(root, names):
    """Resealed as an attacker would, parts and root alike."""
    directory = root / names["40"]
    reseal(directory / "__0.json", lambda body: body["files"][0].update(name="../../secret"))
    answer = run("verify", root, names["40"])
    assert answer.code == 1
    assert "__0.json" in answer.out
