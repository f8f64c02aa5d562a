"""A run that was resumed goes on bit for bit as if it had not been interrupted."""

import random

import numpy as np
import pytest
import torch
from checkpoint_parts import OPTIMIZERS, Training, differences

import unbroken


def scramble():
    """What another process would have drawn until it resumes."""
    torch.manual_seed(12345)
    random.seed(99)
    np.random.seed(98)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_in_the_middle_is_exact(tmp_path, optimizer, dtype):
    first = Training(optimizer, dtype=dtype)
    with unbroken.Checkpointer(tmp_path, first.state) as run:
        assert run.resume() == 0
        for _ in range(3):
            first.step()
            run.step()
        run.save().wait()
        saved = first.everything()
        for _ in range(4):
            first.step()
    second = Training(optimizer, seed=7, dtype=dtype)
    scramble()
    with unbroken.Checkpointer(tmp_path, second.state) as run:
        assert run.resume() == 3
        assert not differences(second.everything(), saved)
        for _ in range(4):
            second.step()
    assert not differences(second.everything(), first.everything())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "sgd-momentum"])
def test_resume_into_objects_that_have_trained_is_exact(tmp_path, optimizer):
    """Their optimizer state exists: it is filled in place."""
    first = Training(optimizer)
    with unbroken.Checkpointer(tmp_path, first.state) as run:
        run.resume()
        first.step()
        run.step()
        run.save().wait()
    second = Training(optimizer, seed=7)
    second.step()
    second.step()
    table = next(iter(second.optimizer.state.values()))
    held = {name: value for name, value in table.items() if isinstance(value, torch.Tensor)}
    with unbroken.Checkpointer(tmp_path, second.state) as run:
        assert run.resume() == 1
    assert not differences(second.everything(), first.everything())
    now = next(iter(second.optimizer.state.values()))
    assert all(now[name] is value for name, value in held.items())


def test_saving_changes_nothing(tmp_path):
    """Not the random numbers, not the state, not what comes into being: the run is as one without a Checkpointer."""
    plain = Training()
    for _ in range(5):
        plain.step()
    saved = Training()
    with unbroken.Checkpointer(tmp_path, saved.state, every=unbroken.Every(steps=1)) as run:
        run.resume()
        assert saved.optimizer.state == {}
        for _ in range(5):
            saved.step()
            run.step()
    assert not differences(saved.everything(), plain.everything())


def test_state_of_an_optimizer_is_not_forced_into_being(tmp_path):
    first = Training()
    with unbroken.Checkpointer(tmp_path, first.state) as run:
        run.resume()
        run.save().wait()
        assert first.optimizer.state == {}
        first.step()
        expected = first.everything()
    second = Training(seed=7)
    second.step()
    with unbroken.Checkpointer(tmp_path, second.state) as run:
        assert run.resume() == 0
        assert second.optimizer.state == {}
        second.step()
    assert not differences(second.everything(), expected)


def test_state_in_another_dtype_than_the_parameter_stays_in_it(tmp_path):
    """torch's own load_state_dict() would cast it."""

    def make():
        model = torch.nn.Linear(4, 4).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer

    model, optimizer = make()
    for parameter in model.parameters():
        optimizer.state[parameter]["master"] = torch.randn(parameter.shape, dtype=torch.float64)
        optimizer.state[parameter]["nested"] = {"deep": torch.randn(2), "count": 3}
    with unbroken.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as run:
        run.resume()
        run.step()
        run.save().wait()
    again, other = make()
    with unbroken.Checkpointer(tmp_path, {"model": again, "optimizer": other}) as run:
        run.resume()
    for old, new in zip(model.parameters(), again.parameters(), strict=True):
        assert not differences(dict(other.state[new]), dict(optimizer.state[old]))


def test_parameters_are_matched_by_name_not_by_order(tmp_path):
    def make(names):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in ("a", "b")})
        return model, torch.optim.SGD([model[name].weight for name in names], lr=0.1, momentum=0.9)

    model, optimizer = make("ab")
    for name in "ab":
        optimizer.state[model[name].weight]["momentum_buffer"] = torch.full((2, 2), float(ord(name)))
    with unbroken.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as run:
        run.resume()
        run.step()
        run.save().wait()
    again, other = make("ba")
    with unbroken.Checkpointer(tmp_path, {"model": again, "optimizer": other}) as run:
        run.resume()
    for name in "ab":
        assert torch.equal(other.state[again[name].weight]["momentum_buffer"], torch.full((2, 2), float(ord(name))))


