"""Every kind of tensor: saved by Unbroken and loaded by stock DCP, the other way round, and from an async save."""

import itertools
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_parts import CASES, bits, failure, load_ours, load_stock, save_ours, save_stock
from torch import nn

import unbroken
from unbroken import errors

SAVERS = {"ours": save_ours, "stock": save_stock}
LOADERS = {"ours": load_ours, "stock": load_stock}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("saver", SAVERS)
def test_every_kind_comes_back_bit_for_bit(saver, loader, tmp_path):
    """All in one checkpoint, so that each also lies next to the others."""
    state = {case.name: case.make() for case in CASES}
    SAVERS[saver](state, tmp_path / "c")
    loaded = LOADERS[loader]({case.name: case.blank() for case in CASES}, tmp_path / "c")
    for case in CASES:
        assert loaded[case.name].dtype == state[case.name].dtype
        assert loaded[case.name].shape == state[case.name].shape
        assert bits(loaded[case.name]) == bits(state[case.name]), case


@pytest.mark.parametrize("loader", LOADERS)
def test_an_async_save_has_the_bytes_of_its_moment(loader, tmp_path):
    """S1: everything is changed in place as soon as the call is back, and again and again."""
    writer = unbroken.UnbrokenWriter(tmp_path)
    for step in range(3):  # the first by guess, the others by plan
        state = {case.name: case.make() for case in CASES}
        wanted = {name: bits(tensor) for name, tensor in state.items()}
        saved = dcp.async_save(state, storage_writer=writer, checkpoint_id=tmp_path / f"{step}", no_dist=True)
        with torch.no_grad():
            for tensor in state.values():
                tensor.untyped_storage().fill_(0 if tensor.dtype is torch.bool else 0xA5)
        assert all(bits(state[name]) != wanted[name] for name in wanted if wanted[name])
        saved.result()
        loaded = LOADERS[loader]({case.name: case.blank() for case in CASES}, tmp_path / f"{step}")
        for name, tensor in loaded.items():
            assert bits(tensor) == wanted[name], (step, name)


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path):
    big = torch.arange(4_000_000.0)
    state = {"a": big[5:105], "b": big.view(2000, 2000)[:, 3], "tuple": (big[7:9],)}
    save_ours({"a": state["a"], "b": state["b"]}, tmp_path / "sync")
    dcp.async_save(
        {"a": state["a"], "b": state["b"]}, storage_writer=unbroken.UnbrokenWriter(tmp_path / "async"), no_dist=True
    ).result()
    for name in ("sync", "async"):
        size = sum(path.stat().st_size for path in (tmp_path / name).iterdir())
        assert size < 50_000, name
        loaded = load_stock({"a": torch.zeros(100), "b": torch.zeros(2000)}, tmp_path / name)
        assert torch.equal(loaded["a"], state["a"])
        assert torch.equal(loaded["b"], state["b"])


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_tied_weights_are_saved_once_and_loaded_by_both_names(how, tmp_path):
    embed, head = nn.Linear(300, 200, bias=False), nn.Linear(300, 200, bias=False)
    head.weight = embed.weight
    model = nn.ModuleDict({"embed": embed, "head": head})
    writer = unbroken.UnbrokenWriter(tmp_path / "c")
    saved = getattr(dcp, how)({"model": model.state_dict()}, storage_writer=writer, no_dist=True)
    if how == "async_save":
        saved.result()
    size = sum(path.stat().st_size for path in (tmp_path / "c").iterdir())
    assert 240_000 < size < 300_000
    for load in LOADERS.values():
        apart = {"embed.weight": torch.zeros(200, 300), "head.weight": torch.zeros(200, 300)}
        loaded = load({"model": apart}, tmp_path / "c")["model"]
        assert torch.equal(loaded["embed.weight"], embed.weight)
        assert torch.equal(loaded["head.weight"], embed.weight)
    other = nn.ModuleDict({"embed": nn.Linear(300, 200, bias=False), "head": nn.Linear(300, 200, bias=False)})
    other["head"].weight = other["embed"].weight
    other.load_state_dict(load_ours({"model": other.state_dict()}, tmp_path / "c")["model"])
    assert other["head"].weight is other["embed"].weight
    assert torch.equal(other["head"].weight, embed.weight)


