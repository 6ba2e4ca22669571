"""Window-only layers: the keys of the last tokens."""

from dataclasses import dataclass

from torch import Tensor

from dsv4.cache.geometry import PAGE_ENTRIES, Geometry, Pool
from dsv4.formats.entry import kv_entry
from dsv4.ops.kv.pool import PagedPool, allocate_pool


def allocate_entries(geometry: Geometry, pool: Pool, num_pages: int, device: str) -> PagedPool:
    """Key entries of one layer in one of the pools."""
    config = geometry.config
    parts = kv_entry(geometry.kv_format, config.head_dim, config.rope_head_dim)
    shape = (num_pages, PAGE_ENTRIES[pool])
    return allocate_pool(geometry.kv_format, False, parts, shape, device)


@dataclass(frozen=True)
class SwaState:
    window: PagedPool

    @classmethod
    def allocate(
        cls, geometry: Geometry, num_slots: int, num_pages: dict[Pool, int], device: str
    ) -> "SwaState":
        return cls(allocate_entries(geometry, "window", num_pages["window"], device))

    def pools(self) -> list[tuple[Pool, PagedPool]]:
        return [("window", self.window)]

    def carried(self) -> list[Tensor]:
        return []

    def kept(self) -> list[Tensor]:
        return []
