"""Forks a process for each save, stopped before it begins, for test_crash.py to have strace kill it somewhere.

Reads "<directory> <number>" lines; answers with the child's pid, and with its wait status when it has ended.
"""

import os
import signal
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp

import unbroken


def a_state(number):
    return {f"t{i}": torch.full((2000,), float(number)) for i in range(10)} | {"n": number, "text": "x" * number}


def main():
    warnings.simplefilter("ignore")
    a_state(0)
    assert unbroken.UnbrokenWriter  # imported here: what the child opens is the checkpoint
    for line in sys.stdin:
        directory, number = line.split()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            writer = unbroken.UnbrokenWriter(directory, overwrite=True)
            dcp.save(a_state(int(number)), storage_writer=writer, no_dist=True)
            os._exit(0)
        os.waitpid(child, os.WUNTRACED)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
