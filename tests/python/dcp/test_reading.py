"""What can be in a directory: no checkpoint, half of one, a damaged or hostile one, one of stock DCP, one of a rank."""

import dataclasses
import io
import os
import pickle
import shutil
import zipfile
from pathlib import PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_parts import differences, failure, load_ours, load_stock, save_ours, save_stock, torch_saved
from torch.distributed._shard.sharded_tensor import metadata as sharded_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

import unbroken
from unbroken import errors


def a_state(value=1.0):
    return {"w": torch.full((50, 20), value), "b": torch.full((7,), value), "n": int(value), "text": "x" * int(value)}


def blank():
    return a_state(0.0)


def metadata_of(path):
    return pickle.loads((path / ".metadata").read_bytes())


def put_metadata(path, metadata):
    (path / ".metadata").write_bytes(metadata if isinstance(metadata, bytes) else pickle.dumps(metadata))


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


# --- where there is no checkpoint ------------------------------------------------------------------------------------


def refused(path, kind, *words):
    state = blank()
    error = failure(lambda: load_ours(state, path))
    text = str(error)
    # DCP asks for what rank 0 may have saved alone when there is no checkpoint of all, and puts both answers in a text.
    assert isinstance(error, kind) or (isinstance(error, AssertionError) and "metadata" in text), repr(error)
    for word in words:
        assert word in text, text
    assert not differences(state, blank())


def test_nothing_there(tmp_path):
    refused(tmp_path / "absent", errors.NotFoundError, "absent", "No such file")
    refused(tmp_path, errors.NotFoundError, "no checkpoint")


def test_a_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", errors.InvalidArgumentError, "file", "irectory")
    error = failure(lambda: save_ours(a_state(), tmp_path / "file"))
    assert "file" in str(error)
    error = failure(lambda: save_ours(a_state(), tmp_path / "file" / "below"))
    assert "file" in str(error)


def test_a_place_that_cannot_be_made(tmp_path):
    error = failure(lambda: save_ours(a_state(), "/proc/no/place"))
    assert isinstance(error, errors.Error)
    assert "/proc/no" in str(error)


def test_a_place_elsewhere(tmp_path):
    for call in (lambda: save_ours(a_state(), "s3://bucket/c"), lambda: load_ours(blank(), "s3://bucket/c")):
        assert "s3" in str(failure(call))


def test_the_root_of_a_run(tmp_path):
    state = {"w": torch.ones(3), "n": 5}
    with unbroken.Checkpointer(tmp_path, state) as run:
        run.resume()
        run.step()
        attempt = run.save().wait().attempt
    refused(tmp_path, errors.NotFoundError, "root of a run", "unbroken.load")
    error = failure(lambda: save_ours(a_state(), tmp_path))
    assert isinstance(error, errors.InvalidArgumentError)
    assert "root of a run" in str(error)
    loaded = load_ours({"w": torch.zeros(3), "n": 0}, tmp_path / attempt)
    assert loaded["n"] == 5
    assert torch.equal(loaded["w"], torch.ones(3))
    error = failure(lambda: save_ours(a_state(), tmp_path / attempt))
    assert isinstance(error, errors.AlreadyExistsError)


def test_shards_without_a_marker(tmp_path):
    save_ours(a_state(), tmp_path / "c")
    (tmp_path / "c" / ".metadata").unlink()
    refused(tmp_path / "c", errors.NotFoundError, "did not finish")
    failure(lambda: load_stock(blank(), tmp_path / "c"))


def test_the_cli_names_a_file_url(tmp_path):
    save_ours(a_state(3.0), f"file://{tmp_path}/c")
    assert not differences(load_ours(blank(), f"file://{tmp_path}/c"), a_state(3.0))


# --- where it is there, and is not to be written over ----------------------------------------------------------------


@pytest.mark.parametrize("save", [save_ours, save_stock])
def test_an_existing_checkpoint_is_kept_unless_overwrite_is_given(save, tmp_path):
    save(a_state(3.0), tmp_path / "c")
    before = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    error = failure(lambda: save_ours(a_state(4.0), tmp_path / "c"))
    assert isinstance(error, errors.AlreadyExistsError)
    assert "overwrite" in str(error)
    assert {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()} == before
    (tmp_path / "c" / "notes.txt").write_text("mine")
    save_ours(a_state(4.0), tmp_path / "c", overwrite=True)
    for load in (load_ours, load_stock):
        assert not differences(load(blank(), tmp_path / "c"), a_state(4.0))
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"


def test_what_a_save_that_did_not_finish_left_is_cleared_away(tmp_path):
    save_ours({f"t{i}": torch.ones(10) for i in range(3)} | {"n": 1}, tmp_path / "c")
    (tmp_path / "c" / ".metadata").unlink()
    (tmp_path / "c" / "__7_0.distcp").write_bytes(b"of a world that was larger")
    save_ours({"t0": torch.zeros(10)}, tmp_path / "c")
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        ".metadata", "__0.json", "__0_0.distcp", "manifest.json"
    ]  # fmt: skip


