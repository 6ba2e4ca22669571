"""The prefix cache's copies of state, on all ranks."""

from typing import Any

from dsv4.cache.geometry import POOLS, Pool
from dsv4.cache.state import StateTensors
from dsv4.parallel.team import Team


class TeamStateCopier:
    """Copies of state on all ranks. Reading and writing prefixes on disk is not possible yet."""

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

    def read(self, pages: dict[Pool, list[int]], row: int) -> dict[str, Any]:
        raise AssertionError("prefix_disk is refused with several ranks")

    def write(self, tensors: dict[str, Any], pages: dict[Pool, list[int]], row: int) -> None:
        raise AssertionError("prefix_disk is refused with several ranks")
