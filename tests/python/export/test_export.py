"""What is exported: every dtype and shape, from each kind of checkpoint, read by the safetensors package itself."""

import json
import logging
import math

import pytest
import torch
from export_parts import (
    INDEX,
    SINGLE,
    bits,
    header_of,
    read_export,
    same,
    save_drop_in,
    save_run,
    save_stock,
)
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import unbroken
from unbroken import errors

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
SAVERS = {"run": save_run, "stock": save_stock, "drop-in": save_drop_in}
saved_by = pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS.keys())


def random_bits(dtype, *shape):
    """NaNs with payloads among them."""
    generator = torch.Generator().manual_seed(len(str(dtype)) + sum(shape))
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (math.prod(shape) * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


@saved_by
def test_every_dtype_bit_for_bit(tmp_path, save):
    state = {str(dtype): random_bits(dtype, 5, 3) for dtype in DTYPES}
    save(tmp_path / "c", {"model": state})
    unbroken.export_safetensors(tmp_path / "c", tmp_path / "out")
    assert same(read_export(tmp_path / "out"), state)
    header = header_of(tmp_path / "out" / SINGLE)
    assert {key: entry["dtype"] for key, entry in header.items() if key in state} == {
        str(dtype): name for dtype, name in DTYPES.items()
    }


def test_the_bytes_are_the_tensors_without_any_package(tmp_path):
    state = {"a": random_bits(torch.bfloat16, 3, 5), "b": random_bits(torch.int64, 2), "c": random_bits(torch.bool, 3)}
    save_run(tmp_path / "run", {"model": state})
    unbroken.export_safetensors(tmp_path / "run", tmp_path / "out")
    raw = (tmp_path / "out" / SINGLE).read_bytes()
    data = raw[8 + int.from_bytes(raw[:8], "little") :]
    for name, entry in header_of(tmp_path / "out" / SINGLE).items():
        if name in state:
            begin, end = entry["data_offsets"]
            assert data[begin:end] == bits(state[name])
            assert entry["shape"] == list(state[name].shape)
            here = torch.frombuffer(bytearray(data[begin:end]), dtype=state[name].dtype).view(entry["shape"])
            assert bits(here) == bits(state[name])
            assert begin % state[name].element_size() == 0  # so that it can be mapped


@saved_by
def test_shapes_and_layouts(tmp_path, save):
    complex_ = random_bits(torch.complex64, 6)
    state = {
        "0-dim": torch.tensor(7.5),
        "0-numel": torch.zeros(0, 3),
        "0-numel in the middle": torch.zeros(4, 0, 3, dtype=torch.int8),
        "size 1": torch.ones(1, 1),
        "transposed": random_bits(torch.float32, 3, 4).t(),
        "channels_last": random_bits(torch.float32, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": random_bits(torch.float64, 3).expand(4, 3),
        "every second": random_bits(torch.int16, 10)[::2],
        "conj": complex_.conj(),
        "neg": complex_.conj().imag,
        "parameter": nn.Parameter(torch.ones(2, 2)),
    }
    save(tmp_path / "c", {"model": state})
    unbroken.export_safetensors(tmp_path / "c", tmp_path / "out")
    assert same(read_export(tmp_path / "out"), state)


@saved_by
@pytest.mark.parametrize("shape", [(10_000_000,), (3, 3_100_000), (1, 2, 5_000_000), (9_000_001, 1)])
def test_a_tensor_larger_than_what_is_read_at_once(tmp_path, save, shape):
    state = {"before": torch.ones(3), "large": torch.arange(math.prod(shape), dtype=torch.int32).view(shape)}
    save(tmp_path / "c", {"model": state})
    unbroken.export_safetensors(tmp_path / "c", tmp_path / "out")
    assert same(read_export(tmp_path / "out"), state)


@saved_by
def test_many_small_ones_of_all_sizes(tmp_path, save):
    dtypes = [torch.float64, torch.bfloat16, torch.uint8, torch.float32]
    state = {f"layers.{i}.w": random_bits(dtypes[i % 4], i % 7, 1 + i % 11) for i in range(600)}
    save(tmp_path / "c", {"model": state})
    unbroken.export_safetensors(tmp_path / "c", tmp_path / "out", max_shard_size=2000)
    assert same(read_export(tmp_path / "out"), state)


def test_files_are_filled_in_order_and_a_larger_tensor_has_one_to_itself(tmp_path):
    sizes = {"a": 400, "b": 600, "c": 1, "d": 3000, "e": 999, "f": 1}
    state = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    save_run(tmp_path / "run", {"model": state})
    result = unbroken.export_safetensors(tmp_path / "run", tmp_path / "out", max_shard_size=1000)
    assert same(read_export(tmp_path / "out"), state)
    where = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert {name: int(file[6:11]) for name, file in where.items()} == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4, "f": 4}
    assert result.files == (*(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)), INDEX)
    assert (result.tensors, result.bytes, result.step) == (6, 5001, 1)