def test_overlapping_tensors_that_are_not_the_same_are_not_tied(tmp_path):
    memory = torch.arange(20.0)
    state = {"a": memory[:10], "b": memory[:10].view(2, 5), "c": memory[:5], "d": memory[:10].view(torch.int32)}
    state["e"] = memory.view(10, 2)[:, 0]
    save_ours(state, tmp_path / "c")
    loaded = load_stock({key: torch.zeros_like(value) for key, value in state.items()}, tmp_path / "c")
    for key, value in state.items():
        assert bits(loaded[key]) == bits(value), key


class Subclass(torch.Tensor):
    pass


def test_a_subclass_is_saved_as_torch_saves_it_and_loaded_where_its_class_is_allowed(tmp_path, caplog):
    tensor = torch.arange(6.0).as_subclass(Subclass)
    tensor.note = "kept"
    save_ours({"x": tensor}, tmp_path / "c")
    assert "x" in caplog.text
    assert "add_safe_globals" in caplog.text
    for load in LOADERS.values():
        error = failure(lambda load=load: load({"x": torch.zeros(6)}, tmp_path / "c"))
        assert "Subclass" in str(error)
    with torch.serialization.safe_globals([Subclass]):
        for load in LOADERS.values():
            assert torch.equal(load({"x": torch.zeros(6)}, tmp_path / "c")["x"], torch.arange(6.0))
            assert torch.equal(load({"x": torch.zeros(6).as_subclass(Subclass)}, tmp_path / "c")["x"], tensor)
    with torch.serialization.safe_globals([Subclass]):
        dcp.async_save({"x": tensor}, storage_writer=unbroken.UnbrokenWriter(tmp_path / "b"), no_dist=True).result()
        assert torch.equal(load_ours({"x": torch.zeros(6)}, tmp_path / "b")["x"], torch.arange(6.0))


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_sparse_tensors_which_stock_cannot_save(how, tmp_path):
    dense = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0]])
    state = {"coo": dense.to_sparse()}
    if torch.__version__ < "2.15":  # DCP's own planner asks for strides since then, which these have not
        state["csr"] = dense.to_sparse_csr()
    assert isinstance(failure(lambda: save_stock(dict(state), tmp_path / "stock")), RuntimeError)
    saved = getattr(dcp, how)(state, storage_writer=unbroken.UnbrokenWriter(tmp_path / "c"), no_dist=True)
    state["coo"].values().zero_() if state["coo"].is_coalesced() else None
    if how == "async_save":
        saved.result()
    like = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    target = {"coo": torch.zeros(2, 3).to_sparse(), "csr": like.to_sparse_csr()}
    loaded = load_ours({name: target[name] for name in state}, tmp_path / "c")
    for name in state:
        assert torch.equal(loaded[name].to_dense(), dense)
    error = failure(lambda: load_ours({"coo": torch.zeros(2, 3)}, tmp_path / "c"))
    assert isinstance(error, errors.InvalidArgumentError)
    assert "'coo'" in str(error)


@pytest.mark.parametrize(("saver", "loader"), list(itertools.product(SAVERS, LOADERS)))
def test_quantised_tensors(saver, loader, tmp_path):
    per_tensor = torch.quantize_per_tensor(torch.arange(6.0), 0.1, 3, torch.qint8)
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    per_channel = torch.quantize_per_channel(torch.arange(6.0).reshape(2, 3), scales, zeros, 0, torch.qint8)
    SAVERS[saver]({"t": per_tensor, "c": per_channel}, tmp_path / "c")
    blank = {
        "t": torch.quantize_per_tensor(torch.zeros(6), 0.1, 3, torch.qint8),
        "c": torch.quantize_per_channel(torch.zeros(2, 3), scales, zeros, 0, torch.qint8),
    }
    loaded = LOADERS[loader](blank, tmp_path / "c")
    assert torch.equal(loaded["t"].int_repr(), per_tensor.int_repr())
    assert torch.equal(loaded["c"].int_repr(), per_channel.int_repr())