def test_stock_writes_over_ours_and_the_old_manifest_is_not_believed(tmp_path):
    save_ours(a_state(3.0), tmp_path / "c")
    dcp.save(a_state(4.0), storage_writer=dcp.FileSystemWriter(tmp_path / "c", overwrite=True), no_dist=True)
    refused(tmp_path / "c", errors.DamagedError, "manifest.json")
    (tmp_path / "c" / "manifest.json").unlink()
    assert not differences(load_ours(blank(), tmp_path / "c"), a_state(4.0))


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_each_damaged_byte_of_ours_is_found(tmp_path):
    """A byte in every part of every file."""
    save_ours(a_state(3.0), tmp_path / "good")
    names = [path.name for path in (tmp_path / "good").iterdir()]
    found = 0
    for name in names:
        size = (tmp_path / "good" / name).stat().st_size
        for at in {0, size // 3, size // 2, size - 1}:
            shutil.copytree(tmp_path / "good", tmp_path / "bad")
            flip(tmp_path / "bad" / name, at)
            error = failure(lambda: load_ours(blank(), tmp_path / "bad"))
            assert isinstance(error, (errors.DamagedError, AssertionError)), (name, at, error)
            found += 1
            shutil.rmtree(tmp_path / "bad")
    assert found >= 4 * len(names)


@pytest.mark.parametrize("save", [save_ours, save_stock])
@pytest.mark.parametrize("how", ["missing", "short", "empty"])
def test_a_file_that_is_not_whole(save, how, tmp_path):
    save(a_state(3.0), tmp_path / "c")
    shard = tmp_path / "c" / "__0_0.distcp"
    size = shard.stat().st_size
    if how == "missing":
        shard.unlink()
    else:
        os.truncate(shard, 0 if how == "empty" else size - 1)
    error = failure(lambda: load_ours(blank(), tmp_path / "c"))
    assert isinstance(error, (errors.DamagedError, errors.NotFoundError)), error
    assert "__0_0.distcp" in str(error)


@pytest.mark.parametrize("save", [save_ours, save_stock])
@pytest.mark.parametrize("content", [b"", b"\x80", b"not a pickle at all", b"\x80\x05N."])
def test_a_torn_marker(save, content, tmp_path):
    save(a_state(3.0), tmp_path / "c")
    put_metadata(tmp_path / "c", content)
    refused(tmp_path / "c", errors.DamagedError, ".metadata")


def test_what_rank_0_saved_alone_does_not_stand_in_for_a_broken_checkpoint_of_all(tmp_path):
    """DCP falls back to __0.metadata whatever the reason is."""
    dcp.save(a_state(3.0), checkpoint_id=tmp_path / "c", use_collectives=False, no_dist=True)
    save_stock(a_state(4.0), tmp_path / "c")
    assert (tmp_path / "c" / "__0.metadata").exists()
    put_metadata(tmp_path / "c", b"torn")
    refused(tmp_path / "c", errors.DamagedError, "another checkpoint")


# --- hostile files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [save_ours, save_stock])
def test_a_pickle_in_the_metadata_is_never_run(save, tmp_path):
    victim = tmp_path / "victim"
    for place in ("top", "planner_data", "storage_data", "storage_meta", "state_dict_metadata", "version"):
        save(a_state(3.0), tmp_path / place)
        metadata = metadata_of(tmp_path / place)
        if place == "top":
            metadata = Hostile(victim)
        elif place == "storage_data":
            metadata.storage_data["more"] = Hostile(victim)
        else:
            setattr(metadata, place, Hostile(victim))
        put_metadata(tmp_path / place, metadata)
        if save is save_ours:
            (tmp_path / place / "manifest.json").unlink()  # else its checksum is the first to object
        refused(tmp_path / place, errors.UnsupportedError, "open", "refused")
        assert not victim.exists(), place


def swap_object(path, key, raw):
    """Puts other bytes in the place of an object, in the files of stock DCP."""
    metadata = metadata_of(path)
    index = next(i for i in metadata.storage_data if i.fqn == key)
    (path / "hostile.distcp").write_bytes(raw)
    metadata.storage_data[index] = _StorageInfo("hostile.distcp", 0, len(raw))
    put_metadata(path, metadata)


def legacy(value):
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


@pytest.mark.parametrize("key", ["text", "w"])
@pytest.mark.parametrize("pack", [torch_saved, legacy, pickle.dumps], ids=["zip", "legacy", "pickle"])
def test_an_object_that_would_run_is_refused_before_a_planner_sees_it(key, pack, tmp_path):
    victim = tmp_path / "victim"
    save_stock(a_state(3.0), tmp_path / "c")
    swap_object(tmp_path / "c", key, pack(Hostile(victim)))
    state = blank()
    error = failure(lambda: load_ours(state, tmp_path / "c"))
    assert isinstance(error, errors.Error), error
    assert f"{key!r}" in str(error)
    assert not victim.exists()
    if key == "text":  # stock's own reader looks at tensors with weights_only, at objects without
        assert not differences(state, blank())
        if pack is not pickle.dumps:
            load_stock(blank(), tmp_path / "c")
            assert victim.exists()


def test_a_script_in_place_of_an_object(tmp_path):
    """torch.load of such an archive runs torch.jit.load."""
    save_stock(a_state(3.0), tmp_path / "c")
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), buffer)
    swap_object(tmp_path / "c", "text", buffer.getvalue())
    error = failure(lambda: load_ours(blank(), tmp_path / "c"))
    assert isinstance(error, errors.Error)
    assert "'text'" in str(error)


