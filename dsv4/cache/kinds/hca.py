"""Ratio-128 layers: the window, one entry per 128 tokens, the open block's rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.cache.geometry import Geometry, Pool
from dsv4.cache.kinds.swa import allocate_entries
from dsv4.ops.kv.compress import CompressorState, state_rows
from dsv4.ops.kv.pool import PagedPool


def allocate_compressor(
    num_slots: int, ratio: int, width: int, device: str, kept: tuple[int, ...] | None = None
) -> CompressorState:
    """`kept`: shape of the rows that cached prefixes store."""
    shape = (num_slots, state_rows(ratio), width)
    shapes = (shape, shape) if kept is None else (shape, shape, kept, kept)
    return CompressorState(*(torch.zeros(each, device=device) for each in shapes))


@dataclass(frozen=True)
class HcaState:
    window: PagedPool
    entries: PagedPool
    compressor: CompressorState

    @classmethod
    def allocate(
        cls, geometry: Geometry, num_slots: int, num_pages: dict[Pool, int], device: str
    ) -> "HcaState":
        return cls(
            allocate_entries(geometry, "window", num_pages["window"], device),
            allocate_entries(geometry, "hca", num_pages["hca"], device),
            allocate_compressor(num_slots, 128, geometry.config.head_dim, device),
        )

    def pools(self) -> list[tuple[Pool, PagedPool]]:
        return [("window", self.window), ("hca", self.entries)]

    def carried(self) -> list[Tensor]:
        return []  # a block of 128 tokens ends at the boundary: the next one starts empty

    def kept(self) -> list[Tensor]:
        return []
