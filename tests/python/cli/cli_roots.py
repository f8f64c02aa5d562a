"""The real command on real roots: lives and saves by the engine itself, damage by hand."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

from unbroken import _engine

STEP_BYTES = 9_000_000  # three chunks of 4 MiB, the last one short
CHUNK = 4 * 1024 * 1024


def binary():
    """UNBROKEN_CLI, or the command that is installed beside this Python, or that of the search path."""
    beside = pathlib.Path(sys.prefix) / "bin" / "unbroken"
    found = os.environ.get("UNBROKEN_CLI") or (str(beside) if beside.exists() else shutil.which("unbroken"))
    assert found, "the unbroken command is not installed: make install, or set UNBROKEN_CLI"
    return found


@dataclasses.dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    def hints(self):
        return [line for line in self.err.splitlines() if line.startswith("hint: ")]

    def rows(self):
        """The lines of a table, by the name of the attempt."""
        lines = self.out.splitlines()[1:]
        return {
            re.search(r"(\S+)(  .*)?$", line[line.index("step-") :]).group(0).split("  ")[0]: line for line in lines
        }


def run(*arguments, env=None, **options):
    done = subprocess.run(
        [binary(), *map(os.fsencode, arguments)],
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, **(env or {})},
        **options,
    )
    return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())


class Life:
    """One life of a run with one rank, from its start on; saves when told."""

    def __init__(self, root, *, host="node-3", step=None, allow_fresh=False):
        self.store = _engine.open_store(str(root), create=True)
        self.board = _engine.MemoryBoard()
        self.recovery = _engine.Recovery(
            self.store, self.board, rank=0, world_size=1, host=host, step=step, allow_fresh=allow_fresh
        )
        self.start = self.recovery.begin()
        self.generation = self.start.generation
        self._saver = None

    def settle(self, verdict="loaded", reason=""):
        """What the rank reports of its load; with damage the engine falls back, as a new life."""
        following = self.recovery.settle(verdict, reason)
        if following is not None:
            self.start = following
            self.generation = following.generation
            self.settle()
        return self

    def save(self, step, size=STEP_BYTES):
        """Commits a checkpoint of `step`; the directory's name."""
        if self._saver is None:
            self._saver = _engine.Saver(self.store, self.board, self.start, rank=0, world_size=1)
        builder = _engine.ImageBuilder(0)
        builder.add_tensor(b"head", size, b"tail")
        image = builder.build()
        decision = self._saver.decide(step, due=True)
        assert decision.action == "save"
        outcome = self._saver.commit(
            image,
            step=step,
            attempt=decision.attempt,
            sequence=decision.sequence,
            structure="s",
            metadata=lambda slots: [b"what DCP would pickle"],
        )
        assert outcome.state == "durable", outcome.reason
        return outcome.attempt_path


def flip(path, offset):
    """Turns one bit of a file over."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def crc32c(data):
    """Bit by bit, from RFC 3720, so that the tests do not trust the engine's."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def reseal(path, change):
    """Changes the body of a sealed document and seals it again, as a program of another version would."""
    body = json.loads(path.read_bytes())["body"]
    change(body)
    text = json.dumps(body, separators=(",", ":")).encode()
    path.write_bytes(b'{"crc32c":"%08x","body":%s}\n' % (crc32c(text), text))


def snapshot(root):
    """Everything that a write would change, access times apart."""
    return {
        str(path): (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        for path in sorted([root, *root.rglob("*")])
        for status in [path.lstat()]
    }
