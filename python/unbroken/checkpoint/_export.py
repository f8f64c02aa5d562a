"""Writing the weights of a checkpoint as safetensors."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from unbroken import _engine
from unbroken.checkpoint._export_out import Out, check_out
from unbroken.checkpoint._foreign import MARKER, open_directory
from unbroken.checkpoint._pack import fingerprint
from unbroken.checkpoint._reader import CheckpointReader, Reading, Saved, Target
from unbroken.checkpoint._safetensors import DTYPES, INDEX, Shard, Weight, bytes_of, index_of, shards_of
from unbroken.checkpoint._state import RESERVED, is_values_key
from unbroken.errors import DamagedError, InvalidArgumentError, UnsupportedError

__all__ = ["Export", "Exporter", "Progress", "export_safetensors"]

_logger = logging.getLogger(__name__)
_BLOCK_BYTES = 32 << 20  # read and written at once
_SHOWN = 20
_EXTRA_STATE = "_extra_state"  # torch's name for what a module keeps beside its weights, which may have tensors, too

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Export:
    """What was exported."""

    checkpoint: str  # the directory that was read: its name in the run's root, or where it is
    step: int  # 0 for a checkpoint that has none
    files: tuple[str, ...]  # in `out`; the index, if any, last
    tensors: int
    bytes: int  # of the tensors; the index has it as total_size
    skipped: tuple[str, ...]  # what is below `key` and no weight, by its name in the checkpoint


def export_safetensors(
    root: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    key: str = "model",
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> Export:
    """Writes the weights of a checkpoint into the directory `out` as safetensors that Hugging Face tools read.

        unbroken.export_safetensors("/checkpoints/run7", "/models/run7")

    From where to where are the two things that every call says, so they stand first, as for a copy, and all else is by
    name: `step`, which mostly is the newest, could otherwise be taken for one of them. `root`, `step`: as for load(),
    the newest complete checkpoint of the run, or that of `step`, or the directory of one checkpoint, which may be
    stock DCP's. Claims nothing, needs no torch.distributed, and has all of every tensor, however it was sharded.

    key: which entry of the state; what is below it is exported under its name there (`model.layer.weight` as
    `layer.weight`). A deeper one is given with dots ("state.model"); "" is all of the checkpoint, under full names.
    max_shard_size: bytes, or a text such as "5GB" (10^9) or "5GiB" (2^30). Up to that it is one file,
    `model.safetensors`; else `model-00001-of-0000N.safetensors` and so on with `model.safetensors.index.json`. A larger
    tensor has a file of its own. `out` is made when it is not there; other files in it are left alone.

    Every dtype that safetensors has is written bit for bit: bool, integers, float16, bfloat16, float32, float64,
    float8, complex64. Tied weights are written under each name that the checkpoint has them under. What is no tensor,
    or a module's extra state, is skipped, logged and listed in the result. Where ranks had different values, those of
    the lowest are exported, and a warning names them.

    Everything read of a checkpoint of Unbroken is verified first. In memory are at most 32 MiB of weights and what it
    takes to read them; of stock DCP's checkpoints, one tensor and one of its saved pieces. `out` changes when all files
    are durable: a failure or a kill leaves the old export, none, or the new one.

    Raises InvalidArgumentError when there is no such entry, naming those that are there; UnsupportedError naming
    tensors that safetensors cannot hold; AlreadyExistsError for an export that is there already, unless overwrite;
    NotFoundError, DamagedError as load(); NoSpaceError, PermissionDeniedError, IoError of `out`; UnavailableError while
    another export writes there.
    """
    target = os.fspath(out)
    check_out(target, overwrite=overwrite)
    return Exporter(os.fspath(root), step=step, key=key, max_shard_size=max_shard_size).write(
        target, overwrite=overwrite
    )


class Exporter:
    """One export: planned from the metadata, then written."""

    def __init__(self, root: str, *, step: int | None, key: str, max_shard_size: int | str) -> None:
        """Reads no weights. Raises what export_safetensors() raises for what it reads."""
        limit = bytes_of(max_shard_size)
        self._reader = _open(root, step)
        weights, self._skipped = _choose(self._reader, key)
        self.shards = shards_of(weights, limit)
        self._weights = weights

    @property
    def result(self) -> Export:
        """What write() gives."""
        return Export(
            checkpoint=self._reader.attempt,
            step=self._reader.step,
            files=(*(shard.file for shard in self.shards), *([INDEX] if len(self.shards) > 1 else [])),
            tensors=len(self._weights),
            bytes=sum(shard.data_bytes for shard in self.shards),
            skipped=self._skipped,
        )

    def write(self, out: str, *, overwrite: bool, progress: Progress | None = None) -> Export:
        if self._skipped:
            _logger.warning("export %s: skipped, as no weights: %s", self._reader.attempt, _listed(self._skipped))
        self._tell_what_differed()
        shards = self.shards
        headers = [shard.header() for shard in shards]
        files = [(shard, header, _blocks(shard, self._limit)) for shard, header in zip(shards, headers, strict=True)]
        index = index_of(shards) if len(shards) > 1 else b""
        total = sum(shard.data_bytes for shard in shards)
        left = total + sum(map(len, headers)) + len(index)
        memory = self._memory(max((_size(block) for *_, blocks in files for block in blocks), default=0))
        done = 0
        with Out(out, overwrite=overwrite) as place:
            for shard, header, blocks in files:
                with place.file(shard.file, left) as append:
                    append(header)
                    for block in blocks:
                        self._read(block, memory)
                        append(memory.numpy()[: _size(block)].data)
                        done += _size(block)
                        if progress is not None:
                            progress(done, total)
                left -= len(header) + shard.data_bytes
            if index:
                with place.file(INDEX, left) as append:
                    append(index)
            place.publish()
        return self.result

    def _memory(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise UnsupportedError(
                f"export {self._reader.attempt}: a tensor of {nbytes} bytes does not fit into memory, and those of "
                "stock DCP are read whole"
            ) from error

    @property
    def _limit(self) -> int | None:
        """Stock DCP's pieces are read whole, so they are read once."""
        return _BLOCK_BYTES if isinstance(self._reader, CheckpointReader) else None

    def _read(self, block: Sequence[_Box], memory: torch.Tensor) -> None:
        """Fills the begin of `memory` with the boxes, back to back."""
        targets: list[Target] = []
        at = 0
        for box in block:
            here = memory[at : at + box.nbytes].view(box.weight.dtype).view(box.sizes)
            targets += _targets(self._reader, box, here)
            at += box.nbytes
        self._reader.fill(targets)

    def _tell_what_differed(self) -> None:
        """As load() does: the values that ranks had otherwise than the lowest are small, and kept apart."""
        if not isinstance(self._reader, CheckpointReader):
            return
        exported = {weight.key: weight for weight in self._weights}
        found: dict[str, None] = {}
        for key in filter(is_values_key, self._reader.saved):
            for name, value in self._reader.objects([key])[key]["values"].items():
                if name in exported and name not in found:
                    here = torch.empty(exported[name].shape, dtype=exported[name].dtype)
                    self._reader.tensors({name: here})
                    if fingerprint(name, value) != fingerprint(name, here):
                        found[name] = None
        if found:
            _logger.warning(
                "export %s: the ranks that saved it had different values of %s; exported is what the lowest rank had",
                self._reader.attempt,
                _listed(list(found)),
            )


