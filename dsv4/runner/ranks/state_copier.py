"""State on all ranks: copies for the prefix cache, and a check that ranks agree."""

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


class TeamStateCopier:
    """Copies state on all ranks. Prefixes are read from rank 0 and written to all: with one stage,
    every rank's state has the same bytes."""

    def __init__(self, team: Team, state: StateTensors) -> None:
        self._team, self._state = team, state

    def copy_page(self, pool: Pool, source: int, target: int) -> None:
        self._team.command("copy_page", (POOLS.index(pool), source, target))
        self._state.copy_page(pool, source, target)

    def save_rows(self, slot: int, row: int) -> None:
        self._team.command("save_rows", (slot, row))
        self._state.save_rows(slot, row)

    def restore_rows(self, row: int, slot: int) -> None:
        self._team.command("restore_rows", (row, slot))
        self._state.restore_rows(row, slot)

    def read(self, pages: dict[Pool, list[int]], row: int) -> dict[str, Tensor]:
        return self._state.read(pages, row)

    def write(self, tensors: dict[str, Tensor], pages: dict[Pool, list[int]], row: int) -> None:
        for place, held, data in self._state.parts(tensors, pages):
            self._team.command("write_state", (place, row, *held), data)
        self._state.write(tensors, pages, row)
