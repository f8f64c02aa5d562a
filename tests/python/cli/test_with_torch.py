"""The command on what the package and stock DCP write."""

import torch
import torch.distributed.checkpoint as dcp
from cli_roots import flip, run

import unbroken


def live(root, *, steps):
    """One life of a run that saves after each step; the attempts."""
    model = torch.nn.Linear(4, 3)
    with unbroken.Checkpointer(root, {"model": model}, keep=None) as run_:
        run_.resume()
        attempts = []
        for _ in range(steps):
            run_.step()
            attempts.append(run_.save().wait().attempt)
    return attempts


def test_lives_of_a_real_run(tmp_path):
    root = tmp_path / "run"
    saved = live(root, steps=2) + live(root, steps=1)
    attempts = run("ls", root, "--json").json["attempts"]
    assert [attempt["attempt"] for attempt in attempts] == saved[::-1]
    assert {attempt["state"] for attempt in attempts} == {"complete"}
    assert [attempt["step"] for attempt in attempts] == [3, 2, 1]
    assert run("verify", root, "--all").code == 0
    lives = run("why", root, "--json").json["generations"]
    assert [life["origin"].get("attempt") for life in lives] == [None, saved[1]]


def test_what_verify_finds_is_what_a_start_refuses(tmp_path):
    root = tmp_path / "run"
    saved = live(root, steps=2)
    for path in (root / saved[1]).glob("*.distcp"):
        flip(path, path.stat().st_size // 2)
    assert run("verify", root).code == 1
    live(root, steps=1)
    lives = run("why", root, "--json").json["generations"]
    assert lives[-1]["origin"]["attempt"] == saved[0]
    refused = [refusal["attempt"] for life in lives for refusal in life["refused"]]
    assert refused == [saved[1]]


def test_a_checkpoint_of_stock_dcp_is_foreign(tmp_path):
    root = tmp_path / "run"
    (saved,) = live(root, steps=1)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=root / "stock", no_dist=True)
    document = run("ls", root, "--json").json
    assert [(a["attempt"], a["state"]) for a in document["attempts"]] == [(saved, "complete"), ("stock", "foreign")]
    answer = run("verify", root / "stock")
    assert answer.code == 1
    assert "no checksums to verify" in answer.out
