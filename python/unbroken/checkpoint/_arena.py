"""The plan of this rank's saves and the image that goes with it: made once, and anew when the structure changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unbroken import _engine
from unbroken._board import AnyBoard
from unbroken.checkpoint._image import StagedImage
from unbroken.checkpoint._metadata_writer import MetadataWriter
from unbroken.checkpoint._pack import Packer
from unbroken.checkpoint._plan import LocalPlan, Places, Plan, agree, describe
from unbroken.checkpoint._state import State, StructureChanged
from unbroken.errors import Error, InvalidArgumentError, SaveFailedError

__all__ = ["Arena", "Described"]

_logger = logging.getLogger(__name__)
_PLACES_SECONDS = 60.0
_SMALL_BYTES = 4 << 20


@dataclass
class Described:
    """What this rank has to save, or the error that kept it from saying so."""

    local: LocalPlan | Exception
    packer: Packer | None
    number: int  # of the plan that is to be made of it


class Arena:
    """Foreground: describe(), stage(), and plan() while no save is in flight. Background: plan() and metadata()."""

    def __init__(self, state: State, board: AnyBoard, rank: int, world_size: int, timeout: float) -> None:
        self._state = state
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self.plans = 0  # asked for so far: equal on all ranks
        self.image: StagedImage | None = None  # None before the first plan, and after one that failed
        self.error = "nothing is planned yet"
        self._stale = False  # coordinator: some rank's structure is not the planned one
        self._places: list[Places] = []  # coordinator: of every rank, once they are known
        self._listed: Any = None  # what self._metadata was made of
        self._writer: MetadataWriter | None = None  # coordinator: for the plan of the image
        self._metadata: list[bytes] = []
        self._seen: list[Any] | None = None  # the values that needs_plan() looked at in this step

    def describe(self) -> Described:
        """What a new plan is made of, for all ranks to call at once."""
        self.plans += 1
        self._stale = False
        local, packer = look_at(self._state, self._rank)
        return Described(local, packer, self.plans - 1)

    def plan(self, described: Described) -> None:
        """Agrees with the other ranks, and makes the image. A failure stays in `error`: a save reports it."""
        try:
            plan = agree(described.local, self._board, described.number, self._rank, self._world_size, self._timeout)
            self.close()
            assert described.packer is not None
            image = StagedImage(plan, described.packer, self._rank)
            places = image.places()
            if self._rank == 0:
                self._places = [places]
            else:
                self._board.set(f"places/{plan.number}/{self._rank}", json.dumps(places).encode())
            self.image, self.error = image, ""
        except Exception as error:  # noqa: BLE001  # training goes on, whatever it is
            self.close()
            self.error = f"rank {self._rank} has no plan for its saves: {error}"
            _logger.error("%s", self.error)

    def forget_values(self) -> None:
        """At the beginning of a step: what needs_plan() saw is no longer what the state holds."""
        self._seen = None

    def needs_plan(self) -> bool:
        """Whether the next save must plan anew, as far as this rank knows."""
        if self.image is None or self._stale:
            return True
        if self._state.is_unsharded():
            return False  # this rank must not look alone; the save itself finds out
        try:
            self._seen = self._values(self.image.plan)
        except StructureChanged as change:
            _logger.info("the state's structure has changed (%s): the save plans anew", change)
            return True
        except InvalidArgumentError:
            return True  # planning says what is wrong, to all ranks
        return False

    def _values(self, plan: Plan) -> list[Any]:
        values = self._state.values()
        plan.local.check(values)
        return values

    def prepare(self) -> Callable[[], None]:
        """Looks the state over and returns the copy that is left to do, which cannot fail for what the state is.

        A small state is copied here: that takes less than what a commit that begins beside it does with the GIL. Raises
        StructureChanged when the state is not as planned.
        """
        image = self.image
        if image is None:
            raise SaveFailedError(self.error)
        values, self._seen = self._seen if self._seen is not None else self._values(image.plan), None
        copies = image.prepare(values)
        if image.bytes <= _SMALL_BYTES:
            image.copy(copies)
            return lambda: None

        def copy(_alive: list[Any] = values) -> None:  # the copies are addresses: what they point to must live as long
            image.copy(copies)

        return copy

    def close(self) -> None:
        """Gives the memory back. No save may be in flight."""
        image, self.image = self.image, None
        self._places, self._writer, self._metadata = [], None, []
        if image is not None:
            image.close()

    # --- between the ranks -------------------------------------------------------------------------------------------

    def say_stale(self) -> None:
        """This rank could not save by the plan: the coordinator is to plan anew."""
        try:
            self._board.set(f"plan/{self.plans - 1}/stale/{self._rank}", b"1")
        except (Error, RuntimeError) as error:
            _logger.info("tell the coordinator to plan anew: %s", error)

    def look_for_stale(self, *, known: bool) -> None:
        """Coordinator, after a save that failed."""
        keys = [f"plan/{self.plans - 1}/stale/{r}" for r in range(1, self._world_size)]
        try:
            self._stale = known or any(value is not None for value in self._board.get(keys))
        except (Error, RuntimeError):
            self._stale = True

    def metadata(self, plan: Plan, told: list[str | None]) -> list[bytes]:
        """Coordinator: the bytes of `.metadata`, in parts; the same ones as long as nothing has another place.

        told: what each rank's vote says of this save (StagedImage.object_slots): the places of its objects, where they
        are not as planned, and the digest of its values.
        """
        if len(self._places) < self._world_size:
            keys = [f"places/{plan.number}/{r}" for r in range(1, self._world_size)]
            places = _engine.board_collect(self._board, keys, _PLACES_SECONDS)
            missing = [str(r) for r, text in enumerate(places, 1) if text is None]
            if missing:
                raise SaveFailedError(f"rank {', '.join(missing)} did not say where its tensors lie")
            self._places += [Places(*json.loads(text)) for text in places if text is not None]
        votes = [json.loads(text) if text is not None else {} for text in told]
        slots = [vote.get("slots", {}) for vote in votes]
        apart = [rank for rank, vote in enumerate(votes) if vote.get("values") != votes[0].get("values")]
        if apart:
            apart.insert(0, 0)
        if not self._metadata or (slots, apart) != self._listed:
            self._writer = self._writer or MetadataWriter(plan)
            places_now = [its.moved(changed) for its, changed in zip(self._places, slots, strict=True)]
            self._metadata = self._writer.write(places_now, apart)
            self._listed = (slots, apart)
        return self._metadata


def look_at(state: State, rank: int) -> tuple[LocalPlan | Exception, Packer | None]:
    """What `state` holds now. An error is returned: the other ranks must hear of it, whatever it is."""
    try:
        leaves, values = state.walk()
        local = describe(leaves, values, rank)
        return local, Packer(local, values, rank)
    except Exception as error:  # noqa: BLE001
        return error, None
