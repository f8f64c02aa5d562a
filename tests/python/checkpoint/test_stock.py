"""Stock torch.distributed.checkpoint reads every checkpoint, in a process that cannot import unbroken."""

import json
import os
import subprocess
import sys
import textwrap

import torch
from checkpoint_parts import Training, differences

import unbroken

STOCK = """
    import importlib.abc, pathlib, sys
    class No(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "unbroken":
                raise ImportError("this process cannot import unbroken")
    sys.meta_path.insert(0, No())
    sys.path.insert(0, sys.argv[3])
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
    )
    from checkpoint_parts import Training
    for directory in pathlib.Path(sys.argv[1]).iterdir():
        training = Training(directory.name, seed=11)
        state = {
            "model": get_model_state_dict(training.model),
            "optimizer": get_optimizer_state_dict(training.model, training.optimizer),
            "scheduler": training.scheduler,
            "scaler": training.scaler,
            "average": training.average.state_dict(),
            "notes": {"best": 0.0, "losses": []},
        }
        dcp.load(state, checkpoint_id=next(directory.glob("step-*")), no_dist=True)
        set_model_state_dict(training.model, state["model"])
        set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"])
        training.average.load_state_dict(state["average"])
        training.state["notes"].update(state["notes"])
        torch.save(training.everything(), pathlib.Path(sys.argv[2]) / f"{directory.name}.pt")
    assert "unbroken" not in sys.modules
"""


def run_stock(script, *arguments):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    here = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments[:2]), here, *map(str, arguments[2:])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_stock_dcp_loads_what_was_saved(tmp_path):
    saved = {}
    for optimizer in ("adamw", "adamw-fused", "sgd-momentum"):
        training = Training(optimizer)
        with unbroken.Checkpointer(tmp_path / "runs" / optimizer, training.state) as run:
            run.resume()
            for _ in range(3):
                training.step()
                run.step()
            run.save().wait()
        saved[optimizer] = training.everything()
    run_stock(STOCK, tmp_path / "runs", tmp_path)
    for optimizer, expected in saved.items():
        loaded = torch.load(tmp_path / f"{optimizer}.pt", weights_only=False)
        for part in ("model", "optimizer", "scaler", "average"):
            assert not differences(loaded[part], expected[part]), optimizer
        assert loaded["scheduler"]["last_epoch"] == expected["scheduler"]["last_epoch"]
        assert loaded["notes"]["losses"] == expected["notes"]["losses"]


TO_TORCH = """
    import sys
    sys.modules["unbroken"] = None
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    dcp_to_torch_save(sys.argv[1], sys.argv[2])
"""


def test_stock_conversion_to_one_file(tmp_path):
    training = Training()
    with unbroken.Checkpointer(tmp_path / "run", training.state) as run:
        run.resume()
        training.step()
        run.step()
        attempt = run.save().wait().attempt
    run_stock(TO_TORCH, tmp_path / "run" / attempt, tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=False)
    assert not differences(loaded["model"], training.everything()["model"])
    assert set(loaded) >= {"model", "optimizer", "scheduler", "scaler", "average", "notes"}


def test_objects_that_shrank_and_grew_are_read_by_stock_dcp_too(tmp_path):
    """torch's ZIP reader does not find the end of every archive that is followed by padding."""
    state = {"text": "", "others": {str(i): i for i in range(5)}}
    script = """
        import sys
        sys.modules["unbroken"] = None
        import torch.distributed.checkpoint as dcp
        import pathlib, json
        wanted = json.loads(pathlib.Path(sys.argv[2]).read_text())
        for directory, length in wanted.items():
            state = {"text": "", "others": {str(i): 0 for i in range(5)}}
            dcp.load(state, checkpoint_id=directory, no_dist=True)
            assert len(state["text"]) == length, (directory, length, len(state["text"]))
            assert state["others"] == {str(i): i for i in range(5)}
    """
    lengths = [1, 10, 500, 900, 3000, 4096, 9000, 100, 3, 30_000, 1000, 70_000, 300, 200_000, 70_000, 2, 5000, 7000]
    wanted = {}
    with unbroken.Checkpointer(tmp_path / "run", state, keep=None) as run:
        run.resume()
        for length in lengths:
            state["text"] = "x" * length
            run.step()
            wanted[str(tmp_path / "run" / run.save().wait().attempt)] = length
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    run_stock(script, "-", tmp_path / "wanted.json")
