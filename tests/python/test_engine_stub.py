"""The stub of the extension is a golden copy: what types are checked against is what the extension offers."""

import pathlib
import subprocess
import sys

STUB = pathlib.Path(__file__).parents[2] / "python" / "unbroken" / "_engine.pyi"


def test_the_golden_stub_is_what_the_extension_offers(tmp_path):
    made = tmp_path / "_engine.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "unbroken._engine", "-o", str(made)]
    subprocess.run(command, check=True)
    assert made.read_text() == STUB.read_text(), "the extension has changed: run `make docs` to write the stub anew"
