"""The loader with one process: iterating, completing, its state, and what it refuses."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_helpers import Failing, Numbers, indices, random_state, take

from unbroken.data import DataLoader, GlobalBatchSampler, LoaderBusyError, Place, StateMismatchError
from unbroken.errors import Error, InvalidArgumentError, UnsupportedError


def loader(samples: int = 100, batch: int = 10, **arguments: Any) -> DataLoader:
    return DataLoader(Numbers(samples), global_batch_size=batch, seed=5, **arguments)


# Iterating


def test_gives_the_batches_of_the_sampler_under_torchs_own_loader() -> None:
    stock = torch.utils.data.DataLoader(
        Numbers(100), batch_sampler=GlobalBatchSampler(100, global_batch_size=12, seed=5, dp_rank=1, dp_size=3)
    )
    ours = loader(batch=12, dp_rank=1, dp_size=3)
    assert [indices(batch) for batch in ours] == [indices(batch) for batch in stock]
    assert len(ours) == 8


def test_each_loop_is_the_next_epoch_and_forever_goes_over_their_ends() -> None:
    ours, endless = loader(25), loader(25)
    epochs = [indices(batch) for _ in range(3) for batch in ours]
    assert len(epochs) == 6
    assert take(endless.forever(), 6) == epochs
    assert ours.place == endless.place == (3, 0)


def test_wrapped_epochs_join_without_a_gap() -> None:
    ours = loader(25, epoch_end="wrap")
    seen = [index for _ in range(4) for batch in ours for index in indices(batch)]
    assert len(seen) % 10 == 0
    for epoch in range(4):
        assert sorted(seen[25 * epoch : 25 * (epoch + 1)]) == list(range(25))


def test_batches_left_are_those_that_come() -> None:
    for epoch_end in ("drop", "wrap", "keep"):
        ours = loader(25, epoch_end=epoch_end)
        for _ in range(3):
            left = ours.batches_left
            assert len(list(ours)) == left


def test_micro_batches_are_one_item() -> None:
    ours, whole = loader(micro_batches=5, dp_rank=1, dp_size=2, with_indices=True), loader(dp_rank=1, dp_size=2)
    for item, batch in zip(ours, whole, strict=True):
        assert [part.tolist() for part, _ in item] == [numbers for _, numbers in item]
        assert [len(numbers) for _, numbers in item] == [1] * 5
        assert [index for _, numbers in item for index in numbers] == indices(batch)
    assert ours.delivered == 10


def test_indices_and_the_place_of_each_batch_are_told() -> None:
    ours = loader(25, with_indices=True)
    assert ours.last is None
    list(ours)
    for number, (batch, numbers) in enumerate(ours):
        assert batch.tolist() == numbers
        assert ours.last is not None
        assert (ours.last.epoch, ours.last.offset, ours.last.samples) == (1, 10 * number, 10)
        assert ours.last.indices == numbers
        assert ours.last.weights == (1.0,)


def test_weights_of_balanced_shares_give_the_mean_over_the_global_batch() -> None:
    ranks = [loader(23, 11, uneven="balanced", micro_batches=2, dp_rank=rank, dp_size=4) for rank in range(4)]
    for items in zip(*ranks, strict=True):
        numbers = [index for item in items for index in indices(item)]
        averaged = 0.0
        for one, item in zip(ranks, items, strict=True):
            assert one.last is not None
            averaged += sum(
                weight * part.double().mean().item() for weight, part in zip(one.last.weights, item, strict=True)
            )
        assert averaged / 4 == pytest.approx(sum(numbers) / len(numbers))
        assert len(numbers) == 11


def test_ranks_that_get_nothing_of_a_short_last_batch_end_earlier_at_the_same_place() -> None:
    ranks = [loader(22, 8, epoch_end="keep", shuffle=False, dp_rank=rank, dp_size=8) for rank in range(8)]
    seen = [[indices(batch) for batch in one] for one in ranks]
    assert [len(one) for one in seen] == [3] * 6 + [2] * 2
    assert sorted(index for one in seen for batch in one for index in batch) == list(range(22))
    assert len({json.dumps(one.state_dict()) for one in ranks}) == 1
    assert ranks[7].state_dict()["samples_total"] == 22
    with pytest.raises(ValueError, match="'keep'"):
        ranks[7].forever()
    with pytest.raises(ValueError, match="'keep'"):
        ranks[0].attach()


def test_evaluation_sees_each_sample_once_in_order() -> None:
    ours = loader(23, 8, epoch_end="keep", shuffle=False)
    for _ in range(2):
        assert [indices(batch) for batch in ours] == [list(range(8)), list(range(8, 16)), list(range(16, 23))]


def test_d7_ranks_have_equally_many_batches_of_equal_size() -> None:
    sizes = [[len(batch) for batch in loader(103, 8, dp_rank=rank, dp_size=4)] for rank in range(4)]
    assert sizes == [[2] * 12] * 4


def test_second_iterator_is_refused_until_the_first_has_ended() -> None:
    ours = loader()
    first = iter(ours)
    next(first)
    with pytest.raises(LoaderBusyError, match=r"loader.close\(\)") as raised:
        iter(ours)
    assert isinstance(raised.value, RuntimeError)
    assert raised.value.code == "loader_busy"
    with pytest.raises(LoaderBusyError):
        ours.forever()
    assert len(list(first)) == 9
    assert len(list(ours)) == 10


@pytest.mark.parametrize("how", ["close", "collect", "loader", "break"])
def test_abandoned_iterator_frees_the_loader_and_its_place_stays(how: str) -> None:
    whole = take(loader().forever(), 20)
    ours = loader()
    seen = []
    if how == "break":
        for batch in ours:
            seen.append(indices(batch))
            if len(seen) == 3:
                break
    else:
        iterator = iter(ours)
        seen += take(iterator, 3)
        if how == "close":
            iterator.close()  # type: ignore[attr-defined]
        elif how == "loader":
            ours.close()
        if how != "collect":
            with pytest.raises(LoaderBusyError, match="anew"):
                next(iterator)
        del iterator
        gc.collect()
    assert ours.place == (0, 30)
    assert seen + [indices(batch) for batch in ours] == whole[:10]


def test_exhausted_iterator_stays_exhausted() -> None:
    ours = loader()
    iterator = iter(ours)
    list(iterator)
    assert next(iterator, None) is None
    assert ours.place == (1, 0)


def test_evaluation_while_training_touches_nothing_of_it() -> None:
    whole = take(loader().forever(), 12)
    ours, evaluation = loader(), loader(17, 8, shuffle=False, epoch_end="keep")
    seen = []
    for batch in ours.forever():
        seen.append(indices(batch))
        assert len(list(evaluation)) == 3
        if len(seen) == 12:
            break
    assert seen == whole


def test_sample_that_cannot_be_read_is_named_and_not_skipped() -> None:
    ours = DataLoader(Failing(40), global_batch_size=4, seed=5, with_indices=True)
    read: list[int] = []
    iterator = iter(ours)
    with pytest.raises(OSError, match=r"13\.png") as raised:
        read.extend(index for _, numbers in iterator for index in numbers)
    assert "sample 13 of epoch 0" in "".join(raised.value.__notes__)
    with pytest.raises(LoaderBusyError):
        next(iterator)
    assert ours.place == (0, len(read))
    with pytest.raises(OSError, match=r"13\.png"):
        next(iter(ours))


# Completed is not delivered


def test_place_is_that_of_the_last_completed_batch() -> None:
    ours = loader()
    ours.attach()
    iterator = iter(ours)
    states = [ours.state_dict()]
    for number in range(10):
        next(iterator)
        assert ours.state_dict() == states[-1], "a batch that was delivered, and not trained, moved the place"
        ours.complete()
        states.append(ours.state_dict())
        assert ours.completed == ours.delivered == number + 1
    assert [(state["epoch"], state["offset"]) for state in states] == [(0, 10 * i) for i in range(10)] + [(1, 0)]
    assert [state["samples_total"] for state in states] == [10 * i for i in range(11)]


def test_batch_fetched_ahead_of_its_step_is_not_in_the_place() -> None:
    ours = loader()
    ours.attach()
    iterator = ours.forever()
    take(iterator, 1)
    for step in range(1, 15):
        take(iterator, 1)  # the next one, before this one's step
        ours.complete()
        assert ours.state_dict()["samples_total"] == 10 * step
        assert (ours.delivered, ours.completed) == (step + 1, step)


def test_several_batches_complete_at_once_and_no_more_than_were_delivered() -> None:
    ours = loader()
    ours.attach()
    take(iter(ours), 3)
    for wrong in (4, 0, -1):
        with pytest.raises(InvalidArgumentError, match="3 delivered"):
            ours.complete(wrong)
    ours.complete(2)
    assert ours.state_dict()["offset"] == 20
    ours.complete()
    with pytest.raises(InvalidArgumentError, match="0 delivered"):
        ours.complete()


def test_batches_that_an_abandoned_iterator_delivered_untrained_come_again() -> None:
    whole = take(loader().forever(), 10)
    ours = loader()
    ours.attach()
    iterator = iter(ours)
    assert take(iterator, 4) == whole[:4]
    ours.complete(2)
    del iterator
    assert [indices(batch) for batch in ours] == whole[2:]
    assert (ours.delivered, ours.completed) == (10, 2)


def test_step_after_its_iterator_is_gone_counts() -> None:
    whole = take(loader().forever(), 12)
    ours = loader()
    ours.attach()
    seen = []
    for _ in range(12):
        seen.append(indices(next(iter(ours))))
        ours.complete()
    assert seen == whole


def test_epoch_that_ended_before_its_last_step_is_not_repeated() -> None:
    whole = take(loader().forever(), 20)
    ours = loader()
    ours.attach()
    first = [indices(batch) for batch in ours]
    ours.complete(9)
    second = iter(ours)
    assert first + take(second, 1) == whole[:11]
    assert ours.state_dict()["offset"] == 90
    ours.complete()
    assert ours.state_dict()["epoch"] == 1
    ours.complete()
    assert ours.state_dict()["offset"] == 10


def test_without_a_checkpointer_the_place_is_that_of_delivered_batches() -> None:
    ours = loader()
    iterator = iter(ours)
    take(iterator, 3)
    assert ours.state_dict()["offset"] == 30
    assert ours.completed == ours.delivered == 3
    with pytest.raises(InvalidArgumentError, match="not attached"):
        ours.complete()
    with pytest.raises(LoaderBusyError):
        ours.attach()


def test_detached_the_place_is_that_of_delivered_batches_again() -> None:
    ours = loader()
    ours.attach()
    iterator = iter(ours)
    take(iterator, 3)
    ours.complete()
    ours.detach()
    assert ours.state_dict()["offset"] == 30
    take(iterator, 1)
    assert ours.state_dict()["offset"] == 40
    assert ours.state_dict()["samples_total"] == 40


# State


def test_state_is_small_json_and_quick_after_any_number_of_batches() -> None:
    ours = DataLoader(
        Numbers(10**9, identity="é" * 5000), global_batch_size=10**5, seed=2**64 - 1, dp_rank=7, dp_size=10**4
    )
    ours.load_state_dict(ours.state_dict() | {"epoch": 10**6, "offset": 10**9 - 10**6, "samples_total": 10**15})
    take(ours.forever(), 12)
    started = time.perf_counter()
    state = ours.state_dict()
    elapsed = time.perf_counter() - started
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 1000
    assert set(state) == {
        *("format", "seed", "epoch", "offset", "samples_total", "global_batch_size", "order", "dataset"),
    }
    print(f"state_dict(): {elapsed * 1e6:.0f} us")


def test_state_of_fresh_loaders_is_the_same_on_every_rank() -> None:
    assert len({json.dumps(loader(12, 4, dp_rank=rank, dp_size=4).state_dict()) for rank in range(4)}) == 1


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"samples": 101}, ["'Numbers' of 100 samples", "'Numbers' of 101 samples"]),
        ({"identity": "digits-2"}, ["'Numbers' of 100", "'digits-2' of 100"]),
        ({"seed": 6}, ["seed 5", "seed 6", "pass seed=5"]),
        ({"shuffle": False}, ["'shuffle': True", "'shuffle': False"]),
        ({"epoch_end": "wrap"}, ["'drop'", "'wrap'"]),
    ],
)
def test_state_of_another_order_is_refused_with_both_named(other: dict[str, Any], said: list[str]) -> None:
    state = loader().state_dict()
    arguments = {"samples": 100, "global_batch_size": 10, "seed": 5} | other
    there = DataLoader(Numbers(arguments.pop("samples")), **arguments)
    with pytest.raises(StateMismatchError) as raised:
        there.load_state_dict(state)
    for part in said:
        assert part in str(raised.value)
    assert isinstance(raised.value, ValueError)
    assert there.place == (0, 0)


def test_states_of_newer_versions_and_nonsense_are_refused() -> None:
    ours = loader()
    state = ours.state_dict()
    with pytest.raises(UnsupportedError, match="format 2"):
        ours.load_state_dict(state | {"format": 2})
    nonsense: list[Any] = [
        {},
        {"format": 1},
        state | {"offset": -1},
        state | {"offset": 2**63 + 1},
        state | {"epoch": 1.5},
        state | {"epoch": 2**63},
        state | {"format": "1"},
        state | {"order": "drop"},
        state | {"dataset": None},
        state | {"offset": 101},
        {key: value for key, value in state.items() if key != "seed"},
    ]
    for wrong in nonsense:
        with pytest.raises(InvalidArgumentError):
            ours.load_state_dict(wrong)
    assert ours.place == (0, 0)


def test_identity_is_the_argument_or_the_datasets_own_or_its_type() -> None:
    def identity(dataset: Any, **arguments: Any) -> str:
        state = DataLoader(dataset, global_batch_size=2, **arguments).state_dict()
        return str(state["dataset"]["identity"])

    assert identity(Numbers(4)) == "Numbers"
    assert identity([1, 2, 3]) == "list"
    assert identity(Numbers(4, identity="train-v1")) == "train-v1"
    assert identity(Numbers(4, identity="train-v1"), identity="mine") == "mine"
    long = identity(Numbers(4), identity="x" * 10_000)
    assert long.startswith("sha256:")
    assert len(long) == 71
    assert long != identity(Numbers(4), identity="x" * 10_001)
    with pytest.raises(TypeError, match="identity"):
        identity(Numbers(4), identity=3)


def test_d24_loading_under_a_live_iterator_is_refused_and_applied_after_it() -> None:
    state = loader().state_dict() | {"offset": 40, "samples_total": 40}
    ours = loader()
    iterator = iter(ours)
    with pytest.raises(LoaderBusyError, match="load a state"):
        ours.load_state_dict(state)
    next(iterator)
    with pytest.raises(LoaderBusyError):
        ours.load_state_dict(state)
    ours.close()
    ours.load_state_dict(state)
    assert ours.place == Place(0, 40)
    assert [indices(batch) for batch in ours] == take(loader().forever(), 10)[4:]


def test_another_batch_size_goes_on_from_the_place_unless_strict() -> None:
    whole = [index for batch in loader() for index in indices(batch)]
    state = loader().state_dict() | {"offset": 40, "samples_total": 40}
    ours = loader(batch=6)
    with pytest.raises(StateMismatchError, match="global_batch_size 10"):
        ours.load_state_dict(state, strict=True)
    ours.load_state_dict(state)
    assert [index for batch in ours for index in indices(batch)] == whole[40:]
    larger = loader(batch=64)
    larger.load_state_dict(state)
    assert larger.place == (1, 0), "60 samples do not fill a batch of 64"


# Resuming: every stop, any way to be stopped


@st.composite
def lives(draw: st.DrawFn) -> tuple[dict[str, Any], int, list[tuple[int, int, bool]]]:
    """Sizes of a run, and its lives: (ranks, batches, whether the batch after the last is fetched in vain)."""
    samples = draw(st.integers(1, 40))
    epoch_end = draw(st.sampled_from(["drop", "wrap"]))
    unit = draw(st.sampled_from([1, 2, 4, 6]))
    limit = samples if epoch_end == "drop" else 60
    if unit > limit:
        unit = 1
    batch = unit * draw(st.integers(1, limit // unit))
    worlds = [world for world in (1, 2, 3, 6) if batch % world == 0]
    stops = st.tuples(st.sampled_from(worlds), st.integers(0, 7), st.booleans())
    return {"samples": samples, "batch": batch, "epoch_end": epoch_end}, samples, draw(st.lists(stops, max_size=6))


@given(run=lives())
@settings(deadline=None, max_examples=200)
def test_d4_d19_stopped_anywhere_and_resumed_on_any_ranks_the_batches_are_the_same(
    run: tuple[dict[str, Any], int, list[tuple[int, int, bool]]],
) -> None:
    arguments, samples, stops = run
    undisturbed = take(loader(**arguments).forever(), sum(count for _, count, _ in stops))
    state, seen = loader(**arguments).state_dict(), []
    for ranks, count, fetch_in_vain in stops:
        loaders = [loader(**arguments, dp_rank=rank, dp_size=ranks) for rank in range(ranks)]
        shares = []
        for one in loaders:
            one.load_state_dict(json.loads(json.dumps(state)))
            one.attach()
            iterator = one.forever()
            shares.append([])
            for _ in range(count):
                shares[-1] += take(iterator, 1)
                one.complete()
            if fetch_in_vain:
                next(iterator)
        seen += [[index for part in parts for index in part] for parts in zip(*shares, strict=True)]
        assert len({json.dumps(one.state_dict()) for one in loaders}) == 1
        state = loaders[0].state_dict()
    assert seen == undisturbed
    assert state["samples_total"] == len(seen) * arguments["batch"]
    if arguments["epoch_end"] == "wrap":
        flat = [index for batch in seen for index in batch]
        for start in range(0, len(flat) - samples, samples):
            assert sorted(flat[start : start + samples]) == list(range(samples))


def test_d1_state_saved_exactly_at_the_end_of_an_epoch_resumes_with_a_whole_next_one() -> None:
    for ended in (True, False):
        ours = loader(95)
        iterator = iter(ours)
        take(iterator, 9)
        if ended:
            assert next(iterator, None) is None
        again = loader(95)
        again.load_state_dict(ours.state_dict())
        assert again.place == (1, 0)
        assert again.batches_left == 9
        assert [indices(batch) for batch in again] == take(loader(95).forever(), 18)[9:]


def test_d2_resume_after_every_batch_and_twice_in_a_row() -> None:
    whole = take(loader(35, 4).forever(), 24)
    for stop in range(24):
        first, second = loader(35, 4), loader(35, 4)
        take(first.forever(), stop)
        second.load_state_dict(first.state_dict())
        third = loader(35, 4)
        third.load_state_dict(second.state_dict())
        assert third.state_dict() == first.state_dict()
        assert take(third.forever(), 24 - stop) == whole[stop:]


def test_state_before_the_first_batch_is_the_start() -> None:
    ours, again = loader(), loader()
    iter(ours)
    again.load_state_dict(ours.state_dict())
    assert [indices(batch) for batch in again] == [indices(batch) for batch in loader()]


# The trainer's own random numbers


def test_iterating_draws_nothing_from_the_trainers_generators() -> None:
    torch.manual_seed(3)
    before = random_state()
    ours = loader()
    iterator = iter(ours)
    assert random_state() == before
    list(iterator)
    next(ours.forever())
    assert random_state() == before
    failing = DataLoader(Failing(14), global_batch_size=14)
    with pytest.raises(OSError, match="13"):
        next(iter(failing))
    assert random_state() == before, "not even when a sample fails"


class Stream(torch.utils.data.IterableDataset[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("dataset", [iter([1, 2]), object(), Stream()])
def test_datasets_without_numbered_samples_are_refused(dataset: Any) -> None:
    with pytest.raises(TypeError, match="map-style"):
        DataLoader(dataset, global_batch_size=1)


def test_errors_are_the_packages_own() -> None:
    for kind in (LoaderBusyError, StateMismatchError):
        assert issubclass(kind, Error)
        assert not kind.retryable
