"""DCP's .metadata as we write and read it."""

import gc
import pickle

import pytest
import torch
from torch.distributed.checkpoint import metadata

from unbroken.checkpoint._metadata import no_collection, read_metadata, write_metadata


def test_the_search_for_cycles_is_left_as_it_was():
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with no_collection(), no_collection():
                assert not gc.isenabled()
            assert gc.isenabled() == enabled
            with pytest.raises(KeyError), no_collection():
                raise KeyError
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


def test_metadata_of_many_entries_comes_back():
    index = metadata.MetadataIndex("x", torch.Size([0]))
    many = metadata.Metadata({f"x{i}": metadata.BytesStorageMetadata() for i in range(20_000)}, storage_data={index: 1})
    raw = write_metadata(many)
    assert pickle.loads(raw) == many
    assert read_metadata(raw) == many