@pytest.mark.parametrize(
    "name", ["../outside", "sub/inside", "/etc/hostname", "..", ".", "", "a\0b", "link", "linked/inside", "pipe", "sub"]
)
def test_a_file_name_that_leads_elsewhere_is_not_followed(name, tmp_path):
    path = tmp_path / "c"
    save_stock(a_state(3.0), path)
    raw = (path / "__0_0.distcp").read_bytes()
    (tmp_path / "outside").write_bytes(raw)
    (path / "sub").mkdir()
    (path / "sub" / "inside").write_bytes(raw)
    (path / "link").symlink_to(tmp_path / "outside")
    (path / "linked").symlink_to(path / "sub")
    os.mkfifo(path / "pipe")
    metadata = metadata_of(path)
    metadata.storage_data = {
        index: dataclasses.replace(info, relative_path=name) for index, info in metadata.storage_data.items()
    }
    put_metadata(path, metadata)
    state = blank()
    error = failure(lambda: load_ours(state, path))
    assert isinstance(error, errors.UnsupportedError), repr(error)
    assert not differences(state, blank())


def test_a_linked_shard_or_marker_of_ours_is_not_followed(tmp_path):
    for name in ("__0_0.distcp", ".metadata", "manifest.json", "__0.json"):
        path = tmp_path / name.strip("._")
        save_ours(a_state(3.0), path)
        shutil.move(path / name, tmp_path / "elsewhere")
        (path / name).symlink_to(tmp_path / "elsewhere")
        failure(lambda path=path: load_ours(blank(), path))


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1 << 60), (1 << 62, 10), (-5, 10), (0, -1), ("0", 10), (None, 10), (1.5, 2)]
)
@pytest.mark.parametrize("save", [save_ours, save_stock])
def test_places_that_make_no_sense(save, offset, length, tmp_path):
    save(a_state(3.0), tmp_path / "c")
    metadata = metadata_of(tmp_path / "c")
    for info in metadata.storage_data.values():
        info.offset, info.length = offset, length
    put_metadata(tmp_path / "c", metadata)
    if save is save_ours:
        (tmp_path / "c" / "manifest.json").unlink()
    refused(tmp_path / "c", errors.DamagedError)


def test_a_tensor_that_is_not_what_the_metadata_says(tmp_path):
    for value in (torch.zeros(3, 3), "no tensor", torch.zeros(50, 19)):
        path = tmp_path / str(id(value))
        save_stock(a_state(3.0), path)
        swap_object(path, "w", torch_saved(value))
        error = failure(lambda path=path: load_ours(blank(), path))
        assert isinstance(error, errors.Error), error
        assert "'w'" in str(error)


# --- stock's own variations ------------------------------------------------------------------------------------------


def test_stock_with_one_file_for_each_item(tmp_path):
    writer = dcp.FileSystemWriter(tmp_path / "c", single_file_per_rank=False)
    dcp.save(a_state(3.0), storage_writer=writer, no_dist=True)
    assert not differences(load_ours(blank(), tmp_path / "c"), a_state(3.0))


def test_stock_with_many_threads_and_async(tmp_path):
    writer = dcp.FileSystemWriter(tmp_path / "c", thread_count=4)
    dcp.async_save(a_state(3.0), storage_writer=writer, no_dist=True).result()
    assert not differences(load_ours(blank(), tmp_path / "c"), a_state(3.0))


class Plain(torch.distributed.checkpoint._extension.StreamTransformExtension):
    """A transform that changes nothing."""

    @staticmethod
    def registry_name():
        return "stream.plain"

    @staticmethod
    def from_descriptor(version):
        return Plain()

    def get_descriptor(self):
        return "stream.plain/1"

    def transform_to(self, output):
        return output

    def transform_from(self, input):  # noqa: A002
        return input


