"""unbroken.load() of one checkpoint's directory: what stock DCP wrote, what UnbrokenWriter wrote, and a run's step."""

import collections

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_parts import bits, differences, save_ours, save_stock
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import unbroken
from unbroken import errors


class Training:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[1:].parameters(), "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(6, 4)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
        return self

    def stock_state(self):
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "scheduler": self.scheduler,
            "notes": {"losses": [1.5, 2.5], 3: "three", "empty": {}},
        }

    def state(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "notes": {"losses": [], 3: "", "empty": {}},
        }


def everything(training):
    return {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
    }


@pytest.mark.parametrize("save", [save_stock, save_ours])
def test_a_whole_training_state(save, tmp_path):
    saved, loaded = Training(1).train(3), Training(2)
    save(saved.stock_state(), tmp_path / "c")
    state = loaded.state()
    assert unbroken.load(tmp_path / "c", state) == 0
    assert not differences(everything(loaded), everything(saved))
    assert state["notes"] == {"losses": [1.5, 2.5], 3: "three", "empty": {}}
    assert type(loaded.scheduler.milestones) is collections.Counter
    torch.manual_seed(5)
    saved.train(3)
    torch.manual_seed(5)
    loaded.train(3)
    assert not differences(everything(loaded), everything(saved))


@pytest.mark.parametrize("save", [save_stock, save_ours])
def test_the_model_alone_and_chosen_values(save, tmp_path):
    saved, loaded = Training(1).train(3), Training(2)
    save(saved.stock_state(), tmp_path / "c")
    before = everything(loaded)["scheduler"]
    unbroken.load(tmp_path / "c", {"model": loaded.model})
    assert not differences(loaded.model.state_dict(), saved.model.state_dict())
    assert loaded.scheduler.state_dict() == before


def test_what_does_not_fit_is_listed_and_nothing_changes(tmp_path):
    saved, loaded = Training(1).train(1), Training(2)
    loaded.model.append(nn.Linear(2, 2))
    save_stock(saved.stock_state(), tmp_path / "c")
    before = {name: bits(value) for name, value in loaded.model.state_dict().items()}
    with pytest.raises(errors.InvalidArgumentError, match=r"model\.3\.weight"):
        unbroken.load(tmp_path / "c", {"model": loaded.model})
    with pytest.raises(errors.InvalidArgumentError, match="nothing"):
        unbroken.load(tmp_path / "c", {"model": saved.model, "nothing": 3})
    assert {name: bits(value) for name, value in loaded.model.state_dict().items()} == before
    unbroken.load(tmp_path / "c", {"model": loaded.model}, strict=False)
    assert torch.equal(loaded.model[0].weight, saved.model[0].weight)


def test_a_missing_mapping_with_number_keys_is_missing(tmp_path):
    save_stock({"a": 1, "b": {"x": 2}}, tmp_path / "c")
    with pytest.raises(errors.InvalidArgumentError, match="numbers"):
        unbroken.load(tmp_path / "c", {"a": 0, "numbers": {3: 4}})
    state = {"a": 0, "b": {"x": 0, 7: "kept"}}
    with pytest.raises(errors.InvalidArgumentError, match=r"b\.7"):
        unbroken.load(tmp_path / "c", state)
    unbroken.load(tmp_path / "c", state, strict=False)
    assert state == {"a": 1, "b": {"x": 2, 7: "kept"}}


def test_a_step_of_a_run_and_its_root(tmp_path):
    training = Training(1).train(2)
    with unbroken.Checkpointer(tmp_path, {"model": training.model}) as run:
        run.resume()
        for _ in range(7):
            run.step()
        attempt = run.save().wait().attempt
    for path in (tmp_path, tmp_path / attempt):
        other = Training(2)
        assert unbroken.load(path, {"model": other.model}) == 7
        assert not differences(other.model.state_dict(), training.model.state_dict())
    with pytest.raises(errors.InvalidArgumentError, match="no step"):
        unbroken.load(tmp_path / attempt, {"model": training.model}, step=7)


def test_a_hostile_object_is_not_run(tmp_path):
    class Hostile:
        def __reduce__(self):
            return open, (str(tmp_path / "victim"), "w")

    save_stock({"a": Hostile(), "w": torch.ones(3)}, tmp_path / "c")
    target = torch.zeros(3)
    with pytest.raises(errors.InvalidArgumentError, match="'a'"):
        unbroken.load(tmp_path / "c", {"a": None, "w": target})
    assert not (tmp_path / "victim").exists()
    assert torch.equal(target, torch.zeros(3))
    unbroken.load(tmp_path / "c", {"w": target})
    assert torch.equal(target, torch.ones(3))


def test_what_ranks_saved_alone_is_pointed_to_the_reader(tmp_path):
    dcp.save({"a": 1}, checkpoint_id=tmp_path, use_collectives=False, no_dist=True)
    with pytest.raises(errors.NotFoundError):
        unbroken.load(tmp_path, {"a": 0})
