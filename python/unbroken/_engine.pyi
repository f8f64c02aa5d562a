"""The engine of Unbroken, for its Python package; not for users."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


version: str = '0.1.0'

class Error(Exception):
    """
    What the engine of Unbroken raises: `code` names the kind, `retryable` says that the same call may succeed later, `data_may_be_lost` that bytes believed safe may be gone.
    """

    code: str = 'internal'

    retryable: bool = False

    data_may_be_lost: bool = False

class InvalidArgumentError(Error, ValueError):
    """The caller's input is wrong; the message says what fits."""

    code: str = 'invalid_argument'

    retryable: bool = False

    data_may_be_lost: bool = False

class NotFoundError(Error):
    """The object is known not to exist."""

    code: str = 'not_found'

    retryable: bool = False

    data_may_be_lost: bool = False

class AlreadyExistsError(Error):
    """The object exists and was to be made."""

    code: str = 'already_exists'

    retryable: bool = False

    data_may_be_lost: bool = False

class PermissionDeniedError(Error):
    """The place does not allow it."""

    code: str = 'permission'

    retryable: bool = False

    data_may_be_lost: bool = False

class NoSpaceError(Error):
    """The place is full, or a quota is used up."""

    code: str = 'no_space'

    retryable: bool = False

    data_may_be_lost: bool = False

class IoError(Error):
    """The device or the file system failed."""

    code: str = 'io'

    retryable: bool = False

    data_may_be_lost: bool = False

class UnavailableError(Error):
    """The store or a peer cannot be reached now."""

    code: str = 'unavailable'

    retryable: bool = True

    data_may_be_lost: bool = False

class DeadlineError(Error):
    """It did not happen in time."""

    code: str = 'deadline'

    retryable: bool = True

    data_may_be_lost: bool = False

class UnknownOutcomeError(Error):
    """Whether a publishing operation took effect is not known."""

    code: str = 'unknown'

    retryable: bool = False

    data_may_be_lost: bool = False

class DamagedError(Error):
    """Bytes are there but are not what was written."""

    code: str = 'damaged'

    retryable: bool = False

    data_may_be_lost: bool = False

class FencedError(Error):
    """A newer start owns the run, or the root belongs to another run."""

    code: str = 'fenced'

    retryable: bool = False

    data_may_be_lost: bool = False

class UnsupportedError(Error):
    """The format version, dtype or place is not supported."""

    code: str = 'unsupported'

    retryable: bool = False

    data_may_be_lost: bool = False

class CancelledError(Error):
    """Given up on request."""

    code: str = 'cancelled'

    retryable: bool = False

    data_may_be_lost: bool = False

class InternalError(Error):
    """A bug in Unbroken; please report it."""

    code: str = 'internal'

    retryable: bool = False

    data_may_be_lost: bool = False

class Board:
    """
    Where the ranks of one start talk. Subclasses define set(key, value), get(keys), set_if_absent(key, value) and erase(keys); values are bytes. Called from any thread.
    """

    def __init__(self) -> None: ...

class MemoryBoard(Board):
    """A board for a world of one."""

    def __init__(self) -> None: ...

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, keys: Sequence[str]) -> list[bytes | None]: ...

    def set_if_absent(self, key: str, value: bytes) -> bytes: ...

    def erase(self, keys: Sequence[str]) -> None: ...

    def __len__(self) -> int: ...

def board_wait(board: Board, key: str, timeout_seconds: float) -> bytes:
    """
    What `key` holds, once it is set. DeadlineError when it is not in time.
    """

def board_collect(board: Board, keys: Sequence[str], timeout_seconds: float) -> list[bytes | None]:
    """
    What the keys hold once all are set, or at the end of the time: None for those that are not.
    """

class Store:
    """
    A place for objects under one root. Thread-safe; blocks for I/O without the GIL.
    """

    @property
    def url(self) -> str:
        """Where it is, without credentials."""

    @property
    def create_if_absent(self) -> bool:
        """Whether of several callers that create one name exactly one wins."""

    def read(self, path: str, limit: int = 1073741824) -> bytes:
        """The whole object, of at most `limit` bytes."""

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted."""

def open_store(url: str, *, create: bool = False) -> Store:
    """
    Opens a directory (`/path` or `file:///path`); `create` makes it when it is absent.
    """

class Permutation:
    """
    The order of one epoch: a bijection of [0, samples), keyed by seed and epoch.
    """

    def __init__(self, seed: int, epoch: int, samples: int) -> None: ...

    @property
    def samples(self) -> int: ...

    def __call__(self, place: int) -> int:
        """The sample at a place of the epoch."""

    def inverse(self, sample: int) -> int:
        """The place at which a sample comes."""

    def fill(self, offset: int, count: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The samples at offset, offset + 1, ...: int64, shape (count,)."""

