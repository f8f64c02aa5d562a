"""A PyTorch training run that fails goes on as if it had not."""

from unbroken._engine import version as __version__

__all__ = ["__version__"]