def _open(root: str, step: int | None) -> Reading:
    store = _engine.open_store(root)
    names = store.list("")
    if MARKER not in names and "generations" in names:
        return CheckpointReader(store, _engine.find_attempt(store, step))
    if step is not None:
        raise InvalidArgumentError(f"export {store.url}: it is no run's root, so there is no step to choose; give none")
    return open_directory(root)


# --- what is exported ------------------------------------------------------------------------------------------------


def _choose(reader: Reading, key: str) -> tuple[list[Weight], tuple[str, ...]]:
    """The tensors below `key`, and the keys of what else is there. Raises when they are not all fit to be exported."""
    prefix = f"{key}." if key else ""
    where = f"export {reader.attempt}"
    saved = {name: one for name, one in reader.saved.items() if not name.startswith(RESERVED)}
    weights: list[Weight] = []
    objects: list[str] = []
    skipped: list[str] = []
    unfit: list[str] = []
    for name, one in saved.items():
        if not name.startswith(prefix):
            continue
        if _EXTRA_STATE in name.split("."):
            skipped.append(name)
        elif one.tensor is None:
            objects.append(name)
        elif reason := _unfit(where, name, one.tensor):
            unfit.append(f"{name} ({reason})")
        else:
            weights.append(Weight(name[len(prefix) :], name, one.dtype, one.shape))
    unfit += _tensors_among(reader, objects)
    if unfit:
        raise UnsupportedError(
            f"{where}: safetensors cannot hold {_listed(unfit)}; nothing was written. It holds plain tensors of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
        )
    if not weights:
        raise InvalidArgumentError(
            f"{where}: there are no tensors {f'below {key!r}' if key else 'in it'}; {_known(saved)}"
        )
    return weights, (*skipped, *objects)


