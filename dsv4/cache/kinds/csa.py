"""Ratio-4 layers: the window, one entry and one index key per 4 tokens, two compressors' rows."""

from dataclasses import dataclass

from torch import Tensor

from dsv4.cache.geometry import CARRIED_ROWS, PAGE_ENTRIES, Geometry, Pool
from dsv4.cache.kinds.hca import allocate_compressor
from dsv4.cache.kinds.swa import allocate_entries
from dsv4.formats.entry import index_entry
from dsv4.ops.kv.compress import CompressorState
from dsv4.ops.kv.pool import PagedPool, allocate_pool


@dataclass(frozen=True)
class CsaState:
    window: PagedPool
    entries: PagedPool
    index: PagedPool
    compressor: CompressorState
    index_compressor: CompressorState

    @classmethod
    def allocate(
        cls, geometry: Geometry, num_slots: int, num_pages: dict[Pool, int], device: str
    ) -> "CsaState":
        config = geometry.config
        index_parts = index_entry(geometry.index_format, config.index_head_dim)
        index_shape = (num_pages["csa"], PAGE_ENTRIES["csa"])
        kept = (geometry.kept_prefixes * num_slots, CARRIED_ROWS)
        sizes = (config.head_dim, config.index_head_dim)
        return cls(
            allocate_entries(geometry, "window", num_pages["window"], device),
            allocate_entries(geometry, "csa", num_pages["csa"], device),
            allocate_pool(geometry.index_format, True, index_parts, index_shape, device),
            *(allocate_compressor(num_slots, 4, 2 * n, device, (*kept, n)) for n in sizes),
        )

    def pools(self) -> list[tuple[Pool, PagedPool]]:
        return [("window", self.window), ("csa", self.entries), ("csa", self.index)]

    def carried(self) -> list[Tensor]:
        """The block before the boundary is in the last rows; the next block reads the
        first half of its channels."""
        states = (self.compressor, self.index_compressor)
        tensors = [t for state in states for t in (state.values, state.gates)]
        return [t[:, -CARRIED_ROWS:, : t.shape[2] // 2] for t in tensors]

    def kept(self) -> list[Tensor]:
        states = (self.compressor, self.index_compressor)
        tensors = [t for state in states for t in (state.kept_values, state.kept_gates)]
        return [t for t in tensors if t is not None]
