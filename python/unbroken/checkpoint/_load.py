"""Putting a checkpoint into the state.

Everything that can be refused is found before the first byte of the state changes: names, shapes, classes of objects.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unbroken.checkpoint._metadata import no_collection
from unbroken.checkpoint._pack import fingerprint
from unbroken.checkpoint._reader import Reading, Saved
from unbroken.checkpoint._state import (
    NOTES_KEY,
    RESERVED,
    ModuleSource,
    ObjectSource,
    OptimizerSource,
    PlainSource,
    Source,
    State,
    is_object,
    is_values_key,
    values_key,
)
from unbroken.checkpoint._tree import Notes, Path, key_of, unflatten, unpack_notes
from unbroken.errors import InvalidArgumentError

__all__ = ["Load"]

_logger = logging.getLogger(__name__)
_KEPT_AT_ONCE = 64
_ABSENT = object()
_SCALARS = ("step", "mu_product", "eta", "mu")  # what torch's optimizers keep as plain tensors without dimensions


@dataclass
class _Differences:
    missing: list[str] = field(default_factory=list)  # in the state, not in the checkpoint
    extra: list[str] = field(default_factory=list)  # in the checkpoint, not in the state
    reshaped: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)

    def text(self) -> str:
        parts = []
        for what, keys in (
            ("missing from the checkpoint", self.missing),
            ("only in the checkpoint", self.extra),
            ("of another shape", self.reshaped),
        ):
            if keys:
                shown = ", ".join(keys[:20]) + (f" and {len(keys) - 20} more" if len(keys) > 20 else "")
                parts.append(f"{what}: {shown}")
        return "; ".join(parts)


def _below(path: Path, prefix: Path) -> bool:
    return path[: len(prefix)] == prefix


class Load:
    """One load of one checkpoint into one state.

    `whole`: the checkpoint must hold nothing else than what the state names (a resume, as opposed to reading a part).
    `own`: the rank whose values this one gets where ranks had different ones; None: it gets those of the lowest rank.
    Objects are read here; plan() changes nothing of the state, apply() does.
    """

    def __init__(
        self, reader: Reading, state: State, *, strict: bool, whole: bool, own: int | None = None, tell: bool = True
    ) -> None:
        self._reader = reader
        self._state = state
        self._strict = strict
        self._whole = whole
        self._own_rank = own
        self._own: dict[str, Any] = {}  # its values where ranks had different ones, by key
        self._own_keys: frozenset[str] | None = None  # what it had, where not all had the same; None: everything
        self._first_keys: frozenset[str] | None = None  # what rank 0 had, where that counts
        self._tell = tell  # whether to say which values differed, when those of the lowest rank are taken
        self._differences = _Differences()
        self._targets: dict[str, torch.Tensor] = {}  # by key: filled straight from the files
        self._values: dict[Path, Any] = {}  # by path: objects, and tensors that are filled by then
        self._notes: Notes = {}
        self._mine: dict[int, dict[Path, Saved]] = {}  # by source
        self._reshaped: set[str] = set()
        self._order = [one.path for one in reader.saved.values()]  # as the state was walked when it was saved

    @no_collection()
    def plan(self) -> None:
        """Finds out what goes where. InvalidArgumentError lists what does not fit; nothing has changed then."""
        self._read_own()
        notes = unpack_notes(self._own[NOTES_KEY]) if NOTES_KEY in self._own else self._reader.notes()
        self._notes = self._notes_here() if notes is None else notes
        self._divide()
        objects = [one.key for mine in self._mine.values() for one in mine.values() if one.tensor is None]
        read = self._reader.objects(objects)
        read |= {key: value for key, value in self._own.items() if key in read}
        for mine in self._mine.values():
            self._values |= {one.path: read[one.key] for one in mine.values() if one.tensor is None}
        for module in self._state.modules:
            self._plan_module(module)
        for source in self._state.sources:
            if isinstance(source, OptimizerSource):
                self._plan_optimizer(source)
            elif isinstance(source, ObjectSource):
                self._plan_object(source)
        self._plan_plain(self._state.plain)
        differences = self._differences
        if text := differences.text():
            where = f"load {self._reader.attempt}"
            if self._strict:
                raise InvalidArgumentError(
                    f"{where}: the state differs from what was saved; {text}. Nothing was changed. With strict=False "
                    "what is named here is left as it is"
                )
            _logger.warning("%s with strict=False: left as it is: %s", where, text)
        if differences.cast:
            _logger.warning("load %s: not bit-exact, as the dtype differs: %s", self._reader.attempt, differences.cast)

    def _read_own(self) -> None:
        """Rank 0 is always listed where ranks differed; another rank that is not had what rank 0 had."""
        ranks = (0,) if self._own_rank is None else (self._own_rank, 0)
        key = next((key for key in map(values_key, ranks) if key in self._reader.saved), None)
        if key is None:
            return
        kept = self._reader.objects([key])[key]
        if self._own_rank is not None:
            self._own, self._own_keys = kept["values"], frozenset(kept["keys"])
        else:
            self._first_keys = frozenset(kept["keys"])

    def _had(self, one: Saved) -> bool:
        return self._own_keys is None or one.key in self._own_keys

    def _belongs(self, one: Saved, owner: Source | None) -> bool:
        """It is not only another rank's. The state of one object is one rank's, never a mixture."""
        if isinstance(owner, ObjectSource) and self._own_keys is None and self._first_keys is not None:
            prefix = f"{key_of(owner.prefix)}."
            return one.key in self._first_keys or not any(key.startswith(prefix) for key in self._first_keys)
        return self._had(one) or isinstance(owner, ModuleSource)

    def _notes_here(self) -> Notes:
        """For a checkpoint without notes: the containers are taken to be what they are in the state, as far as the
        checkpoint has something of them. What DCP drops, an empty one, stays as it is."""
        notes: Notes = {}
        for source in [*self._state.sources, self._state.plain]:
            source.walk(notes)
        return {
            path: keys
            for path, keys in notes.items()
            if not keys or any(_below(one.path, path) for one in self._reader.saved.values())
        }

    @no_collection()
    def apply(self) -> None:
        """Changes the state. When it raises, the state is partly changed."""
        self._reader.tensors(self._targets)
        for key, value in self._own.items():
            if isinstance(value, torch.Tensor) and key in self._targets:
                self._targets[key].detach().copy_(value)
        if self._own_rank is None and self._tell:
            self._tell_what_differed()
        for module in self._state.modules:
            self._apply_module(module)
        for source in self._state.sources:
            if isinstance(source, OptimizerSource):
                self._apply_optimizer(source)
        self._apply_plain(self._state.plain)
        for source in self._state.sources:
            if isinstance(source, ObjectSource):
                source.target.load_state_dict(self._nested(source.prefix, source.target.state_dict()))

    def _tell_what_differed(self) -> None:
        kept = [key for key in self._reader.saved if is_values_key(key)]
        loaded = {
            one.key: self._values[one.path]
            for mine in self._mine.values()
            for one in mine.values()
            if one.path in self._values
        }
        different: dict[str, None] = {}
        first_keys: set[str] | None = None
        for begin in range(0, len(kept), _KEPT_AT_ONCE):
            for own in self._reader.objects(kept[begin : begin + _KEPT_AT_ONCE]).values():
                keys = set(own["keys"])
                first_keys = keys if first_keys is None else first_keys
                different |= dict.fromkeys(key for key in sorted(keys ^ first_keys) if key in loaded)
                for key, value in own["values"].items():
                    if key in loaded and key not in different:
                        here = loaded[key]
                        here = here.detach().to("cpu") if isinstance(here, torch.Tensor) else here
                        if fingerprint(key, value) != fingerprint(key, here):
                            different[key] = None
        if different:
            names = list(different)
            _logger.warning(
                "load %s: the ranks that saved it had different values of %s; loaded is what the lowest rank had that "
                "had any. (A resume with as many ranks gives each its own.)",
                self._reader.attempt,
                ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else ""),
            )

    # --- who gets what -----------------------------------------------------------------------------------------------

    def _divide(self) -> None:
        sources = self._state.sources
        for source in [*sources, self._state.plain]:
            self._mine[id(source)] = {}
        extra: dict[str, None] = {}
        for one in self._reader.saved.values():
            if one.key.startswith(RESERVED):
                continue
            owner = next((s for s in sources if _below(one.path, s.prefix)), None)
            if not self._belongs(one, owner):
                continue
            if owner is not None:
                self._mine[id(owner)][one.path] = one
            elif one.path[0] in self._state.names:
                if self._whole or _is_named(self._state.plain.mapping, one.path):
                    self._mine[id(self._state.plain)][one.path] = one
            elif self._whole:
                extra[str(one.path[0])] = None
        self._differences.extra += extra

    def _of(self, source: object) -> dict[Path, Saved]:
        return self._mine[id(source)]

    def _tensor_into(self, saved: Saved, target: torch.Tensor) -> bool:
        """Has `target` filled. False when it has another shape."""
        if tuple(target.shape) != saved.shape:
            self._differences.reshaped.append(f"{saved.key} (saved {saved.shape}, here {tuple(target.shape)})")
            self._reshaped.add(saved.key)
            return False
        if target.device.type == "meta":
            raise InvalidArgumentError(
                f"load {saved.key!r}: the tensor here is on the meta device; give it a device first"
            )
        if target.dtype != saved.dtype:
            self._differences.cast.append(f"{saved.key} ({saved.dtype} to {target.dtype})")
        self._targets[saved.key] = target
        self._values[saved.path] = target
        return True

    def _new_tensor(self, saved: Saved, like: torch.Tensor | None, device: torch.device | None = None) -> torch.Tensor:
        """`like` where it fits, else a new tensor."""
        fits = (
            isinstance(like, torch.Tensor)
            and tuple(like.shape) == saved.shape
            and like.dtype == saved.dtype
            and like.device.type != "meta"
            and like.layout is torch.strided
        )
        target = like if fits else torch.empty(saved.shape, dtype=saved.dtype, device=device or "cpu")
        assert target is not None
        self._targets[saved.key] = target
        self._values[saved.path] = target
        return target

    def _nested(self, prefix: Path, template: Any) -> Any:
        values = self._values
        leaves = {path[len(prefix) :]: values[path] for path in self._order if path in values and _below(path, prefix)}
        notes = {path[len(prefix) :]: keys for path, keys in self._notes.items() if _below(path, prefix)}
        return unflatten(leaves, notes, template)

    # --- modules -----------------------------------------------------------------------------------------------------

    def _plan_module(self, source: ModuleSource) -> None:
        notes: Notes = {}
        leaves, values = source.walk(notes)
        here = {leaf.path: value for leaf, value in zip(leaves, values, strict=True)}
        saved = self._of(source)
        # What a module calls its extra state is its own affair, below the name.
        depth = len(source.prefix) + 1
        names_here = dict.fromkeys(path[:depth] for path in [*here, *notes])
        names_there = dict.fromkeys(path[:depth] for path in [*saved, *self._notes] if _below(path, source.prefix))
        had = {path[:depth] for path, one in saved.items() if self._had(one)} | {path[:depth] for path in self._notes}
        self._differences.missing += [key_of(path) for path in names_here if path not in names_there]
        self._differences.extra += [key_of(path) for path in names_there if path in had and path not in names_here]
        for path, one in saved.items():
            value = here.get(path)
            if one.tensor is None or path[:depth] not in names_here:
                continue
            if isinstance(value, torch.Tensor):
                self._tensor_into(one, value)
            else:
                self._new_tensor(one, None)

    def _apply_module(self, source: ModuleSource) -> None:
        saved = self._of(source)
        if source.loads_plainly and all(one.tensor is not None for one in saved.values()):
            return  # its tensors were filled in place
        state = {}
        for name, (raw, value) in source.named_state_dict().items():
            prefix = (*source.prefix, name)
            given = any(_below(path, prefix) for path in [*saved, *self._notes])
            if given and not any(key_of(path) in self._reshaped for path in saved if _below(path, prefix)):
                state[raw] = self._nested(prefix, value)
        result = source.module.load_state_dict(state, strict=False)
        if self._strict and (result.missing_keys or result.unexpected_keys):
            raise InvalidArgumentError(
                f"load {key_of(source.prefix)!r}: missing {result.missing_keys}, unexpected {result.unexpected_keys}"
            )

    # --- optimizers --------------------------------------------------------------------------------------------------

    def _plan_optimizer(self, source: OptimizerSource) -> None:
        prefix, saved = source.prefix, self._of(source)
        name = key_of(prefix)
        if not saved:
            self._differences.missing.append(name)
            return
        names = self._names(source)
        groups = source.optimizer.param_groups
        saved_groups = self._saved_groups(source)
        here = {(i, n) for i, group in enumerate(_named_groups(names, groups)) for n in group}
        there = {(i, n) for i, group in enumerate(saved_groups) for n in group}
        self._differences.missing += [f"{name}.param_groups.{i}: {n}" for i, n in sorted(here - there)]
        self._differences.extra += [f"{name}.param_groups.{i}: {n}" for i, n in sorted(there - here)]
        parameters = dict(zip(names, (p for group in groups for p in group["params"]), strict=True))
        fused = {
            n: bool(group.get("fused") or group.get("capturable"))
            for group, ns in zip(groups, _named_groups(names, groups), strict=True)
            for n in ns
        }
        for path, one in saved.items():
            if one.tensor is None:
                continue
            inner = path[len(prefix) :]
            parameter = parameters.get(str(inner[1])) if inner[0] == "state" and len(inner) > 2 else None
            if parameter is None:
                here_now = _get(source.optimizer, inner) if inner[0] == "param_groups" else None
                self._new_tensor(one, here_now)
            elif self._other_shape(str(inner[1])):
                self._reshaped.add(one.key)
            else:
                self._plan_state(source, one, parameter, inner[2:], fused[str(inner[1])])

    def _plan_state(
        self, source: OptimizerSource, one: Saved, parameter: torch.Tensor, inner: Path, on_device: bool
    ) -> None:
        like: Any = source.optimizer.state.get(parameter)
        for part in inner:
            like = like.get(part) if isinstance(like, Mapping) else None
        alone = not one.shape and inner[-1] in _SCALARS  # of a parameter without dimensions, shapes do not tell
        if inner == ("step",):
            self._new_tensor(one, like, parameter.device if on_device else torch.device("cpu"))
        elif isinstance(parameter, DTensor) and one.shape == tuple(parameter.shape) and not alone:
            fits = isinstance(like, DTensor) and like.dtype == one.dtype and tuple(like.shape) == one.shape
            target = like if fits else torch.empty_like(parameter, dtype=one.dtype, requires_grad=False)
            assert isinstance(target, torch.Tensor)
            self._targets[one.key] = target
            self._values[one.path] = target
        else:
            self._new_tensor(one, like, parameter.device)

    def _other_shape(self, name: str) -> bool:
        return any(f"{key_of(module.prefix)}.{name}" in self._reshaped for module in self._state.modules) or (
            name in self._reshaped
        )

    def _names(self, source: OptimizerSource) -> list[str]:
        """The names in the checkpoint of the optimizer's parameters. Where they were saved or are to be loaded without
        the module that names them, they go by their places, as in Optimizer.load_state_dict()."""
        names = source.names()
        saved = self._saved_groups(source)
        there = [name for group in saved for name in group]
        sizes = [len(group["params"]) for group in source.optimizer.param_groups]
        numbers = [str(i) for i in range(len(names))]
        by_place = (names == numbers) != (there == numbers) and sizes == [len(group) for group in saved]
        return there if by_place else names

    def _saved_groups(self, source: OptimizerSource) -> list[list[str]]:
        found: list[list[str]] = []
        i = 0
        while (path := (*source.prefix, "param_groups", i, "params")) in self._values:
            found.append([str(n) for n in self._values[path]])
            i += 1
        return found

    def _apply_optimizer(self, source: OptimizerSource) -> None:
        if not self._of(source):
            return
        optimizer, names = source.optimizer, self._names(source)
        numbers = {name: i for i, name in enumerate(names)}
        nested = self._nested(source.prefix, None)
        state: dict[Any, Any] = {}
        for name, held in nested.get("state", {}).items():
            if name in numbers and not self._other_shape(name):
                state[numbers[name]] = held
            elif name not in numbers and not self._is_parameter(source, name):
                state[name] = held  # an optimizer's own, not of one parameter
        packed = optimizer.state_dict()
        groups = []
        saved_groups = nested.get("param_groups", [])
        for i, group in enumerate(packed["param_groups"]):
            kept = saved_groups[i] if i < len(saved_groups) else {}
            groups.append({**group, **{k: v for k, v in kept.items() if k != "params"}, "params": group["params"]})
        rest = {k: v for k, v in nested.items() if k not in ("state", "param_groups")}
        optimizer.load_state_dict({**packed, **rest, "state": state, "param_groups": groups})
        # torch casts state to the parameter's dtype; what was saved in another one comes back in it.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, held in state.items():
            if isinstance(number, int) and parameters[number] in optimizer.state:
                _uncast(optimizer.state[parameters[number]], held)

    def _is_parameter(self, source: OptimizerSource, name: str) -> bool:
        return any(name in group for group in self._saved_groups(source))

    # --- objects and plain values ------------------------------------------------------------------------------------

    def _plan_object(self, source: ObjectSource) -> None:
        saved = self._of(source)
        if not saved and not any(_below(path, source.prefix) for path in self._notes):
            self._differences.missing.append(key_of(source.prefix))
            return
        here: dict[Path, Any] = dict(zip(*_paths(source.walk({})), strict=True))
        for one in saved.values():
            if one.tensor is not None:
                self._new_tensor(one, here.get(one.path))

    def _plan_plain(self, source: PlainSource) -> None:
        leaves, values = source.walk({})
        saved = self._of(source)
        for leaf, value in zip(leaves, values, strict=True):
            one = saved.get(leaf.path)
            if one is None:
                # A value that was a mapping or a list when it was saved is there under longer paths.
                if not any(_below(path, leaf.path) for path in [*saved, *self._notes]):
                    self._differences.missing.append(leaf.key)
            elif one.tensor is not None and isinstance(value, torch.Tensor):
                self._tensor_into(one, value)
        for one in saved.values():
            if one.tensor is not None and one.path not in self._values and one.key not in self._reshaped:
                self._new_tensor(one, None)

    def _apply_plain(self, source: PlainSource) -> None:
        saved = self._of(source)
        names = {path[0] for path in saved} | {path[0] for path in self._notes if path}
        others = {s.prefix for s in self._state.sources}
        for name in self._state.names:
            if name in names:
                _merge(source.mapping, name, self._nested((name,), source.mapping[name]), (name,), others)


def _is_named(mapping: Any, path: Path) -> bool:
    """A mapping names what it has, an empty one whatever was saved below it, as does what is no mapping."""
    node = mapping
    for part in path:
        if not isinstance(node, Mapping) or is_object(node) or not node:
            return True
        found = node.get(part, _ABSENT)
        if found is _ABSENT:  # keys that are no strings were saved as such
            found = next((value for key, value in node.items() if not isinstance(key, str) and str(key) == part), found)
        if found is _ABSENT:
            return False
        node = found
    return True


def _merge(mapping: Any, key: Any, loaded: Any, path: Path, sources: set[Path]) -> None:
    """Sets mapping[key] to what was loaded. Mappings that are there stay the same objects, as do modules."""
    here = mapping.get(key)
    if path in sources:
        return
    if isinstance(here, dict) and isinstance(loaded, dict):
        for name, value in loaded.items():
            _merge(here, name, value, (*path, str(name)), sources)
    else:
        mapping[key] = loaded


def _paths(walked: tuple[list[Any], list[Any]]) -> tuple[Iterator[Path], list[Any]]:
    return (leaf.path for leaf in walked[0]), walked[1]


def _named_groups(names: list[str], groups: list[dict[str, Any]]) -> list[list[str]]:
    found, first = [], 0
    for group in groups:
        found.append(names[first : first + len(group["params"])])
        first += len(group["params"])
    return found


def _get(optimizer: torch.optim.Optimizer, inner: Path) -> Any:
    """What stands at ("param_groups", i, key, ...) now."""
    node: Any = optimizer.param_groups
    for part in inner[1:]:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return None
    return node


def _uncast(now: Any, held: Any) -> None:
    if not (isinstance(now, dict) and isinstance(held, dict)):
        return
    for key, value in held.items():
        current = now.get(key)
        if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor):
            if current.dtype != value.dtype and current.shape == value.shape:
                now[key] = value.to(current.device)
        else:
            _uncast(current, value)