class Schedule:
    """Where global batches begin and end."""

    def __init__(self, samples: int, global_batch_size: int, epoch_end: str) -> None: ...

    def settle(self, epoch: int, offset: int) -> tuple[int, int]:
        """The place at which the next batch starts, as (epoch, offset)."""

    def batch_at(self, epoch: int, offset: int) -> tuple[int, tuple[int, int]]:
        """
        The batch at a place: (samples, (epoch, offset) of the batch after it).
        """

    def ranges(self, epoch: int, offset: int, skip: int, count: int) -> list[tuple[int, int, int]]:
        """
        The count places after the first skip from a place, as (epoch, offset, count) of neighbours.
        """

    @property
    def batches_per_epoch(self) -> int: ...

    def batches_left(self, epoch: int, offset: int) -> int:
        """Batches that start in the epoch of a place, from there on."""

class Share:
    """Which part of a global batch one data-parallel rank takes."""

    def __init__(self, *, global_batch_size: int, ranks: int, rank: int, micro_batches: int, balanced: bool) -> None: ...

    def of(self, samples: int) -> tuple[int, int]:
        """This rank's part of a batch of that many samples, as (first, count)."""

    def micro_batches(self, samples: int) -> list[tuple[int, int]]:
        """The same part, cut into micro-batches."""

def sample_seeds(seed: int, epoch: int, sample: int) -> tuple[int, int, int, int]:
    """64-bit seeds of a sample's generators: (python, numpy, torch, own)."""

def batch_seeds(seed: int, epoch: int, offset: int, share: int) -> tuple[int, int, int, int]:
    """64-bit seeds of a batch's generators: (python, numpy, torch, own)."""

def prepare_plain(store: Store, *, overwrite: bool, only_rank: int | None = None) -> None:
    """
    Makes way for a checkpoint in the store's root; AlreadyExistsError when one is there and may not be replaced.
    """

def write_plain_rank(store: Store, image: Image, *, threads: int = 2) -> None:
    """Writes one rank's files, durable."""

def commit_plain(store: Store, marker: bytes, *, world_size: int, only_rank: int | None = None, versions: str = '{}') -> None:
    """When all ranks have written: publishes the manifest and `.metadata`."""

class Slot:
    """Where one archive lies in a shard file. Bytes."""

    @property
    def file(self) -> str: ...

    @property
    def offset(self) -> int:
        """Of the archive in the file."""

    @property
    def length(self) -> int:
        """Of the archive."""

    @property
    def data_offset(self) -> int:
        """Of the tensor's bytes in the archive; 0 for an object."""

    @property
    def data_length(self) -> int:
        """Of the tensor's bytes; 0 for an object."""

class ImageBuilder:
    """
    Collects the slots of a rank's image, numbered from 0 as they are added.
    """

    def __init__(self, rank: int, *, max_file_bytes: int = 2147483648) -> None: ...

    def add_tensor(self, head: bytes, data_length: int, tail: bytes) -> int:
        """A slot for a tensor: its archive before and after the tensor's bytes."""

    def add_object(self, capacity_hint: int) -> int:
        """A slot for an object whose archive takes so much now."""

    def build(self) -> Image:
        """Allocates and pre-faults the memory; the builder is empty afterwards."""

class Image:
    """
    A rank's shard files in memory. One thread at a time; of no use in a forked child.
    """

    @property
    def arena_bytes(self) -> int: ...

    def arena_address(self) -> int: ...

    def slot(self, number: int) -> Slot: ...

    def address(self, number: int) -> int:
        """Where the data of a tensor's slot goes."""

    def stage(self, copies: Sequence[tuple[int, int, int]], *, threads: int = 2) -> None:
        """
        Copies host memory into slots: (slot number, address, bytes) each. Without the GIL.
        """

    def begin_staging(self) -> None:
        """
        Lets a commit begin that writes what stage(), which must follow, has copied so far.
        """

    def place_objects(self, archives: Sequence[bytes]) -> bool:
        """
        Places this save's objects; True when their places changed, so that object_slots() goes into the vote.
        """

    def object_slots(self) -> str:
        """JSON: slot number -> [offset, length], in object_file()."""

    def object_file(self) -> str: ...

