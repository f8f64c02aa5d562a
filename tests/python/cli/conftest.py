import os
import pathlib
import shutil
import tempfile

import pytest
from cli_roots import Life

SMALL = 70_000


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    """A run of three lives; the second went on from step 20 although step 30 was there. The newest has three chunks."""
    root = tmp_path_factory.mktemp("pristine") / "run"
    names = {}
    first = Life(root, host="node-1").settle()
    for step in (10, 20, 30):
        names[f"{step}"] = first.save(step, size=SMALL)
    second = Life(root, host="node-2", step=20).settle()
    names["25"] = second.save(25, size=SMALL)
    third = Life(root).settle()
    names["40"] = third.save(40)
    return root, names


@pytest.fixture
def root(pristine, tmp_path):
    return pathlib.Path(shutil.copytree(pristine[0], tmp_path / "run"))


@pytest.fixture
def names(pristine):
    return pristine[1]


@pytest.fixture
def open_directory():
    """A directory that every user can reach, which pytest's own are not."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="unbroken-cli-"))
    path.chmod(0o755)
    yield path
    for directory, _, _ in os.walk(path):  # tests take rights away, and who is not root needs them to remove it
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                pathlib.Path(entry.path).chmod(0o755)
    shutil.rmtree(path)
