"""The state that a checkpoint holds: modules, optimizers, objects with state_dict() and plain mappings, as one flat
list of named leaves, in the layout that stock `dcp.save` of the same state has.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from unbroken import _rng
from unbroken.checkpoint._tree import Notes, Path, Shape, flatten, key_of, pack_notes
from unbroken.errors import InvalidArgumentError

__all__ = [
    "NOTES_KEY",
    "RESERVED",
    "Leaf",
    "ModuleSource",
    "ObjectSource",
    "OptimizerSource",
    "PlainSource",
    "Role",
    "Source",
    "State",
    "StructureChanged",
    "is_values_key",
    "rng_prefix",
    "values_key",
]

NOTES_KEY = "unbroken/containers"
RESERVED = ("rng/", "unbroken/")
_EXTRA_STATE = nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def rng_prefix(rank: int) -> str:
    return f"rng/rank_{rank:05d}/"


def values_key(rank: int) -> str:
    """Of what this rank has otherwise than the ordinary keys say."""
    return f"unbroken/rank_{rank:05d}/values"


def is_values_key(key: str) -> bool:
    return key.startswith("unbroken/rank_") and key.endswith("/values")


class StructureChanged(Exception):  # noqa: N818  # not an error: it asks for a new plan
    """The state has other leaves than at the last full walk."""


class Role(enum.StrEnum):
    """Who writes a leaf."""

    SPREAD = "spread"  # equal on all ranks that have it: any one of them, spread by size
    LOWEST = "lowest"  # the lowest rank that has it
    OWN = "own"  # the same, and where another rank has another value, that is kept apart (see _pack)
    RANK = "rank"  # every rank its own


class Leaf(NamedTuple):
    path: Path
    role: Role

    @property
    def key(self) -> str:
        return key_of(self.path)


class Source(Protocol):
    """One part of the state."""

    prefix: Path

    def walk(self, notes: Notes) -> tuple[list[Leaf], list[Any]]:
        """All leaves, and what they hold now: tensors are the live ones."""

    def values(self, notes: Notes) -> list[Any]:
        """What the leaves of the last walk hold now, in its order. Raises StructureChanged when there are others."""


class _WalkedSource:
    """A source that has no short way: it is walked each time."""

    prefix: Path

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self._last: list[Leaf] = []

    def walk(self, notes: Notes) -> tuple[list[Leaf], list[Any]]:
        self._last, values = self._walk(notes)
        return self._last, values

    def values(self, notes: Notes) -> list[Any]:
        leaves, values = self._walk(notes)
        if leaves != self._last:
            raise StructureChanged(_difference(self._last, leaves))
        return values

    def _walk(self, notes: Notes) -> tuple[list[Leaf], list[Any]]:
        raise NotImplementedError


def _difference(old: Iterable[Leaf], new: Iterable[Leaf]) -> str:
    before, after = {leaf.key for leaf in old}, {leaf.key for leaf in new}
    gone, come = sorted(before - after), sorted(after - before)
    parts = [f"{word} {', '.join(keys[:5])}" for word, keys in (("without", gone), ("with", come)) if keys]
    return "; ".join(parts) or "in another order"


# --- modules ---------------------------------------------------------------------------------------------------------


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
            module = module._orig_mod
        else:
            return module


# These only bring checkpoints of old torch versions up to date.
_KNOWN_LOADERS = (
    nn.Module._load_from_state_dict,
    nn.modules.batchnorm._NormBase._load_from_state_dict,
    nn.modules.instancenorm._InstanceNorm._load_from_state_dict,
)


def _reshards(hook: Any) -> bool:
    """It is the hook by which fully_shard has a module hold its shards before state_dict() and load_state_dict()."""
    return bool(getattr(hook, "__qualname__", "").startswith("FSDPParamGroup._register_state_dict_hooks."))


def _saves_plainly(module: nn.Module) -> bool:
    """Its state_dict() is its parameters and buffers and no more; those of its shards where it is sharded."""
    cls = type(module)
    return (
        cls.state_dict is nn.Module.state_dict
        and cls._save_to_state_dict is nn.Module._save_to_state_dict
        and cls.get_extra_state is nn.Module.get_extra_state
        and not module._state_dict_hooks
        and all(map(_reshards, module._state_dict_pre_hooks.values()))
    )


def _loads_plainly(module: nn.Module) -> bool:
    """Its load_state_dict() only copies to its parameters and buffers."""
    cls = type(module)
    return (
        cls.load_state_dict is nn.Module.load_state_dict
        and cls._load_from_state_dict in _KNOWN_LOADERS
        and all(map(_reshards, module._load_state_dict_pre_hooks.values()))
        and not module._load_state_dict_post_hooks
    )


class ModuleSource:
    """A module. Names are those of the module inside DDP and torch.compile, as torch's get_model_state_dict gives them.

    Where no module in it overrides or hooks state_dict(), the values are taken from its own dictionaries. What is under
    fully_shard is made to hold its shards first, as state_dict() would.
    """

    def __init__(self, prefix: Path, module: nn.Module) -> None:
        self.prefix = prefix
        self.module = unwrap(module)
        self.loads_plainly = False
        self._plain = False
        self._leaves: list[Leaf] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        # What the places rest on: each module with its children and the sizes of its tables.
        self._tree: list[tuple[nn.Module, tuple[nn.Module | None, ...], int, int]] = []
        self._sharded: list[FSDPModule] = []
        self._shards: list[tuple[dict[str, Any], str, Any]] = []  # where they have stood
        for name, one in self.module.named_modules():
            if isinstance(one, FullyShardedDataParallel):
                raise InvalidArgumentError(
                    f"state {key_of(prefix)!r}: {name or 'the module'} is under FullyShardedDataParallel, whose "
                    "state_dict() is a collective call; use fully_shard (FSDP2)"
                )

    def is_unsharded(self) -> bool:
        """Some module under fully_shard does not hold its shards just now: walk() and values() would have it do so."""
        return any(table.get(name) is not shard for table, name, shard in self._shards)

    def _plain_walk(self, module: nn.Module, prefix: str) -> None:
        module = unwrap(module)
        self.loads_plainly &= _loads_plainly(module)
        self._plain &= _saves_plainly(module)
        children = tuple(module._modules.values())
        self._tree.append((module, children, len(module._parameters), len(module._buffers)))
        for table, role in ((module._parameters, Role.SPREAD), (module._buffers, Role.LOWEST)):
            for name, value in table.items():
                if value is None or (role is Role.LOWEST and name in module._non_persistent_buffers_set):
                    continue
                self._leaves.append(Leaf((*self.prefix, prefix + name), role))
                self._places.append((table, name))
        for name, child in module._modules.items():
            if child is not None:
                self._plain_walk(child, f"{prefix}{name}.")

    def named_state_dict(self) -> dict[str, tuple[str, Any]]:
        """By its name in the checkpoint: (the name in module.state_dict(), the value)."""
        named: dict[str, tuple[str, Any]] = {}
        for raw, value in self.module.state_dict().items():
            (name,) = dcp_state._get_fqns(self.module, raw)
            named[name] = (raw, value)
        return named

    def parameter_names(self) -> Iterator[tuple[nn.Parameter, str]]:
        """Every parameter once, under the name that stock get_optimizer_state_dict gives it."""
        for raw, parameter in self.module.named_parameters():
            (name,) = dcp_state._get_fqns(self.module, raw)
            yield parameter, name

    def walk(self, notes: Notes) -> tuple[list[Leaf], list[Any]]:
        self._leaves, self._places, self._tree = [], [], []
        self._plain = self.loads_plainly = True
        self._sharded = [one for one in self.module.modules() if isinstance(one, FSDPModule)]
        for one in self._sharded:
            one.reshard()
        self._plain_walk(self.module, "")
        self._shards = [
            (t, name, t[name]) for t, name in self._places if self._sharded and isinstance(t[name], DTensor)
        ]
        if self._plain:
            return self._leaves, [table[name] for table, name in self._places]
        self._leaves, values = self._hooked_walk(notes)
        return self._leaves, values

    def _hooked_walk(self, notes: Notes) -> tuple[list[Leaf], list[Any]]:
        leaves: list[Leaf] = []
        values: list[Any] = []
        parameters = {name for _, name in self.parameter_names()}

        def leaf(path: Path, value: Any) -> None:
            name = str(path[len(self.prefix)])
            extra = Role.OWN if name.endswith(_EXTRA_STATE) else Role.LOWEST
            leaves.append(Leaf(path, Role.SPREAD if name in parameters else extra))
            values.append(value)

        for name, (_, value) in self.named_state_dict().items():
            flatten(value, (*self.prefix, name), leaf, notes)
        return leaves, values

    def values(self, notes: Notes) -> list[Any]:
        if not self._plain:
            leaves, values = self._hooked_walk(notes)
            if leaves != self._leaves:
                raise StructureChanged(_difference(self._leaves, leaves))
            return values
        if self.is_unsharded():
            for one in self._sharded:
                one.reshard()
        for module, children, parameters, buffers in self._tree:
            if (
                len(module._parameters) != parameters
                or len(module._buffers) != buffers
                or tuple(module._modules.values()) != children
            ):
                raise StructureChanged(f"{type(module).__name__} in {key_of(self.prefix)} has other members")
        try:
            return [table[name] for table, name in self._places]
        except KeyError as gone:
            raise StructureChanged(f"{key_of(self.prefix)} has no {gone.args[0]} any more") from None


# --- optimizers ------------------------------------------------------------------------------------------------------


class OptimizerSource:
    """A torch optimizer, in the layout of stock get_optimizer_state_dict where its parameters belong to modules of the
    state: {"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}. Otherwise as its own state_dict().

    State is taken as it is; an optimizer that has made no step has none.
    """

    def __init__(self, prefix: Path, optimizer: torch.optim.Optimizer, modules: list[ModuleSource]) -> None:
        self.prefix = prefix
        self.optimizer = optimizer
        self._modules = modules
        self._names: list[str] = []
        self._leaves: list[Leaf] = []
        self._places: list[tuple[Any, Any]] = []
        self._tables: list[tuple[Any, Any, int]] = []
        self._groups: list[tuple[dict[str, Any], int, int]] = []
        self._plain = False

    def names(self) -> list[str]:
        """A name for each parameter, in the order of state_dict()'s numbers."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        known: dict[int, tuple[ModuleSource, str]] = {}
        for module in self._modules:
            for parameter, name in module.parameter_names():
                known.setdefault(id(parameter), (module, name))
        if not parameters or not all(id(p) in known for p in parameters):
            return [str(i) for i in range(len(parameters))]
        found = [known[id(p)] for p in parameters]
        if len({id(module) for module, _ in found}) == 1:
            return [name for _, name in found]
        return [f"{key_of(module.prefix)}.{name}" for module, name in found]

    def is_plain(self) -> bool:
        optimizer = self.optimizer
        return (
            type(optimizer).state_dict is torch.optim.Optimizer.state_dict
            and not optimizer._optimizer_state_dict_pre_hooks
            and not optimizer._optimizer_state_dict_post_hooks
        )

    def named_state_dict(self) -> dict[str, Any]:
        """Its state_dict() with names for numbers. The dictionaries within are copies, the tensors are live."""
        packed = self.optimizer.state_dict()
        names = self.names()
        state = {names[key] if type(key) is int else str(key): value for key, value in packed["state"].items()}
        groups = [group | {"params": [names[i] for i in group["params"]]} for group in packed["param_groups"]]
        return {**packed, "state": state, "param_groups": groups}

    def walk(self, notes: Notes) -> tuple[list[Leaf], list[Any]]:
        self._names = self.names()
        optimizer = self.optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._tables = [(p, optimizer.state[p], len(optimizer.state[p])) for p in parameters if p in optimizer.state]
        # State of what is no parameter (any more): state_dict() knows what becomes of it.
        self._plain = self.is_plain() and len(self._tables) == len(optimizer.state)
        values = self._plain_walk(notes) if self._plain else []
        if not self._plain:
            self._leaves, values = self._hooked_walk(notes)
        return self._leaves, values

    def _plain_walk(self, notes: Notes) -> list[Any]:
        self._leaves, self._places = [], []
        values: list[Any] = []

        def add(path: Path, table: Any, key: Any) -> None:
            before = len(self._leaves)

            def leaf(at: Path, value: Any) -> None:
                self._leaves.append(Leaf(at, Role.SPREAD))
                self._places.append((table, key))
                values.append(value)

            flatten(table[key], path, leaf, notes)
            if [one.path for one in self._leaves[before:]] != [path]:
                self._plain = False  # nested, or empty: no short way to it

        names = iter(self._names)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                name, table = next(names), self.optimizer.state.get(parameter, {})
                for key in table:
                    add((*self.prefix, "state", name, str(key)), table, key)
        self._groups = [(group, len(group), len(group["params"])) for group in self.optimizer.param_groups]
        first = 0
        for i, (group, _, count) in enumerate(self._groups):
            for key in group:
                if key != "params":
                    add((*self.prefix, "param_groups", i, str(key)), group, key)
            add((*self.prefix, "param_groups", i, "params"), {"params": self._names[first : first + count]}, "params")
            first += count
        return values

    def _hooked_walk(self, notes: Notes) -> tuple[list[Leaf], list[Any]]:
        leaves: list[Leaf] = []
        values: list[Any] = []

        def leaf(path: Path, value: Any) -> None:
            leaves.append(Leaf(path, Role.SPREAD))
            values.append(value)

        state = self.named_state_dict()
        if not state["state"]:
            del state["state"]  # DCP has no empty mappings; reading knows
        flatten(state, self.prefix, leaf, notes)
        return leaves, values

    def values(self, notes: Notes) -> list[Any]:
        if not self._plain:
            leaves, values = self._hooked_walk(notes)
            if leaves != self._leaves:
                raise StructureChanged(_difference(self._leaves, leaves))
            return values
        state: Any = self.optimizer.state
        groups = self.optimizer.param_groups
        if len(state) != len(self._tables) or any(
            state.get(p) is not table or len(table) != size for p, table, size in self._tables
        ):
            raise StructureChanged(f"{key_of(self.prefix)} has other state")
        if len(groups) != len(self._groups) or any(
            now is not group or len(now) != size or len(now["params"]) != count
            for now, (group, size, count) in zip(groups, self._groups, strict=True)
        ):
            raise StructureChanged(f"{key_of(self.prefix)} has other parameter groups")
        try:
            return [table[key] for table, key in self._places]
        except KeyError as gone:
            raise StructureChanged(f"{key_of(self.prefix)} has no {gone.args[0]!r} any more") from None


# --- everything else -------------------------------------------------------------------------------------------------


class ObjectSource(_WalkedSource):
    """Any object with state_dict() and load_state_dict()."""

    def __init__(self, prefix: Path, target: Any) -> None:
        super().__init__(prefix)
        self.target = target

    def _walk(self, notes: Notes) -> tuple[list[Leaf], list[Any]]:
        leaves: list[Leaf] = []
        values: list[Any] = []

        def leaf(path: Path, value: Any) -> None:
            leaves.append(Leaf(path, Role.OWN))
            values.append(value)

        flatten(self.target.state_dict(), self.prefix, leaf, notes)
        return leaves, values


class PlainSource(_WalkedSource):
    """The tensors and values of a mapping that stand in no other source."""

    def __init__(self, prefix: Path, mapping: MutableMapping[Any, Any], others: frozenset[Path]) -> None:
        super().__init__(prefix)
        self.mapping = mapping
        self._others = others  # where modules, optimizers and objects stand
        self._shape: Shape | None = None
        self._notes: Notes = {}

    def walk(self, notes: Notes) -> tuple[list[Leaf], list[Any]]:
        self._notes = {}
        found = super().walk(self._notes)
        notes |= self._notes
        try:
            self._shape = Shape(self.mapping, self.prefix, self._others)
        except TypeError:
            self._shape = None
        return found

    def values(self, notes: Notes) -> list[Any]:
        values = self._shape.leaves(self.mapping) if self._shape is not None else None
        if values is None:
            return super().values(notes)
        notes |= self._notes
        return values

    def _walk(self, notes: Notes) -> tuple[list[Leaf], list[Any]]:
        leaves: list[Leaf] = []
        values: list[Any] = []

        def leaf(path: Path, value: Any) -> None:
            if path not in self._others:
                leaves.append(Leaf(path, Role.OWN))
                values.append(value)

        flatten(self.mapping, self.prefix, leaf, notes)
        return leaves, values


class RngSource(_WalkedSource):
    """The random number generators of this rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(())
        self._rank = rank

    def _walk(self, notes: Notes) -> tuple[list[Leaf], list[Any]]:  # noqa: ARG002
        state = _rng.capture()
        return [Leaf((rng_prefix(self._rank) + name,), Role.RANK) for name in state], list(state.values())


class NotesSource(_WalkedSource):
    """What DCP's flattening loses (see _tree)."""

    def __init__(self) -> None:
        super().__init__(())

    def _walk(self, notes: Notes) -> tuple[list[Leaf], list[Any]]:
        return [Leaf((NOTES_KEY,), Role.OWN)], [pack_notes(notes)]


# --- the whole -------------------------------------------------------------------------------------------------------


def is_object(value: Any) -> bool:
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


@dataclass(frozen=True)
class _Found:
    path: Path
    value: Any


def _find(mapping: Mapping[Any, Any], path: Path) -> Iterator[_Found]:
    for key, value in mapping.items():
        at = (*path, str(key))
        if isinstance(value, Mapping) and not is_object(value):
            yield from _find(value, at)
        elif is_object(value):
            yield _Found(at, value)


class State:
    """What `state` holds, which stays the user's: tensors are read where they are, and loaded there, too."""

    def __init__(self, state: Mapping[str, Any], *, rank: int | None = None) -> None:
        if not isinstance(state, MutableMapping):
            raise InvalidArgumentError(
                f"state is a {type(state).__name__}; give a dict of names to modules, optimizers, objects with "
                "state_dict() and load_state_dict(), tensors and values"
            )
        for name in state:
            if type(name) is not str or not name or name.startswith(RESERVED):
                raise InvalidArgumentError(
                    f"state has the name {name!r}; names are strings that are not empty and do not begin with "
                    + " or ".join(RESERVED)
                )
        found = list(_find(state, ()))
        self.modules = [ModuleSource(f.path, f.value) for f in found if isinstance(f.value, nn.Module)]
        self.sources: list[Source] = list(self.modules)
        for one in found:
            if isinstance(one.value, torch.optim.Optimizer):
                self.sources.append(OptimizerSource(one.path, one.value, self.modules))
            elif not isinstance(one.value, nn.Module):
                self.sources.append(ObjectSource(one.path, one.value))
        self.names = list(state)
        self.plain = PlainSource((), state, frozenset(f.path for f in found))
        self._all: list[Source] = [*self.sources, self.plain]
        if rank is not None:
            self._all += [RngSource(rank), NotesSource()]

    def walk(self) -> tuple[list[Leaf], list[Any]]:
        """All leaves and what they hold. InvalidArgumentError names a leaf that cannot be saved."""
        leaves: list[Leaf] = []
        values: list[Any] = []
        notes: Notes = {}
        for source in self._all:
            try:
                some, held = source.walk(notes)
            except InvalidArgumentError:
                raise
            except Exception as error:
                name = key_of(source.prefix)
                raise InvalidArgumentError(f"state {name!r}: {type(error).__name__}: {error}") from error
            leaves += some
            values += held
        seen: set[str] = set()
        for leaf in leaves:
            if leaf.key in seen:
                raise InvalidArgumentError(
                    f"state has two entries that are both named {leaf.key!r} when it is flattened"
                )
            seen.add(leaf.key)
        return leaves, values

    def is_unsharded(self) -> bool:
        """To look at it would move shards, which all ranks must do alike."""
        return any(module.is_unsharded() for module in self.modules)

    def values(self) -> list[Any]:
        """What the leaves of the last walk hold now. Raises StructureChanged when the leaves are others."""
        notes: Notes = {}
        values: list[Any] = []
        for source in self._all:
            try:
                values += source.values(notes)
            except (StructureChanged, InvalidArgumentError):
                raise
            except Exception as error:
                name = key_of(source.prefix)
                raise InvalidArgumentError(f"state {name!r}: {type(error).__name__}: {error}") from error
        return values
