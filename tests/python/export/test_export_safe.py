"""What is left when an export fails, is killed, meets damage or another export; how much memory it takes."""

import fcntl
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from export_parts import INDEX, SINGLE, flip, read_export, same, save_drop_in, save_run, save_stock, snapshot

import unbroken
from unbroken import errors

HERE = Path(__file__).parent


def weights(value, count=6):
    return {f"w{i}": torch.full((100,), float(value + i)) for i in range(count)}


@pytest.fixture
def root(tmp_path):
    """Two checkpoints of a run: weights(10) at step 1, weights(20) at step 2."""
    state = {"model": weights(10)}
    with unbroken.Checkpointer(tmp_path / "run", state, keep=None, signals=False) as run:
        run.resume()
        run.step()
        run.save().wait()
        state["model"].update(weights(20))
        run.step()
        run.save().wait()
    return tmp_path / "run"


# --- what is there already -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [(400, "5GB"), ("5GB", 400), (400, 900), (900, 400)])
def test_an_older_export_stays_unless_told_and_is_then_replaced_whole(root, tmp_path, old, new):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    unbroken.export_safetensors(root, out, step=1, max_shard_size=old)
    before = snapshot(out)
    with pytest.raises(errors.AlreadyExistsError, match="overwrite=True"):
        unbroken.export_safetensors(root, out, max_shard_size=new)
    assert snapshot(out) == before
    result = unbroken.export_safetensors(root, out, max_shard_size=new, overwrite=True)
    assert same(read_export(out), weights(20))
    assert set(snapshot(out)) == {"config.json", *result.files}


