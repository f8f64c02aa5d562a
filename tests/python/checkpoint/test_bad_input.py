"""Bad input, bad places and bad files: a clear error, and nothing is lost."""

import io
import logging
import os
import pickle
import random
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoint_parts import Net, Training, differences
from torch import nn
from torch.distributed.checkpoint import metadata as dcp_metadata

import unbroken
from unbroken import errors
from unbroken.checkpoint import _pack
from unbroken.checkpoint._metadata import read_metadata
from unbroken.checkpoint._metadata_writer import MetadataWriter
from unbroken.checkpoint._safe import loads

# --- the state -------------------------------------------------------------------------------------------------------


def saved_run(root, state, steps=1):
    """Saves `steps` steps; returns the directories, oldest first."""
    made = []
    with unbroken.Checkpointer(root, state, keep=None) as run:
        run.resume()
        for _ in range(steps):
            run.step()
            made.append(root / run.save().wait().attempt)
    return made


def changed(change):
    model = Net()
    change(model)
    return model


MODELS = {
    "missing": (lambda m: setattr(m, "more", nn.Linear(2, 2)), ["missing from the checkpoint", "model.more.weight"]),
    "extra": (lambda m: delattr(m, "out"), ["only in the checkpoint", "model.out.weight"]),
    "reshaped": (lambda m: setattr(m, "out", nn.Linear(16, 9, bias=False)), ["(8, 16)", "(9, 16)", "model.out.weight"]),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("how", ["resume", "load"])
def test_another_model_is_refused_with_a_list_and_nothing_has_changed(tmp_path, kind, how):
    change, words = MODELS[kind]
    saved_run(tmp_path, {"model": Net(), "n": 5})
    state = {"model": changed(change), "n": 1}
    before = {name: t.clone() for name, t in state["model"].state_dict().items()}
    with unbroken.Checkpointer(tmp_path, state) as run, pytest.raises(errors.InvalidArgumentError) as raised:
        _ = run.resume() if how == "resume" else unbroken.load(tmp_path, state)
    for word in [*words, "strict=False"]:
        assert word in str(raised.value)
    assert not differences(dict(state["model"].state_dict()), before)
    assert state["n"] == 1


@pytest.mark.parametrize("kind", MODELS)
def test_strict_false_loads_what_fits_and_says_what_does_not(tmp_path, kind, caplog):
    change, words = MODELS[kind]
    first = Training()
    first.step()
    saved_run(tmp_path, first.state)
    second = Training(seed=3)
    change(second.model)
    second.optimizer = torch.optim.AdamW(second.model.parameters(), lr=1e-2, foreach=False)
    state = {"model": second.model, "optimizer": second.optimizer}
    with unbroken.Checkpointer(tmp_path, state, strict=False) as run:
        assert run.resume() == 1
        assert torch.equal(second.model.embed.weight, first.model.embed.weight)
        assert words[-1] in caplog.text
        loss = second.model.embed(torch.ones(8)).sum()
        loss.backward()
        second.optimizer.step()
        run.step()
        run.save().wait()
    name = second.model.embed.weight
    assert second.optimizer.state[name]["step"].item() == 2


def test_what_the_checkpoint_has_besides_is_refused_and_named(tmp_path):
    saved_run(tmp_path, {"x": 1, "average": torch.ones(3)})
    with (
        unbroken.Checkpointer(tmp_path, {"x": 1}) as run,
        pytest.raises(ValueError, match="only in the checkpoint: average"),
    ):
        run.resume()
    state = {"x": 0}
    assert unbroken.load(tmp_path, state) == 1  # a part, for evaluation
    assert state == {"x": 1}


def test_other_parameter_groups_are_refused_by_name(tmp_path):
    model = Net()
    saved_run(tmp_path, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1)})
    again = Net()
    groups = [{"params": [again.embed.weight]}, {"params": [*again.body.parameters(), again.out.weight]}]
    with (
        unbroken.Checkpointer(tmp_path, {"model": again, "optimizer": torch.optim.SGD(groups, lr=1)}) as run,
        pytest.raises(ValueError, match=r"optimizer\.param_groups\.1: out\.weight"),
    ):
        run.resume()