@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: torch.ones(3, device="meta"), "meta device"),
        (lambda: torch.empty(8, dtype=torch.int4), "int4"),
        (lambda: (i for i in range(3)), "generator"),
        (lambda: {"deep": [1, lambda: 0]}, "lambda"),
        (lambda: nn.parameter.UninitializedParameter(), "shape"),
    ],
    ids=["meta", "int4", "generator", "function", "lazy"],
)
def test_what_cannot_be_saved_is_refused_by_name_and_leaves_no_checkpoint(how, value, words, tmp_path):
    state = {"good": torch.ones(3), "the.bad one": value()}
    writer = unbroken.UnbrokenWriter(tmp_path / "c")

    def save():
        saved = getattr(dcp, how)(state, storage_writer=writer, no_dist=True)
        if how == "async_save":
            saved.result()

    error = failure(save)
    if isinstance(state["the.bad one"], nn.parameter.UninitializedParameter) and how == "save":
        assert "uninitialized" in str(error).lower()  # DCP's planner comes first, and names no key
    else:
        assert isinstance(error, errors.InvalidArgumentError), error
        assert "the.bad one" in str(error)
        assert words in str(error)
    assert not (tmp_path / "c" / ".metadata").exists()
    state["the.bad one"] = torch.zeros(2)
    save()
    assert torch.equal(load_stock({"good": torch.zeros(3)}, tmp_path / "c")["good"], torch.ones(3))


def test_a_nested_tensor_is_refused_by_name_where_it_is_seen_before_dcp_plans(tmp_path):
    state = {"jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}
    writer = unbroken.UnbrokenWriter(tmp_path / "c")
    error = failure(lambda: dcp.async_save(state, storage_writer=writer, no_dist=True))
    assert "'jagged'" in str(error)
    assert "nested" in str(error)
    failure(lambda: save_ours(state, tmp_path / "c"))  # DCP's planner fails, with words of its own
    assert not (tmp_path / "c" / ".metadata").exists()


def test_an_object_of_over_2_gib_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("unbroken.checkpoint._dcp_writer._OBJECT_BYTES", 10_000)
    error = failure(lambda: save_ours({"long": "x" * 20_000}, tmp_path / "c"))
    assert isinstance(error, errors.InvalidArgumentError)
    assert "'long'" in str(error)
    assert "10000" in str(error)


def test_tensors_of_over_a_piece_are_cut_and_loaded_by_both(tmp_path, monkeypatch):
    """The size of a piece is made small; what follows from it is the same."""
    monkeypatch.setattr("unbroken.checkpoint._plan._PIECE_BYTES", 4096)
    state = {
        "rows": torch.arange(5000.0).reshape(500, 10),
        "columns": torch.arange(6000.0).reshape(2, 3000),
        "deep": torch.arange(4096.0).reshape(1, 2, 2, 1024),
        "transposed": torch.arange(3000.0).reshape(30, 100).t(),
        "expanded": torch.arange(50.0).expand(100, 50),
        "small": torch.arange(9.0),
        "complex": torch.view_as_complex(torch.randn(1500, 2)),
        "sparse": torch.eye(100).to_sparse(),
        "step": 3,
    }
    tied = state["rows"].view(500, 10)
    for how in ("save", "async_save"):
        path = tmp_path / how
        saved = getattr(dcp, how)(state | {"tied": tied}, storage_writer=unbroken.UnbrokenWriter(path), no_dist=True)
        if how == "async_save":
            saved = saved.result()
        assert len(saved.state_dict_metadata["rows"].chunks) == 5
        assert len(saved.state_dict_metadata["columns"].chunks) == 6
        assert len(saved.state_dict_metadata["deep"].chunks) == 4
        assert len(saved.state_dict_metadata["small"].chunks) == 1
        assert {saved.storage_data[i].offset for i in saved.storage_data if i.fqn == "rows"} == {
            saved.storage_data[i].offset for i in saved.storage_data if i.fqn == "tied"
        }
        for load in LOADERS.values():
            blank = {
                key: torch.zeros_like(value)
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and value.layout is torch.strided
            }
            loaded = load(blank | {"step": 0}, path)
            for key in blank:
                assert bits(loaded[key]) == bits(state[key]), key
            assert loaded["step"] == 3


_HUGE = pytest.mark.skipif("UNBROKEN_HUGE" not in os.environ, reason="takes 16 GiB of memory: set UNBROKEN_HUGE=1")


@pytest.mark.slow
@pytest.mark.parametrize("gib", [1.5, pytest.param(4.25, marks=_HUGE)])
def test_really_large_tensors(gib, tmp_path):
    rows = int(gib * (1 << 18))
    tensor = torch.empty(rows, 4096, dtype=torch.uint8)
    tensor.random_(generator=torch.Generator().manual_seed(3))
    save_ours({"x": tensor}, tmp_path / "c")
    assert max(path.stat().st_size for path in (tmp_path / "c").iterdir()) <= 2 << 30
    for load in LOADERS.values():
        assert torch.equal(load({"x": torch.zeros_like(tensor)}, tmp_path / "c")["x"], tensor)