@pytest.mark.parametrize(
    ("size", "files"), [(8000, 1), ("8KB", 1), ("7.9KB", 2), ("4 kb", 2), ("3999B", 2), ("8GiB", 1), ("1", 2)]
)
def test_the_size_of_a_shard(tmp_path, size, files):
    save_run(tmp_path / "run", {"model": {"a": torch.zeros(1000), "b": torch.zeros(1000)}})
    result = unbroken.export_safetensors(tmp_path / "run", tmp_path / "out", max_shard_size=size)
    assert len([name for name in result.files if name != INDEX]) == files


@pytest.mark.parametrize("size", [0, -1, True, "", "GB", "5 parsecs", "-5GB", "0", "1e3", "٣GB"])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    save_run(tmp_path / "run", {"model": {"a": torch.zeros(1)}})
    with pytest.raises(errors.InvalidArgumentError, match="max_shard_size"):
        unbroken.export_safetensors(tmp_path / "run", tmp_path / "out", max_shard_size=size)
    assert not (tmp_path / "out").exists()


# --- what is taken ---------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


class WithExtra(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def get_extra_state(self):
        return {"scale": 3, "history": torch.ones(4)}

    def set_extra_state(self, state):
        pass


def test_tied_weights_are_there_under_each_name(tmp_path):
    model = Tied()
    save_run(tmp_path / "run", {"model": model, "optim": torch.optim.AdamW(model.parameters())})
    result = unbroken.export_safetensors(tmp_path / "run", tmp_path / "out")
    found = read_export(tmp_path / "out")
    assert same(found, model.state_dict())
    assert result.tensors == len(found) == 7
    other = Tied()
    other.load_state_dict(found)
    assert torch.equal(other.head.weight, model.embed.weight)


def test_what_is_no_tensor_is_skipped_and_named(tmp_path, caplog):
    model = nn.ModuleDict({"a": WithExtra(), "b": nn.Linear(2, 3)})
    save_run(tmp_path / "run", {"model": model})
    with caplog.at_level(logging.WARNING, logger="unbroken"):
        result = unbroken.export_safetensors(tmp_path / "run", tmp_path / "out")
    assert set(read_export(tmp_path / "out")) == {"a.inner.weight", "a.inner.bias", "b.weight", "b.bias"}
    assert result.skipped
    assert all(name.startswith("model.a._extra_state") for name in result.skipped)
    assert "model.a._extra_state" in caplog.text


ODD = {
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
    "sparse_coo": lambda: torch.ones(2, 3).to_sparse(),
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("save", "word"),
    [(save, word) for save in SAVERS for word in ODD if (save, word) != ("stock", "sparse_coo")],  # it saves none
)
def test_a_tensor_that_safetensors_cannot_hold_is_refused_by_name(tmp_path, save, word):
    SAVERS[save](tmp_path / "c", {"model": {"fine": torch.ones(2), "odd.one": ODD[word]()}})
    with pytest.raises(errors.Error, match=r"model\.odd\.one") as raised:
        unbroken.export_safetensors(tmp_path / "c", tmp_path / "out")
    assert isinstance(raised.value, errors.UnsupportedError)
    assert word in str(raised.value)
    assert not (tmp_path / "out").exists()


@saved_by
def test_an_entry_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path, save):
    state = {"net": {"w": torch.ones(2)}, "ema": {"deep": {"w": torch.zeros(2)}}, "loss": 1.5, "bare": torch.ones(1)}
    save(tmp_path / "c", state)
    for key in ("model", "ne", "loss", "net.w"):
        with pytest.raises(errors.InvalidArgumentError, match="'net', 'ema', 'bare'") as raised:
            unbroken.export_safetensors(tmp_path / "c", tmp_path / "out", key=key)
        assert repr(key) in str(raised.value)
    assert not (tmp_path / "out").exists()
    unbroken.export_safetensors(tmp_path / "c", tmp_path / "out", key="ema.deep")
    assert same(read_export(tmp_path / "out"), {"w": torch.zeros(2)})
    unbroken.export_safetensors(tmp_path / "c", tmp_path / "all", key="")
    assert set(read_export(tmp_path / "all")) == {"net.w", "ema.deep.w", "bare"}


def test_random_numbers_and_notes_are_no_weights(tmp_path):
    save_run(tmp_path / "run", {"model": nn.Linear(2, 2), "meta": {3: "three"}})
    result = unbroken.export_safetensors(tmp_path / "run", tmp_path / "out", key="")
    assert set(read_export(tmp_path / "out")) == {"model.weight", "model.bias"}
    assert result.skipped == ("meta.3",)


