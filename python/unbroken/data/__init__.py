"""Training data in an exact order: the same samples for any number of ranks and workers, and a place to go on from."""

from unbroken.data._loader import BatchInfo, DataLoader
from unbroken.data._order import EpochEnd, Place, Uneven
from unbroken.data._sampler import GlobalBatchSampler
from unbroken.data._source import MapDataset
from unbroken.errors import LoaderBusyError, StateMismatchError

__all__ = [
    "BatchInfo",
    "DataLoader",
    "EpochEnd",
    "GlobalBatchSampler",
    "LoaderBusyError",
    "MapDataset",
    "Place",
    "StateMismatchError",
    "Uneven",
]
