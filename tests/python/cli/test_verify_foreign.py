"""`unbroken verify` on checkpoints that no run owns: stock DCP's, those of the drop-ins, of ranks that saved alone."""

import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_roots import CHUNK, flip, run

import unbroken
from unbroken import _engine

STATE = {"w": torch.ones(3_000_000), "b": torch.zeros(5), "note": "a text"}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def only(answer):
    (attempt,) = answer.json["attempts"]
    return attempt


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("foreign")
    dcp.save(STATE, checkpoint_id=directory / "stock", no_dist=True)
    dcp.save(STATE, storage_writer=unbroken.UnbrokenWriter(directory / "drop-in"), no_dist=True)
    for name, options in (
        ("alone", {"storage_writer": unbroken.UnbrokenWriter(directory / "alone")}),
        ("stock-alone", {"checkpoint_id": directory / "stock-alone"}),
    ):
        dcp.save(STATE, no_dist=True, use_collectives=False, **options)
        assert (directory / name / "__0.metadata").exists()
    return directory


@pytest.fixture
def place(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "saved")


def save_alone(directory, rank, ranks):
    """What a drop-in does on one of several ranks with use_collectives=False."""
    store = _engine.open_store(str(directory), create=True)
    _engine.prepare_plain(store, overwrite=False, only_rank=rank)
    builder = _engine.ImageBuilder(rank)
    builder.add_tensor(b"head", 5_000_000, b"tail")
    _engine.write_plain_rank(store, builder.build())
    _engine.commit_plain(store, b"what DCP would pickle", world_size=ranks, only_rank=rank)


# --- stock DCP -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "marker"), [("stock", ".metadata"), ("stock-alone", "__0.metadata")])
def test_of_stock_it_says_what_it_looked_at_and_what_not(place, name, marker):
    answer = run("verify", place / name)
    assert answer.code == 1
    assert f"its marker {marker} is there and no file is cut off, shard files: 1 of 11.4 MiB" in answer.out
    assert "no checksums" in answer.out
    assert "a pickle, is not opened" in answer.out
    attempt = only(run("verify", place / name, "--json"))
    assert (attempt["verdict"], attempt["state"], attempt["problems"]) == ("not verified", "foreign", [])
    assert attempt["verified_bytes"] == 0