@pytest.mark.parametrize("name", [SINGLE, INDEX, "model-00001-of-00002.safetensors"])
def test_part_of_somebody_elses_export_is_not_touched(root, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(b"theirs")
    with pytest.raises(errors.AlreadyExistsError, match=name):
        unbroken.export_safetensors(root, tmp_path / "out")
    assert snapshot(tmp_path / "out") == {name: b"theirs"}


def test_it_does_not_write_into_a_checkpoint_nor_over_a_file(root, tmp_path):
    attempt = next(root.glob("step-1-*"))
    before = snapshot(attempt)
    with pytest.raises(errors.InvalidArgumentError, match="directory of a checkpoint"):
        unbroken.export_safetensors(root, attempt, overwrite=True)
    assert snapshot(attempt) == before
    with pytest.raises(errors.InvalidArgumentError, match="give a directory"):
        unbroken.export_safetensors(root, tmp_path / "model.safetensors")
    (tmp_path / "file").write_text("text")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(errors.InvalidArgumentError, match="Not a directory"):
            unbroken.export_safetensors(root, out)
    assert (tmp_path / "file").read_text() == "text"


def test_a_link_in_the_way_is_replaced_and_not_followed(root, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "out" / SINGLE).symlink_to(tmp_path / "theirs")
    unbroken.export_safetensors(root, tmp_path / "out", overwrite=True)
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not (tmp_path / "out" / SINGLE).is_symlink()
    assert same(read_export(tmp_path / "out"), weights(20))


def test_two_exports_at_once_do_not_mix(root, tmp_path):
    (tmp_path / "out").mkdir()
    other = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(errors.UnavailableError, match="another export"):
        unbroken.export_safetensors(root, tmp_path / "out")
    os.close(other)
    unbroken.export_safetensors(root, tmp_path / "out")
    assert same(read_export(tmp_path / "out"), weights(20))


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [save_run, save_drop_in], ids=["run", "drop-in"])
@pytest.mark.parametrize("size", ["5GB", 1000])
def test_a_flipped_bit_is_refused_by_name_and_nothing_is_exported(tmp_path, save, size):
    # The damage is in the last tensor: what came before it has been written by then.
    state = {f"w{i}": torch.full((3_000_000,), float(i)) for i in range(4)}
    save(tmp_path / "c", {"model": state})
    shard = max(tmp_path.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(shard, shard.stat().st_size - 4000)
    with pytest.raises(errors.DamagedError, match=shard.name):
        unbroken.export_safetensors(tmp_path / "c", tmp_path / "out", max_shard_size=size)
    assert not (tmp_path / "out").exists()
    old = tmp_path / "old"
    save_run(tmp_path / "good", {"model": weights(1)})
    unbroken.export_safetensors(tmp_path / "good", old)
    before = snapshot(old)
    with pytest.raises(errors.DamagedError):
        unbroken.export_safetensors(tmp_path / "c", old, max_shard_size=size, overwrite=True)
    assert snapshot(old) == before


def change_metadata(directory, change):
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def larger(metadata):
    metadata.state_dict_metadata["model.w1"].size = torch.Size([1 << 50])


def larger_with_its_piece(metadata):
    larger(metadata)
    (chunk,) = metadata.state_dict_metadata["model.w1"].chunks
    chunk.sizes = torch.Size([1 << 50])


def without_pieces(metadata):
    metadata.state_dict_metadata["model.w1"].chunks = []


def elsewhere(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"


def nowhere(metadata):
    metadata.storage_data = {}


def strange(metadata):
    metadata.state_dict_metadata["model.w1"].size = (10.5,)


def no_dtype(metadata):
    object.__setattr__(metadata.state_dict_metadata["model.w1"].properties, "dtype", "float32")


@pytest.mark.parametrize("harm", [larger, larger_with_its_piece, without_pieces, elsewhere, nowhere, strange, no_dtype])
def test_a_hostile_checkpoint_is_refused_and_leaves_nothing(tmp_path, harm):
    save_stock(tmp_path / "c", {"model": weights(1)})
    change_metadata(tmp_path / "c", harm)
    with pytest.raises((errors.DamagedError, errors.UnsupportedError)):
        unbroken.export_safetensors(tmp_path / "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_shard_of_stock_that_is_cut_off_is_refused(tmp_path):
    save_stock(tmp_path / "c", {"model": weights(1)})
    shard = next((tmp_path / "c").glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(errors.DamagedError):
        unbroken.export_safetensors(tmp_path / "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- where it goes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("size", ["5GB", 400_000])
def test_a_full_disk_is_named_and_nothing_is_left(tmp_path, small_disk, size):
    save_run(tmp_path / "run", {"model": {f"w{i}": torch.ones(100_000) for i in range(10)}})
    with pytest.raises(errors.NoSpaceError, match=r"write model.*\d+ bytes .* still to be written") as raised:
        unbroken.export_safetensors(tmp_path / "run", small_disk / "a" / "out", max_shard_size=size)
    assert "No space left on device" in str(raised.value)
    assert os.listdir(small_disk) == []


def test_a_full_disk_keeps_the_older_export(tmp_path, small_disk):
    save_run(tmp_path / "run", {"model": {"w": torch.ones(300_000)}})
    unbroken.export_safetensors(tmp_path / "run", small_disk / "out")
    before = snapshot(small_disk / "out")
    with pytest.raises(errors.NoSpaceError):
        unbroken.export_safetensors(tmp_path / "run", small_disk / "out", overwrite=True)
    assert snapshot(small_disk / "out") == before


def test_a_place_that_may_not_be_written_is_named(root, tmp_path, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(errors.PermissionDeniedError, match=str(small_disk)):
        unbroken.export_safetensors(root, small_disk)
    with pytest.raises(errors.PermissionDeniedError, match="out"):
        unbroken.export_safetensors(root, small_disk / "out")


# --- kills -----------------------------------------------------------------------------------------------------------


class Killed:
    """Exports in processes that are killed before one change to the disk after the other."""

    def __init__(self, root, **options):
        self._process = subprocess.Popen(
            [sys.executable, HERE / "export_killed.py", root, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def at(self, point, out):
        """False when it came to its end before."""
        print(json.dumps([point, str(out)]), file=self._process.stdin, flush=True)
        said = self._process.stdout.readline().strip()
        assert said in ("killed", "exit 0"), said
        return said == "killed"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        assert self._process.wait(60) == 0


def what_tools_see(out):
    """None where they see no model."""
    if not ((out / SINGLE).exists() or (out / INDEX).exists()):
        return None
    return read_export(out)


@pytest.mark.parametrize("size", ["5GB", 900], ids=["one file", "several"])
def test_a_kill_at_any_point_leaves_nothing_that_looks_whole_and_the_next_export_works(root, tmp_path, size):
    with Killed(str(root), max_shard_size=size) as killed:
        points, seen = 0, []
        while killed.at(points, out := tmp_path / f"out-{points}"):
            seen.append(what_tools_see(out))
            assert seen[-1] is None or same(seen[-1], weights(20))
            if seen[-1] is None:
                result = unbroken.export_safetensors(root, out, max_shard_size=size)
                assert same(read_export(out), weights(20))
                assert set(snapshot(out)) == set(result.files)
            points += 1
        assert same(read_export(out), weights(20))
    assert points > (8 if size == "5GB" else 15)
    assert seen[0] is None
    assert seen[-1] is not None


def test_a_second_kill_does_not_make_what_the_first_left_look_like_somebody_elses(root, tmp_path):
    with Killed(str(root), max_shard_size=900) as killed:
        first = 0
        while killed.at(first, out := tmp_path / f"first-{first}"):
            if out.exists() and any(name.startswith("model-") for name in os.listdir(out)):
                break
            first += 1
        assert what_tools_see(out) is None
        second = 0
        while True:
            out = tmp_path / f"second-{second}"
            killed.at(first, out)
            if not killed.at(second, out):
                break
            if what_tools_see(out) is None:
                unbroken.export_safetensors(root, out)
            assert same(read_export(out), weights(20))
            second += 1
    assert second > first


@pytest.mark.parametrize(("old", "new"), [("5GB", 900), (400, 900), (400, "5GB"), ("5GB", "5GB")])
def test_a_kill_while_replacing_leaves_the_old_one_none_or_the_new_one(root, tmp_path, old, new):
    with Killed(str(root), max_shard_size=new, overwrite=True) as killed:
        points, states = 0, []
        while True:
            out = tmp_path / f"out-{points}"
            unbroken.export_safetensors(root, out, step=1, max_shard_size=old)
            if not killed.at(points, out):
                break
            found = what_tools_see(out)
            states.append("none" if found is None else "old" if same(found, weights(10)) else "new")
            assert states[-1] != "new" or same(found, weights(20))
            again = unbroken.export_safetensors(root, out, max_shard_size=new, overwrite=found is not None)
            assert same(read_export(out), weights(20))
            assert set(snapshot(out)) == set(again.files)
            points += 1
    assert [state for i, state in enumerate(states) if i == 0 or state != states[i - 1]] == ["old", "none", "new"]


# --- memory ----------------------------------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("save", [save_run, save_stock], ids=["run", "stock"])
@pytest.mark.parametrize("shape", ["many", "one"])
def test_memory_is_bounded(tmp_path, save, shape):
    """256 MiB of weights in shards of 16 MiB, or in one tensor whose rows are larger than what is read at once."""
    count = 32
    state = {f"w{i}": torch.full((2 * MIB,), float(i)) for i in range(count)}
    if shape == "one":
        state = {"w": torch.arange(64 * MIB, dtype=torch.int32).view(1, -1)}
    save(tmp_path / "large", {"model": state})
    save(tmp_path / "tiny", {"model": {"w": torch.ones(2)}})
    command = [sys.executable, HERE / "export_memory.py", tmp_path, tmp_path / "out", "16MiB"]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert same(read_export(tmp_path / "out" / "large"), state)
    # What stock DCP wrote is read by the piece, which here is the tensor.
    largest = max(tensor.nbytes for tensor in state.values())
    bound = 2 * max(largest, 32 * MIB) if save is save_stock else 32 * MIB
    assert grown < bound + 32 * MIB, f"{grown / MIB:.0f} MiB"
