"""The random numbers that a sample sees: functions of (seed, epoch, sample), never of a worker or a moment."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["Seeds", "generator", "preserved", "seed_globals"]

Seeds = tuple[int, int, int, int]  # of python, numpy, torch, and of the generator that is handed over
_LOW_32_BITS = 0xFFFFFFFF


def seed_globals(seeds: Seeds) -> None:
    """Seeds python's, numpy's and torch's (CPU) global generators, from separate hashes."""
    random.seed(seeds[0])
    # An array would take all 64 bits, at four times the cost. torch's generator uses the low 32 bits, too.
    np.random.seed(seeds[1] & _LOW_32_BITS)
    # Not torch.manual_seed: it also reaches for accelerators, which costs 100 times as much and does not belong here.
    torch.default_generator.manual_seed(seeds[2])


def generator(seeds: Seeds) -> torch.Generator:
    """A generator of its own, on the CPU."""
    return torch.Generator().manual_seed(seeds[3])


@contextmanager
def preserved() -> Iterator[None]:
    """The global generators are afterwards as they were before."""
    python, numpy, cpu = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
