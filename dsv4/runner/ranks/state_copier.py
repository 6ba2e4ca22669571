"""State on all ranks: copies for the prefix cache, and a check that ranks agree."""

from collections.abc import Sequence

from torch import Tensor

from dsv4.cache.geometry import POOLS, Pool
from dsv4.cache.pages import SequencePages
from dsv4.cache.state import StateTensors
from dsv4.parallel.team import Team

CHECK_COMMANDS = 1024  # between two checks; each waits for the device once


def check_state(team: Team | None, state: StateTensors, held: SequencePages) -> None:
    """Now and then, after a step, compare states: a rank that differs is named, and all end."""
    if team is not None and team.num_commands % CHECK_COMMANDS == 0:
        newest = next(reversed(held.columns["window"].values()))
        team.command("check", (newest,))
        team.compare(state.checksum(newest))


COPIES = ("copy_page", "save_rows", "restore_rows")


def copy_state(state: StateTensors, kind: str, numbers: Sequence[int]) -> None:
    """One of the `COPIES`, as commands carry them."""
    if kind == "copy_page":
        state.copy_page(POOLS[numbers[0]], numbers[1], numbers[2])
    elif kind == "save_rows":
        state.save_rows(*numbers)
    else:
        state.restore_rows(*numbers)


class TeamStateCopier:
    """Copies state on all ranks, or with a `home` only there. Prefixes are read from rank 0 and
    written to all: with one stage and one home, every rank's state has the same bytes."""

    def __init__(self, team: Team, state: StateTensors, home: int = -1, num_slots: int = 0) -> None:
        """`num_slots`: of a home; slots are numbered over all homes."""
        self._team, self._state, self._home, self._num_slots = team, state, home, num_slots

    def copy_page(self, pool: Pool, source: int, target: int) -> None:
        self._copy("copy_page", POOLS.index(pool), source, target)

    def save_rows(self, slot: int, row: int) -> None:
        self._copy("save_rows", self._own(slot), row)

    def restore_rows(self, row: int, slot: int) -> None:
        self._copy("restore_rows", row, self._own(slot))

    def _own(self, slot: int) -> int:
        return slot % self._num_slots if self._num_slots else slot

    def _copy(self, kind: str, *numbers: int) -> None:
        self._team.command(kind, (self._home, *numbers))
        if self._home in (-1, 0):
            copy_state(self._state, kind, numbers)

    def read(self, pages: dict[Pool, list[int]], row: int) -> dict[str, Tensor]:
        return self._state.read(pages, row)

    def write(self, tensors: dict[str, Tensor], pages: dict[Pool, list[int]], row: int) -> None:
        for place, held, data in self._state.parts(tensors, pages):
            self._team.command("write_state", (place, row, *held), data)
        self._state.write(tensors, pages, row)