def _unfit(where: str, name: str, tensor: TensorStorageMetadata) -> str:
    """Why safetensors cannot hold it; "" when it can. DamagedError when it is no description of a tensor."""
    dtype, layout = tensor.properties.dtype, tensor.properties.layout
    if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in tensor.size):
        raise DamagedError(f"{where}: what .metadata says of {name!r} makes no sense")
    if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) < math.prod(tensor.size):
        raise DamagedError(f"{where}: the saved pieces of {name!r} do not fill it")
    if layout is not torch.strided:
        return str(layout).removeprefix("torch.")
    return "" if dtype in DTYPES else str(dtype).removeprefix("torch.")


def _tensors_among(reader: Reading, objects: Sequence[str]) -> list[str]:
    """Of the objects those that are weights or could be: a tensor that is more than its bytes is saved as an object."""
    found = []
    for name in objects:
        try:
            value = reader.objects([name])[name]
        except InvalidArgumentError as error:
            found.append(f"{name} (which cannot be looked at: {error})")
            continue
        if isinstance(value, torch.Tensor):
            kind = "" if type(value) in (torch.Tensor, torch.nn.Parameter) else f" in a {type(value).__name__}"
            form = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
            found.append(f"{name} ({form} {str(value.dtype).removeprefix('torch.')}{kind})")
    return found


def _known(saved: Mapping[str, Saved]) -> str:
    groups: dict[str, int] = {}
    for name, one in saved.items():
        if one.tensor is not None:
            first = str(one.path[0]) if len(one.path) > 1 else name.partition(".")[0]
            groups[first] = groups.get(first, 0) + 1
    if not groups:
        return "it holds no tensors at all"
    names = _listed([repr(name) for name in groups])
    return f"key= may be {names}, or '' for all of it"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Box:
    """A part of a tensor that is one stretch of its bytes."""

    weight: Weight
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.weight.dtype.itemsize


def _size(block: Sequence[_Box]) -> int:
    return sum(box.nbytes for box in block)


def _blocks(shard: Shard, limit: int | None) -> list[list[_Box]]:
    """The shard's bytes in their order: what is read and written at once. limit: the most bytes of one tensor's part;
    None: tensors are not cut."""
    blocks: list[list[_Box]] = []
    size = _BLOCK_BYTES
    for weight in shard.weights:
        if weight.nbytes == 0:
            continue
        for offsets, sizes in _cut(weight.shape, weight.dtype.itemsize, limit or weight.nbytes):
            box = _Box(weight, offsets, sizes)
            if size + box.nbytes > _BLOCK_BYTES:
                blocks.append([])
                size = 0
            blocks[-1].append(box)
            size += box.nbytes
    return blocks


def _cut(shape: tuple[int, ...], itemsize: int, limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of parts of at most `limit` bytes that follow each other in memory; limit >= itemsize."""
    nbytes = math.prod(shape) * itemsize
    if nbytes <= limit:
        yield (0,) * len(shape), shape
        return
    row = nbytes // shape[0]
    if row <= limit:
        rows = limit // row
        for at in range(0, shape[0], rows):
            yield (at, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - at), *shape[1:])
        return
    for at in range(shape[0]):
        for offsets, sizes in _cut(shape[1:], itemsize, limit):
            yield (at, *offsets), (1, *sizes)


def _targets(reader: Reading, box: _Box, memory: torch.Tensor) -> list[Target]:
    """The saved pieces of it, and where in `memory` each goes."""
    name = box.weight.key
    saved = reader.saved[name].tensor
    assert saved is not None
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    items = create_read_items_for_chunk_list(name, saved, [chunk])
    if sum(math.prod(item.lengths) for item in items) < math.prod(box.sizes):
        raise DamagedError(f"{reader.attempt}: the saved pieces of {name!r} do not fill it")
    return [(item, narrow_tensor_by_index(memory, item.dest_offsets, item.lengths)) for item in items]
