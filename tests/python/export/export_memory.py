"""`export_memory.py ROOT OUT MAX_SHARD_SIZE`: by how many bytes the export raises the peak of resident memory."""

import sys
from pathlib import Path

import torch

import unbroken


def peak() -> int:
    """Not getrusage's, which begins with what the parent had."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def main() -> None:
    root, out, size = sys.argv[1:]
    torch.set_num_threads(1)
    # What only the first export takes, such as imports, is no part of it.
    unbroken.export_safetensors(Path(root) / "tiny", Path(out) / "tiny")
    before = peak()
    unbroken.export_safetensors(Path(root) / "large", Path(out) / "large", max_shard_size=size)
    print(peak() - before)


if __name__ == "__main__":
    main()
