"""A PyTorch training run that fails goes on as if it had not.

    with unbroken.Checkpointer(root, {"model": model, "optim": optimizer}, loader=loader,
                               every=unbroken.Every(steps=500)) as run:
        for batch in run.batches(until=100_000):
            train(batch)

Or, with torch.distributed.checkpoint as you have it:

    dcp.save(state, storage_writer=unbroken.UnbrokenWriter(path))
    dcp.load(state, storage_reader=unbroken.UnbrokenReader(path))

`unbroken.load` reads for evaluation, `unbroken.export_safetensors` writes weights for other tools, `unbroken.data` has
the loader, `unbroken.errors` what is raised. What needs torch is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from unbroken._engine import version as __version__

if TYPE_CHECKING:
    from unbroken import data, errors
    from unbroken.checkpoint import (
        EXIT_STOPPED,
        Checkpointer,
        Every,
        Export,
        Keep,
        Save,
        UnbrokenReader,
        UnbrokenWriter,
        export_safetensors,
        load,
    )

__all__ = [
    "EXIT_STOPPED",
    "Checkpointer",
    "Every",
    "Export",
    "Keep",
    "Save",
    "UnbrokenReader",
    "UnbrokenWriter",
    "__version__",
    "data",
    "errors",
    "export_safetensors",
    "load",
]

_MODULES = ("data", "errors")
_CHECKPOINT = (
    "EXIT_STOPPED",
    "Checkpointer",
    "Every",
    "Export",
    "Keep",
    "Save",
    "UnbrokenReader",
    "UnbrokenWriter",
    "export_safetensors",
    "load",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"unbroken.{name}")
    if name in _CHECKPOINT:
        value = getattr(importlib.import_module("unbroken.checkpoint"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'unbroken' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
