"""Checkpoints that two ranks saved, each its part: the export has whole tensors."""

import logging
from pathlib import Path

import pytest
import torch
from export_parts import read_export, same
from ranks import run_ranks

import unbroken

RANKS = 2
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(__file__).parent / "export_world.py", RANKS, directory, [], timeout=240)
    for rank in range(RANKS):
        assert (directory / f"done.{rank}").exists(), (directory / f"log.{rank}").read_text()
    return directory


@pytest.mark.parametrize("size", ["5GB", 40])
@pytest.mark.parametrize(
    ("name", "whole"), [("fsdp", "fsdp"), ("stock", "fsdp"), ("drop-in", "fsdp"), ("spread", "spread")]
)
def test_sharded_tensors_are_exported_whole(saved, tmp_path, name, whole, size):
    unbroken.export_safetensors(saved / name, tmp_path / "out", max_shard_size=size)
    assert same(read_export(tmp_path / "out"), torch.load(saved / f"{whole}.pt"))


def test_where_ranks_differed_the_lowest_is_taken_and_it_is_said(saved, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="unbroken"):
        unbroken.export_safetensors(saved / "differing", tmp_path / "out")
    assert same(read_export(tmp_path / "out"), {"own": torch.zeros(3), "common": torch.ones(2)})
    assert "different values of model.own;" in caplog.text
