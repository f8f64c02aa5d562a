"""Checkpoints of a training run: see unbroken.Checkpointer."""

from unbroken.checkpoint._checkpointer import Checkpointer
from unbroken.checkpoint._dcp import UnbrokenReader, UnbrokenWriter
from unbroken.checkpoint._evaluate import load
from unbroken.checkpoint._export import Export, export_safetensors
from unbroken.checkpoint._loader import Loader
from unbroken.checkpoint._options import Every, Keep
from unbroken.checkpoint._saves import Save, SaveStats, Stats
from unbroken.checkpoint._signals import EXIT_STOPPED

__all__ = [
    "EXIT_STOPPED",
    "Checkpointer",
    "Every",
    "Export",
    "Keep",
    "Loader",
    "Save",
    "SaveStats",
    "Stats",
    "UnbrokenReader",
    "UnbrokenWriter",
    "export_safetensors",
    "load",
]