@pytest.mark.parametrize(("name", "marker"), [("stock", ".metadata"), ("stock-alone", "__0.metadata")])
@pytest.mark.parametrize("left", ["none", "half", "all but a byte", "zeros"])
def test_a_file_of_stock_that_was_cut_off_is_named(place, name, marker, left):
    for file in (marker, "__0_0.distcp"):
        path = place / name / file
        whole = path.read_bytes()
        kept = {"none": 0, "half": len(whole) // 2, "all but a byte": len(whole) - 1, "zeros": len(whole) // 2}[left]
        path.write_bytes(whole[:kept] + (bytes(len(whole) - kept) if left == "zeros" else b""))
        answer = run("verify", place / name, "--json")
        path.write_bytes(whole)
        if left == "none" and file != marker:
            continue  # a rank that has nothing to save writes such a file
        assert answer.code == 1
        assert only(answer)["verdict"] == "damaged"
        assert [problem["file"] for problem in only(answer)["problems"]] == [file]
        assert "hint" not in answer.err  # no start falls back from it


def test_shard_files_of_another_form_are_counted_and_not_called_damaged(place):
    (place / "stock" / "__1_0.distcp").write_bytes(b"\x28\xb5\x2f\xfd compressed")
    answer = run("verify", place / "stock")
    assert "no file is cut off, except for 1 of no known form, shard files: 2 of" in answer.out
    assert "damaged" not in answer.out


def test_a_marker_is_not_run(place, tmp_path):
    (place / "stock" / ".metadata").write_bytes(b"\x80\x04cos\nsystem\n(X\x05\0\0\0touch\x85R.")
    assert only(run("verify", place / "stock", "--json"))["verdict"] == "not verified"
    assert sorted(os.listdir(place / "stock")) == [".metadata", "__0_0.distcp"]


# --- drop-ins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["drop-in", "alone"])
def test_every_byte_of_a_drop_in_is_verified(place, name):
    answer = run("verify", place / name)
    assert answer.code == 0
    assert answer.out.startswith(f"{name}  verified")
    assert "Unbroken did not write" not in answer.out + answer.err
    attempt = only(run("verify", place / name, "--json"))
    assert attempt["verdict"] == "verified"
    assert attempt["verified_bytes"] == sum(p.stat().st_size for p in (place / name).glob("*.distcp"))


def test_why_it_belongs_to_no_run_is_said(place):
    assert "belongs to no run: a DCP drop-in wrote it" in run("verify", place / "drop-in").err
    assert "1 ranks saved alone here (use_collectives=False)" in run("verify", place / "alone").err


@pytest.mark.parametrize("name", ["drop-in", "alone"])
def test_each_file_of_a_drop_in_with_a_flipped_bit_is_named(place, name):
    for path in sorted((place / name).iterdir()):
        flip(path, path.stat().st_size // 2)
        answer = run("verify", place / name, "--json")
        flip(path, path.stat().st_size // 2)
        assert answer.code == 1, path
        assert only(answer)["verdict"] == "damaged"
        assert [problem["file"] for problem in only(answer)["problems"]] == [path.name]
    assert run("verify", place / name).code == 0


@pytest.mark.parametrize("name", ["drop-in", "alone"])
def test_a_file_of_a_drop_in_that_is_gone_is_named(place, name):
    (place / name / "__0_0.distcp").unlink()
    answer = run("verify", place / name)
    assert answer.code == 1
    assert "__0_0.distcp" in answer.out


def test_all_below_a_directory_are_verified_each_in_its_way(place):
    answer = run("verify", place, "--all", "--json")
    assert answer.code == 0
    verdicts = {attempt["attempt"]: attempt["verdict"] for attempt in answer.json["attempts"]}
    assert verdicts == {"drop-in": "verified", "stock": "not verified"}  # listed is what has a marker of all ranks
    flip(place / "drop-in" / "__0_0.distcp", CHUNK + 7)
    answer = run("verify", place, "--all")
    assert answer.code == 1
    assert f"bytes {CHUNK} to {2 * CHUNK}" in answer.out


# --- ranks that save alone -------------------------------------------------------------------------------------------


def test_each_rank_that_saved_alone_is_verified_by_its_own_manifest(tmp_path):
    for rank in (0, 2, 11):
        save_alone(tmp_path / "c", rank, 12)
    answer = run("verify", tmp_path / "c")
    assert answer.code == 0
    assert "in 3 shard files" in answer.out
    assert "3 ranks saved alone here" in answer.err
    flip(tmp_path / "c" / "__11_0.distcp", CHUNK + 1)
    flip(tmp_path / "c" / "__2.metadata", 3)
    problems = only(run("verify", tmp_path / "c", "--json"))["problems"]
    assert [(p["file"], p["begin"]) for p in problems] == [("__2.metadata", None), ("__11_0.distcp", CHUNK)]


def test_one_rank_of_stock_among_them_is_no_proof(place):
    save_alone(place / "stock-alone", 1, 2)
    answer = run("verify", place / "stock-alone")
    assert answer.code == 1
    assert "stock-alone  not verified" in answer.out
    assert "its marker __0.metadata is there" in answer.out
    attempt = only(run("verify", place / "stock-alone", "--json"))
    assert attempt["verified_bytes"] == (place / "stock-alone" / "__1_0.distcp").stat().st_size


def test_a_rank_that_never_committed_does_not_count(tmp_path):
    save_alone(tmp_path / "c", 0, 2)
    save_alone(tmp_path / "c", 1, 2)
    (tmp_path / "c" / "__1.metadata").unlink()
    answer = run("verify", tmp_path / "c")
    assert answer.code == 0
    assert "1 ranks saved alone here" in answer.err
    (tmp_path / "c" / "__0.metadata").unlink()
    assert run("verify", tmp_path / "c").code == 3