def test_a_transform_that_is_not_known_is_named(tmp_path):
    writer = dcp.FileSystemWriter(tmp_path / "c", _extensions=[Plain()])
    dcp.save(a_state(3.0), storage_writer=writer, no_dist=True)
    refused(tmp_path / "c", errors.UnsupportedError, "stream.plain")


def test_compressed_by_stock(tmp_path):
    extension = torch.distributed.checkpoint._extension.ZStandard
    if not extension.is_available():
        # Without the module stock can write none; what its name leads to is a clear refusal.
        save_stock(a_state(3.0), tmp_path / "c")
        metadata = metadata_of(tmp_path / "c")
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["stream.zstd/1"]
        put_metadata(tmp_path / "c", metadata)
        refused(tmp_path / "c", errors.UnsupportedError, "stream.zstd", "zstandard")
        return
    dcp.save(a_state(3.0), storage_writer=dcp.FileSystemWriter(tmp_path / "c", _extensions=[extension()]), no_dist=True)
    assert not differences(load_ours(blank(), tmp_path / "c"), a_state(3.0))


def test_metadata_as_older_versions_of_torch_wrote_it(tmp_path):
    """Before 2.3 the properties were of another class; before 2.4 there was no storage_meta."""
    save_stock(a_state(3.0), tmp_path / "c")
    metadata = metadata_of(tmp_path / "c")
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties = sharded_metadata.TensorProperties(dtype=entry.properties.dtype)
    metadata.storage_meta = None
    put_metadata(tmp_path / "c", metadata)
    assert not differences(load_ours(blank(), tmp_path / "c"), a_state(3.0))


def test_stock_notes_its_path_and_it_touches_no_file(tmp_path):
    save_stock(a_state(3.0), tmp_path / "c")
    assert isinstance(metadata_of(tmp_path / "c").storage_meta.checkpoint_id, PosixPath)
    reader = unbroken.UnbrokenReader(tmp_path / "c")
    metadata = reader.read_metadata()
    assert not hasattr(metadata.storage_meta.checkpoint_id, "exists")
    assert metadata.storage_meta.load_id


def test_an_archive_of_zip64(tmp_path):
    """As stock writes it for what is large; here forced, so that it is small."""
    save_stock(a_state(3.0), tmp_path / "c")
    raw = torch_saved(torch.full((50, 20), 3.0))
    rewritten = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(rewritten, "w") as new:
        for name in old.namelist():
            with new.open(zipfile.ZipInfo(name), "w", force_zip64=True) as file:
                file.write(old.read(name))
    swap_object(tmp_path / "c", "w", rewritten.getvalue())
    assert not differences(load_ours(blank(), tmp_path / "c"), a_state(3.0))


# --- ranks that save alone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_ours, load_stock])
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_rank_that_saves_alone(how, load, tmp_path):
    writer = unbroken.UnbrokenWriter(tmp_path / "c")
    saved = getattr(dcp, how)(a_state(3.0), storage_writer=writer, use_collectives=False, no_dist=True)
    if how == "async_save":
        saved.result()
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "__0.json", "__0.manifest.json", "__0.metadata", "__0_0.distcp", "__0_1.distcp"
    ]  # fmt: skip
    assert not differences(load(blank(), tmp_path / "c"), a_state(3.0))
    writer = unbroken.UnbrokenWriter(tmp_path / "c")
    error = failure(lambda: dcp.save(a_state(4.0), storage_writer=writer, use_collectives=False, no_dist=True))
    assert isinstance(error, errors.AlreadyExistsError)
    error = failure(lambda: save_ours(a_state(4.0), tmp_path / "c"))  # of all ranks, over what one has
    assert isinstance(error, errors.AlreadyExistsError)
    assert not differences(load(blank(), tmp_path / "c"), a_state(3.0))
    save_ours(a_state(5.0), tmp_path / "c", overwrite=True)
    assert not differences(load(blank(), tmp_path / "c"), a_state(5.0))
    assert not (tmp_path / "c" / "__0.metadata").exists()
    error = failure(lambda: dcp.save(a_state(6.0), storage_writer=writer, use_collectives=False, no_dist=True))
    assert isinstance(error, errors.AlreadyExistsError)
    writer = unbroken.UnbrokenWriter(tmp_path / "c", overwrite=True)
    dcp.save(a_state(7.0), storage_writer=writer, use_collectives=False, no_dist=True)
    assert not differences(load(blank(), tmp_path / "c"), a_state(7.0))


def test_a_damaged_byte_of_a_rank_that_saved_alone(tmp_path):
    writer = unbroken.UnbrokenWriter(tmp_path / "c")
    dcp.save(a_state(3.0), storage_writer=writer, use_collectives=False, no_dist=True)
    flip(tmp_path / "c" / "__0_0.distcp", 2000)
    assert isinstance(failure(lambda: load_ours(blank(), tmp_path / "c")), errors.DamagedError)