class Refusing:
    """Takes its state and then fails: what was applied before stays applied."""

    def __init__(self):
        self.fail = False

    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        if self.fail:
            raise RuntimeError("no room for this state")


def test_a_restore_that_fails_half_way_leaves_no_run_going_on(tmp_path):
    state = {"x": torch.ones(3), "object": Refusing()}
    saved_run(tmp_path, state)
    state["x"].zero_()
    state["object"].fail = True
    run = unbroken.Checkpointer(tmp_path, state)
    with pytest.raises(RuntimeError, match="no room"):
        run.resume()
    assert state["x"].tolist() == [1, 1, 1]
    for call in (run.step, run.save, run.resume, lambda: next(iter(run.batches(until=9)))):
        with pytest.raises(ValueError, match=r"half loaded|needs a loader"):
            call()
    run.close()


def test_an_object_that_cannot_be_saved_any_more_fails_that_save_and_training_goes_on(tmp_path):
    state = {"x": torch.zeros(2), "deep": {"value": 3}}
    with unbroken.Checkpointer(tmp_path, state, every=unbroken.Every(steps=1), keep=None) as run:
        run.resume()
        run.step()
        run.save().wait()
        state["deep"]["value"] = lambda: 0
        run.step()
        with pytest.raises(errors.SaveFailedError, match=r"deep\.value"):
            run.save().wait()
        state["deep"]["value"] = 4
        run.step()
        run.save().wait()
    assert run.stats.failed >= 1
    loaded = {"x": torch.zeros(2), "deep": {"value": 0}}
    assert unbroken.load(tmp_path, loaded) == 3
    assert loaded["deep"]["value"] == 4


def test_a_failed_save_is_raised_by_close_and_once_is_enough(tmp_path):
    state = {"value": 3}
    run = unbroken.Checkpointer(tmp_path, state)
    run.resume()
    state["value"] = lambda: 0
    run.step()
    saving = run.save()
    with pytest.raises(errors.SaveFailedError, match="value"):
        run.close()
    assert isinstance(saving.durable.exception(), errors.SaveFailedError)
    run.close()


def test_an_error_of_the_body_is_not_hidden_by_a_failed_save(tmp_path):
    state = {"value": 3}
    with pytest.raises(ZeroDivisionError), unbroken.Checkpointer(tmp_path, state) as run:  # noqa: PT012
        run.resume()
        state["value"] = lambda: 0
        run.step()
        run.save()
        _ = 1 / 0


# --- the data --------------------------------------------------------------------------------------------------------


def loader_of(samples, **options):
    return unbroken.data.DataLoader(list(range(samples)), global_batch_size=4, seed=1, **options)


def test_another_dataset_is_refused_and_nothing_has_changed(tmp_path):
    state = {"x": torch.ones(1)}
    with unbroken.Checkpointer(tmp_path, state, loader_of(40)) as run:
        for _ in run.batches(until=3):
            pass
    state["x"].zero_()
    with unbroken.Checkpointer(tmp_path, state, loader_of(44)) as run, pytest.raises(errors.Error, match="44"):
        run.resume()
    assert state["x"].item() == 0
    with unbroken.Checkpointer(tmp_path, state, loader_of(40)) as run:
        assert run.resume() == 3
    assert state["x"].item() == 1


def test_weights_without_their_data_state_are_refused(tmp_path):
    state = {"x": torch.ones(1)}
    saved_run(tmp_path, state)
    with unbroken.Checkpointer(tmp_path, state, loader_of(40)) as run, pytest.raises(ValueError, match="no data state"):
        run.resume()


