"""Options say what is wrong with them."""

import pytest

import unbroken


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: unbroken.Every(), "steps="),
        (lambda: unbroken.Every(steps=0), "at least 1"),
        (lambda: unbroken.Every(steps=2.5), "whole number"),
        (lambda: unbroken.Every(steps=True), "whole number"),
        (lambda: unbroken.Every(seconds=0), "over 0"),
        (lambda: unbroken.Every(seconds=float("nan")), "over 0"),
        (lambda: unbroken.Keep(last=0), "keep=None keeps all"),
        (lambda: unbroken.Keep(every_steps=0), "at least 1"),
    ],
)
def test_wrong_options_are_refused_with_the_reason(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()


def test_options_do_not_change():
    with pytest.raises(AttributeError):
        unbroken.Every(steps=3).steps = 4


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"state": [1, 2]}, "give a dict"),
        ({"state": {1: 2}}, "names are strings"),
        ({"state": {"rng/rank_00000/torch": 2}}, "rng/"),
        ({"state": {"unbroken/x": 2}}, "unbroken/"),
        ({"state": {}, "every": 100}, "Every"),
        ({"state": {}, "keep": 3}, "Keep"),
        ({"state": {}, "vote_timeout": 0}, "over 0"),
    ],
)
def test_wrong_arguments_of_the_checkpointer_are_refused_with_the_reason(tmp_path, arguments, reason):
    with pytest.raises(ValueError, match=reason):
        unbroken.Checkpointer(tmp_path, **arguments)


def test_a_world_without_torch_distributed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="init_process_group"):
        unbroken.Checkpointer(tmp_path, {"x": 1})