def test_a_bare_state_dict_of_stock(tmp_path):
    model = nn.Linear(3, 2)
    save_stock(tmp_path / "c", model.state_dict())
    unbroken.export_safetensors(tmp_path / "c", tmp_path / "out", key="")
    assert same(read_export(tmp_path / "out"), model.state_dict())


def test_which_checkpoint(tmp_path):
    model = nn.Linear(2, 2)
    attempts, weights = [], []
    with unbroken.Checkpointer(tmp_path / "run", {"model": model}, keep=None, signals=False) as run:
        run.resume()
        for _ in range(3):
            with torch.no_grad():
                model.weight.add_(1)
            run.step()
            attempts.append(run.save().wait().attempt)
            weights.append({k: v.detach().clone() for k, v in model.state_dict().items()})
    export = unbroken.export_safetensors
    assert export(tmp_path / "run", tmp_path / "newest").step == 3
    assert same(read_export(tmp_path / "newest"), weights[2])
    assert export(tmp_path / "run", tmp_path / "second", step=2).checkpoint == attempts[1]
    assert same(read_export(tmp_path / "second"), weights[1])
    assert export(tmp_path / "run" / attempts[0], tmp_path / "first").step == 1
    assert same(read_export(tmp_path / "first"), weights[0])
    (tmp_path / "run" / attempts[2] / ".metadata").unlink()
    export(tmp_path / "run", tmp_path / "older")
    assert same(read_export(tmp_path / "older"), weights[1])
    with pytest.raises(errors.NotFoundError, match="of step 9"):
        export(tmp_path / "run", tmp_path / "none", step=9)
    with pytest.raises(errors.InvalidArgumentError, match="no step to choose"):
        export(tmp_path / "run" / attempts[0], tmp_path / "none", step=1)
    with pytest.raises(errors.NotFoundError, match=r"no \.metadata"):
        export(tmp_path / "newest", tmp_path / "none")
    with pytest.raises(errors.NotFoundError):
        export(tmp_path / "absent", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_it_claims_nothing_and_a_run_goes_on(tmp_path):
    model = nn.Linear(2, 2)
    with unbroken.Checkpointer(tmp_path / "run", {"model": model}, signals=False) as run:
        run.resume()
        run.step()
        run.save().wait()
        before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
        unbroken.export_safetensors(tmp_path / "run", tmp_path / "out")
        assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before
        run.step()
        assert run.save().wait().state == "durable"


# --- names -----------------------------------------------------------------------------------------------------------

NAMES = ["a/b", "../../etc/passwd", "/abs", "", " ", "\x1b[2J", "a\nb", '"quoted"', "ünï ☃", "\u202eevil", "a" * 3000]


@saved_by
def test_any_name_of_a_tensor_is_a_name_of_a_tensor(tmp_path, save):
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(NAMES)}
    save(tmp_path / "c", {"model": state})
    for size in (10**9, 1):
        unbroken.export_safetensors(tmp_path / "c", tmp_path / str(size), max_shard_size=size)
        assert same(read_export(tmp_path / str(size)), state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "1000000000", "c"]


@pytest.mark.parametrize("name", ["__metadata__", "lone \udc80"])
def test_a_name_that_the_format_cannot_hold_is_refused(tmp_path, name):
    save_stock(tmp_path / "c", {"model": {name: torch.ones(1)}})
    with pytest.raises(errors.InvalidArgumentError, match="export '"):
        unbroken.export_safetensors(tmp_path / "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- stock PyTorch's own converter -----------------------------------------------------------------------------------


def test_dcp_to_torch_save_of_stock_reads_ours(tmp_path):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    attempt = save_run(tmp_path / "run", {"model": model, "optim": optimizer})
    dcp_to_torch_save(tmp_path / "run" / attempt, tmp_path / "all.pt")
    assert same(torch.load(tmp_path / "all.pt", weights_only=False)["model"], model.state_dict())
    save_drop_in(tmp_path / "drop-in", {"model": model.state_dict()})
    dcp_to_torch_save(tmp_path / "drop-in", tmp_path / "all.pt")
    assert same(torch.load(tmp_path / "all.pt", weights_only=False)["model"], model.state_dict())


def test_one_file_is_read_by_load_file(tmp_path):
    model = nn.Linear(4, 4)
    save_run(tmp_path / "run", {"model": model})
    unbroken.export_safetensors(tmp_path / "run", tmp_path / "out")
    assert same(load_file(tmp_path / "out" / SINGLE), model.state_dict())