def test_data_state_without_a_loader_is_refused(tmp_path):
    state = {"x": torch.ones(1)}
    with unbroken.Checkpointer(tmp_path, state, loader_of(40)) as run:
        for _ in run.batches(until=3):
            pass
    with unbroken.Checkpointer(tmp_path, state) as run, pytest.raises(ValueError, match="give loader="):
        run.resume()
    with unbroken.Checkpointer(tmp_path, state, strict=False) as run:
        assert run.resume() == 3


# --- the place -------------------------------------------------------------------------------------------------------


def test_a_root_that_is_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "root").write_text("mine")
    with unbroken.Checkpointer(tmp_path / "root", {"x": 1}) as run, pytest.raises(errors.Error, match="root"):
        run.resume()
    assert (tmp_path / "root").read_text() == "mine"


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(tmp_path, request):
    """A file system with some 8 MiB of space."""
    place = tmp_path / "small"
    place.mkdir()
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", place]
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(12 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", image], check=True)
        mount = ["mount", "-o", "loop", image, place]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting needs root: {mounted.stderr}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_root_that_cannot_be_written_is_refused_by_name(small_disk):
    saved_run(small_disk, {"x": 1})
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with unbroken.Checkpointer(small_disk, {"x": 1}) as run, pytest.raises(errors.PermissionDeniedError) as raised:
        run.resume()
    assert str(small_disk) in str(raised.value)


@pytest.fixture
def open_place():
    """Where every user may go; tmp_path is this user's alone."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        yield Path(place)


def test_a_root_that_this_user_may_not_write_is_refused_by_name(open_place):
    """Of mode 0555, which keeps out everyone but root: a child of root becomes another user."""
    root = open_place / "run"
    root.mkdir()
    root.chmod(0o555)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresuid(65534, 65534, 65534)
            try:
                unbroken.Checkpointer(root, {"x": 1}).resume()
            except errors.PermissionDeniedError as error:
                code = (
                    0 if str(root) in str(error) and "choose a directory that this user may write" in str(error) else 2
                )
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not list(root.iterdir())


def fill(ballast, left):
    """Makes a file that leaves about so many bytes free."""
    with ballast.open("wb") as file:
        while (free := os.statvfs(ballast).f_bavail * os.statvfs(ballast).f_frsize) > left:
            file.write(b"x" * min(free - left, 64 << 10))
            file.flush()


def test_a_full_disk_costs_that_save_and_no_more(small_disk):
    """C6: the error names file and bytes, training goes on, older checkpoints stay, and the next save succeeds."""
    state = {"x": torch.zeros(1 << 18)}  # 1 MiB
    with unbroken.Checkpointer(small_disk / "run", state, every=unbroken.Every(steps=1), keep=None) as run:
        run.resume()
        run.step()
        good = run.save().wait()
        state["x"] += 1
        fill(small_disk / "ballast", 400 << 10)
        run.step()
        saving = run.last_save if run.last_save.step == 2 else run.save()
        left = r"__0_0\.distcp.*ENOSPC\); 1\.0 MiB needed, [34]\d\d(\.\d)? KiB free"
        with pytest.raises(errors.SaveFailedError, match=left) as raised:
            saving.wait()
        assert "step-2" in str(raised.value)
        assert run.stats.failed >= 1
        assert unbroken.load(small_disk / "run", {"x": torch.empty(1 << 18)}) == 1
        (small_disk / "ballast").unlink()
        state["x"] += 1
        run.step()
        run.save().wait()
    assert good.state == "durable"
    loaded = {"x": torch.empty(1 << 18)}
    assert unbroken.load(small_disk / "run", loaded) == 3
    assert loaded["x"].unique().tolist() == [2]


def test_a_root_that_vanishes_fails_the_saves_by_name_and_nothing_else(tmp_path):
    root = tmp_path / "run"
    state = {"x": torch.zeros(3)}
    with unbroken.Checkpointer(root, state, every=unbroken.Every(steps=1)) as run:
        run.resume()
        run.step()
        run.save().wait()
        shutil.rmtree(root)
        for _ in range(3):
            run.step()
            with pytest.raises(errors.SaveFailedError, match=f"{root}.*deleted"):
                run.save().wait()
    assert run.stats.failed >= 3


def test_a_root_whose_records_are_gone_stops_the_run(tmp_path):
    state = {"x": torch.zeros(3)}
    run = unbroken.Checkpointer(tmp_path, state)
    run.resume()
    shutil.rmtree(tmp_path / "generations")
    (tmp_path / "generations").mkdir()
    run.step()
    with pytest.raises(errors.FencedError, match="gone"):
        run.save().wait()
    with pytest.raises(errors.FencedError):
        run.step()
    run.close()


def test_a_newer_start_stops_an_older_run_at_its_next_save(tmp_path):
    state = {"x": torch.zeros(1)}
    old = unbroken.Checkpointer(tmp_path, state, every=unbroken.Every(steps=1))
    old.resume()
    old.step()
    old.save().wait()
    new = unbroken.Checkpointer(tmp_path, {"x": torch.zeros(1)})
    assert new.resume() == 1
    old.step()  # its save finds out
    old._await_background()
    for _ in range(2):
        with pytest.raises(errors.FencedError, match="generation 2"):
            old.step()
    new.step()
    new.save().wait()
    new.close()
    with pytest.raises(errors.FencedError):
        old.close()
    assert unbroken.load(tmp_path, state) == 2


def test_the_root_of_another_run_is_refused_at_the_next_save(tmp_path):
    state = {"x": 1}
    saved_run(tmp_path / "other", state)
    run = unbroken.Checkpointer(tmp_path / "mine", state)
    run.resume()
    shutil.copytree(tmp_path / "other", tmp_path / "mine", dirs_exist_ok=True)
    run.step()
    with pytest.raises(errors.FencedError, match="another run"):
        run.save().wait()
    run.close()


# --- the files -------------------------------------------------------------------------------------------------------


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << random.randrange(8))]))


@pytest.mark.parametrize("name", [".metadata", "manifest.json", "__0.json", "__0_0.distcp", "__0_1.distcp"])
def test_a_flipped_bit_anywhere_is_found_and_the_next_older_is_loaded(tmp_path, name, caplog):
    """C15, C18: it is refused once, with the reason, and never tried again, even if it would be right then."""
    state = {"x": torch.arange(5000.0), "y": "text"}
    directories = []
    with unbroken.Checkpointer(tmp_path, state, keep=None) as run:
        run.resume()
        for _ in range(2):
            state["x"] += 1
            run.step()
            directories.append(tmp_path / run.save().wait().attempt)
    file = directories[-1] / name
    length = file.stat().st_size
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    right = file.read_bytes()
    flip(file, random.Random(seed).randrange(length))
    state["x"].zero_()
    caplog.set_level(logging.INFO, "unbroken")
    with unbroken.Checkpointer(tmp_path, state, keep=None) as run:
        assert run.resume() == 1
        assert torch.equal(state["x"], torch.arange(5000.0) + 1)
    assert directories[-1].name in caplog.text  # with the reason
    file.write_bytes(right)
    again = unbroken.Checkpointer(tmp_path, state, keep=None)
    assert again.resume() == 1
    assert torch.equal(state["x"], torch.arange(5000.0) + 1)
    again.close()


@pytest.mark.parametrize("change", ["removed", "empty", "short", "long"])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__0.json", "manifest.json", ".metadata"])
def test_a_missing_or_short_file_under_a_marker_is_passed_over(tmp_path, name, change):
    state = {"x": torch.arange(5000.0)}
    directories = saved_run(tmp_path, state, steps=2)
    file = directories[-1] / name
    raw = file.read_bytes()
    if change == "removed":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "short": raw[:-1], "long": raw + b"x"}[change])
    with unbroken.Checkpointer(tmp_path, state) as run:
        assert run.resume() == 1


def test_nothing_loadable_is_an_error_that_lists_each_candidate(tmp_path):
    state = {"x": torch.arange(100.0)}
    directories = saved_run(tmp_path, state, steps=3)
    for directory in directories:
        (directory / "__0_0.distcp").write_bytes(b"")
    with unbroken.Checkpointer(tmp_path, state) as run, pytest.raises(errors.NotFoundError) as raised:
        run.resume()
    for directory in directories:
        assert directory.name in str(raised.value)
    with unbroken.Checkpointer(tmp_path, state, allow_fresh=True) as run:
        assert run.resume() == 0


def test_damage_found_only_while_loading_does_not_start_fresh_with_half_a_state(tmp_path):
    state = {"a": torch.arange(3 << 20), "b": torch.arange(3 << 20)}  # several chunks
    (directory,) = saved_run(tmp_path, state)
    flip(directory / "__0_0.distcp", (directory / "__0_0.distcp").stat().st_size - 5000)
    for options in ({}, {"allow_fresh": True}):
        run = unbroken.Checkpointer(tmp_path, state, **options)
        if options:
            # What is known to be bad is not tried again, so nothing is half loaded.
            assert run.resume() == 0
        else:
            with pytest.raises(errors.NotFoundError, match=directory.name):
                run.resume()
            with pytest.raises(ValueError, match="half loaded"):
                run.step()
        run.close()


class Evil:
    """Unpickling this makes a directory."""

    def __init__(self, place):
        self.place = str(place)

    def __reduce__(self):
        return os.mkdir, (self.place,)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_hostile_pickle_in_the_metadata_is_not_run(tmp_path, protocol):
    """T14."""
    for raw in (
        pickle.dumps(Evil(tmp_path / "made"), protocol),
        pickle.dumps({"x": Evil(tmp_path / "made")}, protocol),
        b"cos\nsystem\n(S'mkdir " + str(tmp_path / "made").encode() + b"'\ntR.",
        b"cbuiltins\neval\n(S'1+1'\ntR.",
        b"ctorch\nload\n.",
        b"ctorch.serialization\nload\n.",
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nS'__init__'\ntR.",
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nS'__class__'\ntR.",
    ):
        with pytest.raises(errors.UnsupportedError, match="does not belong"):
            read_metadata(raw)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("by_getattr", [False, True])
def test_metadata_of_every_python_is_read(monkeypatch, protocol, by_getattr):
    """Python 3.11.0 to 3.11.3 pickle the member of an enumeration as a call of getattr, all others do not."""
    kind = dcp_metadata._MEM_FORMAT_ENCODING

    def reduce(self, _protocol):
        return (getattr, (type(self), self.name)) if by_getattr else (type(self), (self.value,))

    monkeypatch.setattr(kind, "__reduce_ex__", reduce)
    tensor = dcp_metadata.TensorStorageMetadata(
        properties=dcp_metadata.TensorProperties(memory_format=torch.channels_last), size=torch.Size([2]), chunks=[]
    )
    raw = pickle.dumps(dcp_metadata.Metadata(state_dict_metadata={"w": tensor}), protocol)
    assert (b"getattr" in raw) == by_getattr
    assert read_metadata(raw).state_dict_metadata["w"].properties.memory_format == torch.channels_last


@pytest.mark.parametrize("raw", [b"", b"garbage", pickle.dumps(3), pickle.dumps({"a": 1}), b"\x80\x04K\x01"])
def test_metadata_that_is_none_is_damage(raw):
    with pytest.raises(errors.DamagedError):
        read_metadata(raw)


def test_a_hostile_pickle_in_an_object_is_not_run(tmp_path):
    raw = io.BytesIO()
    torch.save({"x": Evil(tmp_path / "made")}, raw)
    with pytest.raises(errors.InvalidArgumentError, match=r"'key'.*weights_only"):
        loads("key", raw.getvalue())
    assert not (tmp_path / "made").exists()


def test_a_class_that_is_allowed_is_read(tmp_path):
    state = {"color": Color("red")}
    with unbroken.Checkpointer(tmp_path, state) as run, pytest.raises(ValueError, match="add_safe_globals"):
        run.resume()
    with torch.serialization.safe_globals([Color]):
        saved_run(tmp_path / "run", state)
        loaded = {"color": None}
        unbroken.load(tmp_path / "run", loaded)
    assert loaded["color"].name == "red"


class Color:
    def __init__(self, name):
        self.name = name


def outside(metadata, path):
    for info in metadata.storage_data.values():
        info.relative_path = path


HOSTILE_METADATA = {
    "a function": lambda metadata, root: pickle.dumps(Evil(root / "made")),
    "a function in it": lambda metadata, root: pickle.dumps(metadata_with(metadata, planner_data=Evil(root / "made"))),
    "a parent directory": lambda metadata, root: outside(metadata, "../secret") or pickle.dumps(metadata),
    "an absolute path": lambda metadata, root: outside(metadata, str(root / "secret")) or pickle.dumps(metadata),
    "a file that is not listed": lambda metadata, root: outside(metadata, "manifest.json") or pickle.dumps(metadata),
    "a directory": lambda metadata, root: outside(metadata, ".") or pickle.dumps(metadata),
    "a huge length": lambda metadata, root: lengthen(metadata, 1 << 60) or pickle.dumps(metadata),
    "a negative offset": lambda metadata, root: lengthen(metadata, 8, -8) or pickle.dumps(metadata),
}


def metadata_with(metadata, **changes):
    vars(metadata).update(changes)
    return metadata


def lengthen(metadata, length, offset=0):
    for info in metadata.storage_data.values():
        info.length, info.offset = length, offset


@pytest.mark.parametrize("hostile", HOSTILE_METADATA)
def test_hostile_metadata_whose_checksums_are_right_is_refused(tmp_path, monkeypatch, hostile):
    """Whoever can write the files can write the checksums, too."""
    (tmp_path / "secret").write_bytes(b"x" * 100_000)
    make, real = HOSTILE_METADATA[hostile], MetadataWriter.write
    monkeypatch.setattr(MetadataWriter, "write", lambda *said: [make(pickle.loads(b"".join(real(*said))), tmp_path)])
    state = {"x": torch.arange(10.0), "y": {"z": 1}}
    saved_run(tmp_path / "run", state)
    with pytest.raises(errors.Error):
        unbroken.load(tmp_path / "run", state)
    with unbroken.Checkpointer(tmp_path / "run", state) as run, pytest.raises(errors.Error):
        run.resume()
    assert state["y"] == {"z": 1}
    assert not (tmp_path / "made").exists()


def test_a_hostile_object_whose_checksums_are_right_is_refused(tmp_path, monkeypatch):
    real = _pack.pack

    def pack(key, value, *, check):
        return real(key, Evil(tmp_path / "made"), check=False) if key == "y.z" else real(key, value, check=check)

    state = {"x": torch.arange(10.0), "y": {"z": 1}}
    with monkeypatch.context() as patched:
        patched.setattr(_pack, "pack", pack)
        saved_run(tmp_path / "run", state)
    state["x"].zero_()
    with unbroken.Checkpointer(tmp_path / "run", state) as run, pytest.raises(ValueError, match=r"y\.z.*weights_only"):
        run.resume()
    assert not (tmp_path / "made").exists()
    assert state["x"].count_nonzero() == 0


def test_archives_hold_what_zip_tools_expect(tmp_path):
    """Each tensor's archive is a ZIP file by itself: `unzip` finds its records."""
    state = {"x": torch.arange(10.0)}
    (directory,) = saved_run(tmp_path, state)
    metadata = read_metadata((directory / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        raw = (directory / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            assert any(name.endswith("/data.pkl") for name in archive.namelist()), index
