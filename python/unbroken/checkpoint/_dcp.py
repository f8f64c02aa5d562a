"""The drop-ins for torch.distributed.checkpoint."""

from unbroken.checkpoint._dcp_reader import UnbrokenReader
from unbroken.checkpoint._dcp_writer import UnbrokenWriter

__all__ = ["UnbrokenReader", "UnbrokenWriter"]
