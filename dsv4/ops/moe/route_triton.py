# mypy: ignore-errors
"""Which rows an expert gets, worked out on the GPU: no host waits for it.

A *pair* is (token, place). Pairs are sorted by expert, each expert's in ascending order, and cut
into tiles of BM rows. Program e finds the pairs of expert e; no atomics, so one result.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4.ops.device import launch_options, workspace

SMALL_PAIRS = 1024  # up to here one block holds all pairs and the tile list has no gaps


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _route_kernel(
    experts, sorted_pairs, tile_expert, tile_start, ends, num_pairs, num_tiles, num_experts,
    BM: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, SMALL: tl.constexpr
):  # fmt: skip
    e = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    few = tl.arange(0, 128)
    less = 0
    count = 0
    if SMALL:
        ids = tl.load(experts + lanes, mask=lanes < num_pairs, other=0).to(tl.int32)
        bins = tl.histogram(ids, BINS, mask=lanes < num_pairs)
        below = tl.arange(0, BINS) < e
        less = tl.sum(tl.where(below, bins, 0))
        count = tl.sum(tl.where(tl.arange(0, BINS) == e, bins, 0))
        tiles = (bins + BM - 1) // BM
        base = tl.sum(tl.where(below, tiles, 0))
        gap_end = tl.where(e == num_experts - 1, num_tiles, 0)
    else:
        for start in tl.range(0, num_pairs, CHUNK):
            live = start + lanes < num_pairs
            ids = tl.load(experts + start + lanes, mask=live, other=num_experts).to(tl.int32)
            less += tl.sum((ids < e).to(tl.int32))
            count += tl.sum((ids == e).to(tl.int32))
        base = less // BM + e
        gap_end = (less + count) // BM + e + 1
    own = (count + BM - 1) // BM
    tl.store(ends + e, less + count)
    for start in tl.range(0, own, 128):
        index = start + few
        tl.store(tile_expert + base + index, few * 0 + e, mask=index < own)
        tl.store(tile_start + base + index, less + index * BM, mask=index < own)
    for start in tl.range(base + own, gap_end, 128):
        tl.store(tile_expert + start + few, few * 0 - 1, mask=start + few < gap_end)
    if count > 0:
        placed = less
        for start in tl.range(0, num_pairs, CHUNK):
            live = start + lanes < num_pairs
            ids = tl.load(experts + start + lanes, mask=live, other=num_experts).to(tl.int32)
            match = (ids == e).to(tl.int32)
            rank = placed + tl.cumsum(match, 0) - 1
            tl.store(sorted_pairs + rank, start + lanes, mask=match == 1)
            placed += tl.sum(match)


@dataclass(frozen=True)
class Route:
    """Pairs sorted by expert and their tiles; a tile whose expert is -1 is empty."""

    sorted_pairs: torch.Tensor  # [pairs] int32
    tile_expert: torch.Tensor  # [num_tiles] int32
    tile_start: torch.Tensor  # [num_tiles] int32: first sorted pair
    ends: torch.Tensor  # [experts] int32: one past the expert's last sorted pair
    num_tiles: int


def num_route_tiles(num_pairs: int, num_experts: int, bm: int) -> int:
    """Enough tiles for any routing."""
    tiles = num_pairs // bm + num_experts
    return min(num_pairs, tiles) if num_pairs <= SMALL_PAIRS else tiles


def choose_config(num_pairs: int) -> tuple[int, bool]:
    """Pairs that a program looks at at a time, and whether these are all."""
    small = num_pairs <= SMALL_PAIRS
    return max(triton.next_power_of_2(num_pairs), 128) if small else 2048, small


def route(experts: torch.Tensor, num_experts: int, bm: int) -> Route:
    num_pairs = experts.numel()
    num_tiles = num_route_tiles(num_pairs, num_experts, bm)
    chunk, small = choose_config(num_pairs)
    names = ("sorted_pairs", "tile_expert", "tile_start", "ends")
    sizes = (num_pairs, num_tiles, num_tiles, num_experts)
    buffers = [
        workspace(experts.device, f"route_{name}", size, torch.int32)
        for name, size in zip(names, sizes, strict=True)
    ]
    _route_kernel[(num_experts,)](
        experts,
        *buffers,
        num_pairs,
        num_tiles,
        num_experts,
        BM=bm,
        CHUNK=chunk,
        BINS=triton.next_power_of_2(num_experts),
        SMALL=small,
        **launch_options(4),
    )
    return Route(*buffers, num_tiles)