def test_an_optimizer_over_two_modules_and_one_of_no_module(tmp_path):
    def make():
        models = {"one": torch.nn.Linear(2, 2), "two": torch.nn.Linear(2, 2)}
        loose = torch.nn.Parameter(torch.randn(3))
        both = torch.optim.AdamW([p for m in models.values() for p in m.parameters()])
        alone = torch.optim.AdamW([loose])
        return {**models, "both": both, "alone": alone, "loose": loose}

    def train(state):
        loss = state["one"](torch.ones(2)).sum() * state["two"](torch.ones(2)).sum() + state["loose"].sum()
        loss.backward()
        state["both"].step()
        state["alone"].step()

    first = make()
    train(first)
    with unbroken.Checkpointer(tmp_path, first) as run:
        run.resume()
        run.step()
        run.save().wait()
    second = make()
    with unbroken.Checkpointer(tmp_path, second) as run:
        run.resume()
    for name in ("both", "alone"):
        assert not differences(second[name].state_dict(), first[name].state_dict())
    assert torch.equal(second["loose"], first["loose"])


def test_a_frozen_parameter_has_no_state_and_gets_none(tmp_path):
    first = Training()
    first.model.out.weight.requires_grad_(False)
    first.step()
    with unbroken.Checkpointer(tmp_path, first.state) as run:
        run.resume()
        run.step()
        run.save().wait()
        first.model.out.weight.requires_grad_(True)  # from here on it has
        first.step()
        run.step()
        run.save().wait()
    assert run.stats.failed == 0
    second = Training(seed=4)
    assert unbroken.load(tmp_path, second.state, step=2) == 2
    assert not differences(second.optimizer.state_dict(), first.optimizer.state_dict())
    third = Training(seed=4)
    third.step()
    with unbroken.Checkpointer(tmp_path, third.state) as run:
        assert run.resume(step=1) == 1
        assert third.model.out.weight not in third.optimizer.state


@pytest.mark.parametrize("write", ["in place", "through .data", "by the optimizer", "by another storage"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-foreach", "adamw-fused"])
def test_what_is_written_right_after_the_call_is_not_in_the_save(tmp_path, write, optimizer):
    training = Training(optimizer)
    with unbroken.Checkpointer(tmp_path, training.state) as run:
        run.resume()
        training.step()
        run.step()
        for _ in range(4):
            training.step()
            run.step()
            before = training.everything()
            saving = run.save()
            assert saving.staged.done()
            if write == "by the optimizer":
                training.step()
            for tensor in [*training.model.state_dict(keep_vars=True).values(), *_state_tensors(training.optimizer)]:
                if write == "in place":
                    with torch.no_grad():
                        tensor.add_(1)
                elif write == "through .data":
                    tensor.data.mul_(3)
                elif write == "by another storage":
                    tensor.data = torch.zeros_like(tensor)
            saving.wait()
            loaded = Training(optimizer, seed=5)
            unbroken.load(tmp_path, loaded.state)
            for part in ("model", "optimizer", "average"):
                assert not differences(loaded.everything()[part], before[part])


def _state_tensors(optimizer):
    return [value for table in optimizer.state.values() for value in table.values() if isinstance(value, torch.Tensor)]


def test_state_that_is_replaced_is_saved_as_it_is_now(tmp_path):
    """Tables, children and tensors that are other objects than at the last save: no stale one is saved."""
    training = Training("adamw")
    with unbroken.Checkpointer(tmp_path, training.state) as run:
        run.resume()
        training.step()
        run.step()
        run.save().wait()
        weight = training.model.out.weight
        training.optimizer.state[weight] = {k: v.clone().mul_(2) for k, v in training.optimizer.state[weight].items()}
        training.optimizer.param_groups[0]["lr"] = 0.125
        training.average.module.body[0] = torch.nn.Linear(16, 16)
        training.model.body[1].running_mean = torch.full((16,), 0.5)
        training.state["notes"]["new"] = {"deep": [1, torch.ones(1)]}
        run.step()
        run.save().wait()
        training.optimizer.load_state_dict(training.optimizer.state_dict())
        _state_tensors(training.optimizer)[0].fill_(9)
        run.step()
        now = training.everything()
        run.save().wait()
    loaded = Training("adamw", seed=5)
    loaded.state["notes"]["new"] = {"deep": [0, torch.zeros(1)]}
    unbroken.load(tmp_path, loaded.state)
    for part in ("model", "optimizer", "average", "notes"):
        assert not differences(loaded.everything()[part], now[part])


def test_a_compiled_optimizer_step_goes_on_after_a_resume(tmp_path):
    """It may hold on to the tensors of the state: they are filled in place."""

    def make(seed):
        training = Training("adamw-foreach", seed=seed)
        eager = training.optimizer.step
        training.optimizer.step = torch.compile(eager, backend="eager", fullgraph=False)
        return training

    first = make(0)
    with unbroken.Checkpointer(tmp_path, first.state) as run:
        run.resume()
        for _ in range(2):
            first.step()
            run.step()
        saving = run.save()
        first.step()
        saving.wait()
        expected = first.everything()
    second = make(5)
    second.step()
    with unbroken.Checkpointer(tmp_path, second.state) as run:
        assert run.resume() == 2
        second.step()
    assert not differences(second.everything(), expected)
