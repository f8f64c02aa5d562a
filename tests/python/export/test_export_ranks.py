"""Checkpoints that two ranks saved, each its part: the export has whole tensors."""

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from export_parts import read_export, same

import unbroken

RANKS = 2
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    program = Path(__file__).parent / "export_world.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, program, directory],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank in range(RANKS):
        assert (directory / f"done.{rank}").exists(), said[rank]
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
