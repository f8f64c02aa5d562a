"""`python -m unbroken`: the parts of the `unbroken` command that need torch. docs/cli.md describes them.

Data goes to stdout, words to stderr, as with the rest of the command, which hands over to this.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TextIO

from unbroken import _engine, errors

if TYPE_CHECKING:
    from unbroken.checkpoint._export import Exporter

__all__ = ["main"]

_OK, _FAILED, _USAGE, _UNREADABLE = range(4)
_INTERRUPTED = 130
_EXIT_CODES = {
    errors.DamagedError: _FAILED,
    errors.NotFoundError: _FAILED,
    errors.UnsupportedError: _FAILED,
    errors.InvalidArgumentError: _USAGE,
}
_HINTS = {
    errors.AlreadyExistsError: "--force replaces it, when the new files are written",
    errors.DamagedError: "unbroken verify names all that is damaged; --step takes an older checkpoint",
    errors.NotFoundError: "unbroken ls ROOT shows what is there",
    errors.NoSpaceError: "free some space, or give a directory on another disk; nothing is left of this export",
    errors.PermissionDeniedError: "run it as a user who may read ROOT and write OUT",
}
_EPILOG = """\
Writes model.safetensors, or several files and their index, as Hugging Face tools read them. Shards of all
ranks are put together; every byte read is verified. Until all is written, OUT does not change.

Exit codes:
  0  done
  1  ROOT cannot be exported: damaged, no complete checkpoint, or something that safetensors cannot hold
  2  the command line is wrong, or names what is not in the checkpoint
  3  ROOT cannot be read, or OUT not be written

Examples:
  unbroken export runs/7 models/7
  unbroken export runs/7 models/7 --step 1200 --max-shard-size 2GB
  unbroken export runs/7 models/7 --dry-run         what would be written
  unbroken export runs/7/step-1200-g7-4f1c9a2e models/7 --key ema
"""


def _printable(text: str) -> str:
    """Names come from outside: none may move the cursor or fake a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _painted(stream: TextIO, colour: int, text: str) -> str:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb" or not stream.isatty()
    return text if plain else f"\x1b[{colour}m{text}\x1b[0m"


def _say(text: str) -> None:
    print(_printable(text), file=sys.stderr)


def _fail(message: str, hint: str = "") -> None:
    print(_painted(sys.stderr, 31, "error:"), _printable(message), file=sys.stderr)
    if hint:
        print(_painted(sys.stderr, 33, "hint:"), _printable(hint), file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(message, f"{self.prog} --help")
        sys.exit(_USAGE)


class _Log(logging.Handler):
    """Says what the package logs, while in a with."""

    def emit(self, record: logging.LogRecord) -> None:
        _say(f"{record.levelname.lower()}: {record.getMessage()}")

    def __enter__(self) -> Self:
        logger = logging.getLogger("unbroken")
        logger.addHandler(self)
        logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("unbroken")
        logger.removeHandler(self)
        logger.propagate = True


class _Progress:
    """One line that is written over, on a terminal only."""

    _INTERVAL_SECONDS = 0.1

    def __init__(self, title: str) -> None:
        self._title = _printable(title)
        self._shown = sys.stderr.isatty()
        self._begin = time.monotonic()
        self._last = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._shown or now - self._last < self._INTERVAL_SECONDS:
            return
        self._last = now
        rate = done / max(now - self._begin, 1e-9)
        percent = 100 * done / max(total, 1)
        line = f"{self._title}: {percent:.0f} % of {_size(total)}, {_size(int(rate))}/s"
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._last = 0.0


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _step(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: those are whole numbers from 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="unbroken export",
        description="Write the weights of a checkpoint as safetensors",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("root", metavar="ROOT", help="the root of a run, or the directory of one checkpoint")
    parser.add_argument("out", metavar="OUT", help="the directory to write to; it is made when it is not there")
    parser.add_argument("--step", type=_step, metavar="N", help="the checkpoint of this step; without, the newest")
    parser.add_argument("--key", default="model", help="the entry of the state to export (model); '' is all of it")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file: 5GB, 500MiB (5GB)")
    parser.add_argument("--force", action="store_true", help="replace an export that is in OUT")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/cli.md describes it)")
    return parser


def _document(exporter: Exporter, options: argparse.Namespace) -> dict[str, Any]:
    result = exporter.result
    return {
        "root": options.root,
        "out": options.out,
        "checkpoint": result.checkpoint,
        "step": result.step,
        "key": options.key,
        "dry_run": options.dry_run,
        "tensors": result.tensors,
        "total_size": result.bytes,
        "files": [
            {"file": s.file, "bytes": len(s.header()) + s.data_bytes, "tensors": len(s.weights)}
            for s in exporter.shards
        ],
        "index": result.files[-1] if len(exporter.shards) > 1 else None,
        "skipped": list(result.skipped),
    }


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:
        # So that Python does not try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise errors.IoError(f"write to standard output: {error.strerror}") from error


def _text(document: dict[str, Any]) -> str:
    width = max(len(one["file"]) for one in document["files"])
    lines = [f"{one['file']:{width}}  {_size(one['bytes']):>10}  {one['tensors']} tensors" for one in document["files"]]
    return "\n".join([*lines, *([document["index"]] if document["index"] else [])])


def _export(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        _engine.open_store(options.root)
    except errors.Error as error:
        _fail(str(error), "ROOT is the directory that the run's Checkpointer was given, or that of one checkpoint")
        return _UNREADABLE
    # torch is imported when the command line is known to be right.
    from unbroken.checkpoint._export import Exporter
    from unbroken.checkpoint._export_out import check_out

    check_out(options.out, overwrite=options.force)
    exporter = Exporter(options.root, step=options.step, key=options.key, max_shard_size=options.max_shard_size)
    document = _document(exporter, options)
    if options.dry_run:
        if document["skipped"]:
            _say(f"would be skipped, as no weights: {', '.join(document['skipped'])}")
    else:
        progress = _Progress(f"export {document['checkpoint']}")
        try:
            exporter.write(options.out, overwrite=options.force, progress=progress)
        finally:
            progress.clear()
    _print(json.dumps(document, indent=2) if options.json else _text(document))
    if not options.json:
        said = "would be written" if options.dry_run else "written"
        _say(f"{document['tensors']} tensors, {_size(document['total_size'])}, of {document['checkpoint']}: {said}")
    return _OK


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    if list(arguments[:1]) != ["export"]:
        _fail("python -m unbroken has the command export only", "the other commands are those of `unbroken`")
        return _USAGE
    try:
        with _Log():
            return _export(arguments[1:])
    except errors.Error as error:
        kinds = type(error).__mro__
        hint = next((_HINTS[kind] for kind in kinds if kind in _HINTS), "")
        _fail(str(error), hint)
        return next((_EXIT_CODES[kind] for kind in kinds if kind in _EXIT_CODES), _UNREADABLE)
    except ImportError as error:
        _fail(f"export needs torch: {error}", f"{sys.executable} -m pip install torch")
        return _UNREADABLE
    except KeyboardInterrupt:
        _fail("interrupted; nothing was exported")
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