class AttemptReader:
    """Verified reads of one attempt. Thread-safe; blocks without the GIL."""

    def __init__(self, store: Store, attempt: str, *, only_rank: int | None = None) -> None: ...

    def manifest(self) -> str:
        """The root of the manifest, as JSON."""

    def metadata(self) -> bytes:
        """The bytes of `.metadata`, verified."""

    def slots(self, file: str) -> list[Slot]:
        """The archives in a shard file, by rising offset."""

    def read(self, ranges: Sequence[tuple[str, int, int, int]], *, threads: int = 2, alone: bool = False) -> None:
        """
        Fills memory from (file, offset, length, address) each. Every chunk touched is verified before it returns; DamagedError names file and bytes. alone: no other process of this machine is about to read the same.
        """

def find_attempt(store: Store, step: int | None = None) -> str:
    """
    The directory of the newest complete checkpoint on the run's branch (of that step). Claims nothing.
    """

class Start:
    """What a start decided; the same on all ranks."""

    @property
    def generation(self) -> int: ...

    @property
    def run_id(self) -> str: ...

    @property
    def life_id(self) -> str: ...

    @property
    def fresh(self) -> bool: ...

    @property
    def step(self) -> int: ...

    @property
    def attempt(self) -> str:
        """The checkpoint's directory; empty when fresh."""

    @property
    def manifest(self) -> str:
        """The root of its manifest, as JSON; empty when fresh."""

    @property
    def refused(self) -> list[tuple[str, str]]:
        """(attempt, reason) of each checkpoint that this start refused."""

    @property
    def account(self) -> str:
        """What was chosen and why, in sentences."""

    @property
    def warnings(self) -> list[str]:
        """What the user must hear of although the start went well."""

class Recovery:
    """One start of a run, on one rank. The training thread only."""

    def __init__(self, store: Store, board: object, *, rank: int, world_size: int, host: str, step: int | None = None, allow_fresh: bool = False, timeout_seconds: float = 300.0) -> None: ...

    def begin(self) -> Start:
        """Chooses, and records the new life; the same answer on all ranks."""

    def settle(self, verdict: str, reason: str = '') -> Start | None:
        """
        After the load, on all ranks. None: go on. A Start: drop what was loaded and load that. Raises: all stop.
        """

class StepDecision:
    """What happens at the end of a step; the same on all ranks."""

    @property
    def action(self) -> str:
        """none, save, deferred, or stop (save now, then leave)."""

    @property
    def attempt(self) -> str: ...

    @property
    def sequence(self) -> int: ...

    @property
    def plan_anew(self) -> bool:
        """All ranks plan anew before this save."""

class SaveOutcome:
    """What became of one save."""

    @property
    def state(self) -> str:
        """durable, failed or unknown."""

    @property
    def code(self) -> str:
        """The kind of a failure."""

    @property
    def reason(self) -> str:
        """Empty when durable; names ranks and causes."""

    @property
    def attempt_path(self) -> str: ...

    @property
    def bytes(self) -> int:
        """Written by this rank."""

    @property
    def write_seconds(self) -> float: ...

    @property
    def commit_seconds(self) -> float: ...

    @property
    def structure_differs(self) -> bool:
        """The next save must plan anew."""

class Saver:
    """The saves of one life on one rank."""

    def __init__(self, store: Store, board: object, start: Start, *, rank: int, world_size: int, keep_last: int = 0, keep_every_steps: int = 0, vote_timeout_seconds: float = 600.0, decision_timeout_seconds: float = 60.0, steps_ahead: int = 1) -> None: ...

    def decide(self, step: int, *, due: bool, wanted: bool = False, stop: bool = False, busy: bool = False, explicit: bool = False, plan_anew: bool = False) -> StepDecision:
        """At the end of every step, on every rank, on the training thread."""

    def commit(self, image: Image | None, *, step: int, attempt: str, sequence: int, structure: str, object_slots: str | None = None, metadata: object | None = None, mesh: str = 'null', loader: str = 'null', versions: str = '{}', failure: str = '') -> SaveOutcome:
        """
        Writes, votes, commits; blocks, without the GIL, until the outcome is known. metadata, on the coordinator: given what each vote says of places, the bytes of `.metadata`, in a list of parts.
        """

    def retain(self) -> list[str]:
        """
        After a durable save: removes what need not be kept; returns the directories.
        """

    def cancel(self) -> None:
        """
        The process leaves: a save in flight waits for nobody any more. Any thread.
        """
