# mypy: ignore-errors
"""Groups rows by expert on the GPU, without a host sync.

A *pair* is (token, place). Pairs are sorted by expert, each expert's in ascending order, and split
into tiles of BM rows; the list of tiles has no gaps. Few pairs: program e finds those of expert e.
Many: chunks are counted first, and these counts give the destination of each chunk's pairs. No
atomics, so the result is deterministic. Pairs of padding rows (expert -1) are skipped.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import depend
from dsv4.ops.core.launch import dependent_options, launch_options
from dsv4.ops.core.workspace import workspace

SMALL_PAIRS = 1024  # up to here one block holds all pairs
CHUNK = 256  # pairs per program above that


class ExpertGroups(NamedTuple):
    """Pairs sorted by expert, and their tiles, int32, as kernels take them."""

    sorted_pairs: torch.Tensor  # [pairs]; 0 after the routed ones
    tile_expert: torch.Tensor  # [num_tiles]
    tile_start: torch.Tensor  # [num_tiles] first row (sorted pair)
    tile_end: torch.Tensor  # [num_tiles] one past the last row of the tile's expert
    places: torch.Tensor  # [pairs] where each is among the sorted ones; -1 if it is not routed
    slots: torch.Tensor  # [pairs] tile * BM + row in it of a sorted pair; -1 after the routed ones


@dataclass(frozen=True)
class ExpertTiles:
    """Tiles of the shared expert may follow; their rows come after the pairs, one per token. The
    last tiles are empty, with expert -1."""

    groups: ExpertGroups
    num_tiles: int


@triton.jit
def _extra_tile(tile, routed, num_pairs, num_tokens, num_shared, num_experts, BM: tl.constexpr):
    """(expert, start, end) of a tile after the `routed` ones: the shared expert's, or empty."""
    shared = (tile >= routed) & (tile < routed + num_shared)
    start = num_pairs + (tile - routed) * BM
    return tl.where(shared, num_experts, -1), start, tile * 0 + num_pairs + num_tokens


@triton.jit(do_not_specialize=["num_pairs", "num_tokens", "num_shared", "num_tiles"])
def _group_kernel(
    experts, to, num_pairs, num_tokens, num_shared, num_tiles, num_experts,
    BM: tl.constexpr, WIDTH: tl.constexpr, BINS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program e: the pairs and tiles of expert e; the last one also the non-routed tiles."""
    depend(DEPENDENT)
    e = tl.program_id(0)
    lanes = tl.arange(0, WIDTH)
    few = tl.arange(0, 128)
    live = lanes < num_pairs
    ids = tl.load(experts + lanes, mask=live, other=0).to(tl.int32)
    live = live & (ids >= 0)
    bins = tl.histogram(ids, BINS, mask=live)
    below = tl.arange(0, BINS) < e
    less = tl.sum(tl.where(below, bins, 0))
    count = tl.sum(tl.where(tl.arange(0, BINS) == e, bins, 0))
    base = tl.sum(tl.where(below, (bins + BM - 1) // BM, 0))
    own = (count + BM - 1) // BM
    for start in tl.range(0, own, 128):
        index = start + few
        tl.store(to.tile_expert + base + index, few * 0 + e, mask=index < own)
        tl.store(to.tile_start + base + index, less + index * BM, mask=index < own)
        tl.store(to.tile_end + base + index, few * 0 + less + count, mask=index < own)
    if e == num_experts - 1:
        rest = (lanes >= less + count) & (lanes < num_pairs)
        tl.store(to.sorted_pairs + lanes, 0, mask=rest)
        tl.store(to.slots + lanes, -1, mask=rest)
        tl.store(to.places + lanes, -1, mask=(lanes < num_pairs) & ~live)
        for start in tl.range(base + own, num_tiles, 128):
            tile = start + few
            expert, at, end = _extra_tile(
                tile, base + own, num_pairs, num_tokens, num_shared, num_experts, BM
            )
            tl.store(to.tile_expert + tile, expert, mask=tile < num_tiles)
            tl.store(to.tile_start + tile, at, mask=tile < num_tiles)
            tl.store(to.tile_end + tile, end, mask=tile < num_tiles)
    if count > 0:
        match = (live & (ids == e)).to(tl.int32)
        rank = less + tl.cumsum(match, 0) - 1
        tl.store(to.sorted_pairs + rank, lanes, mask=match == 1)
        tl.store(to.places + lanes, rank, mask=match == 1)
        tl.store(to.slots + rank, base * BM + rank - less, mask=match == 1)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(experts, counts, num_pairs, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """Program c: how many pairs of chunk c each expert gets."""
    chunk = tl.program_id(0)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    live = pairs < num_pairs
    ids = tl.load(experts + pairs, mask=live, other=0).to(tl.int32)
    bins = tl.histogram(ids, BINS, mask=live & (ids >= 0))
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), bins)


@triton.jit
def _add_counts(counts, BINS: tl.constexpr):
    """Pairs per expert: in all chunks, and in those before this program's."""
    ROWS: tl.constexpr = 8192 // BINS
    rows = tl.arange(0, ROWS)
    column = tl.arange(0, BINS)
    total = tl.zeros((ROWS, BINS), tl.int32)
    before = tl.zeros((ROWS, BINS), tl.int32)
    for first in tl.range(0, tl.num_programs(0), ROWS):
        row = (first + rows)[:, None]
        live = row < tl.num_programs(0)
        part = tl.load(counts + row * BINS + column[None, :], mask=live, other=0).to(tl.int32)
        total += part
        before += tl.where(row < tl.program_id(0), part, 0)
    return tl.sum(total, 0), tl.sum(before, 0)


@triton.jit
def _rank_in_chunk(ids, CHUNK: tl.constexpr):
    """For each pair, how many earlier pairs of its chunk have the same expert: a thread has a pair
    and meets all others."""
    own = tl.arange(0, CHUNK)
    same = (ids[:, None] == ids[None, :]) & (own[:, None] < own[None, :])
    return tl.sum(same.to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_pairs", "num_tokens", "num_shared", "num_tiles"])
def _place_kernel(
    experts, counts, to, num_pairs, num_tokens, num_shared, num_tiles, num_experts,
    BM: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """Program c: the destinations of chunk c's pairs, and some of the tiles."""
    chunk = tl.program_id(0)
    total, before = _add_counts(counts, BINS)
    end = tl.cumsum(total, 0)
    start = end - total
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    rest = (pairs >= tl.sum(total)) & (pairs < num_pairs)
    tl.store(to.sorted_pairs + pairs, 0, mask=rest)
    tl.store(to.slots + pairs, -1, mask=rest)
    ids = tl.load(experts + pairs, mask=pairs < num_pairs, other=-1).to(tl.int32)
    rank = _rank_in_chunk(ids, CHUNK)
    place = tl.gather(start + before, tl.maximum(ids, 0), 0) + rank
    tl.store(to.sorted_pairs + place, pairs, mask=ids >= 0)
    tl.store(to.places + pairs, tl.where(ids >= 0, place, -1), mask=pairs < num_pairs)
    tiles = (total + BM - 1) // BM
    last = tl.cumsum(tiles, 0)
    beside = tl.gather((last - tiles) * BM - start, tl.maximum(ids, 0), 0)
    tl.store(to.slots + place, place + beside, mask=ids >= 0)
    routed = tl.sum(tiles)
    for first in tl.range(chunk * 16, num_tiles, tl.num_programs(0) * 16):
        tile = first + tl.arange(0, 16)
        expert = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)
        own = tl.arange(0, BINS)[None, :] == expert[:, None]
        starts = start[None, :] + (tile[:, None] - (last - tiles)[None, :]) * BM
        at = tl.sum(tl.where(own, starts, 0), 1)
        until = tl.sum(tl.where(own, end[None, :], 0), 1)
        extra, extra_at, extra_end = _extra_tile(
            tile, routed, num_pairs, num_tokens, num_shared, num_experts, BM
        )
        is_routed = tile < routed
        mask = tile < num_tiles
        tl.store(to.tile_expert + tile, tl.where(is_routed, expert, extra), mask=mask)
        tl.store(to.tile_start + tile, tl.where(is_routed, at, extra_at), mask=mask)
        tl.store(to.tile_end + tile, tl.where(is_routed, until, extra_end), mask=mask)


def num_expert_tiles(num_pairs: int, num_experts: int, bm: int) -> int:
    """Enough tiles for any routing."""
    return min(num_pairs, num_pairs // bm + num_experts)


def choose_config(num_pairs: int) -> int | None:
    """Block size if one program reads all pairs, otherwise None."""
    return max(triton.next_power_of_2(num_pairs), 128) if num_pairs <= SMALL_PAIRS else None


def group_by_expert(
    experts: torch.Tensor, num_experts: int, bm: int, *, shared: bool = False, early: bool = False
) -> ExpertTiles:
    """`shared`: append tiles of the shared expert, as expert `num_experts`. `early`: few pairs may
    be grouped by a launch that starts before the previous one is complete."""
    device, num_pairs, num_tokens = experts.device, experts.numel(), experts.shape[0]
    num_shared = triton.cdiv(num_tokens, bm) if shared else 0
    num_tiles = num_expert_tiles(num_pairs, num_experts, bm) + num_shared
    groups = ExpertGroups(*(
        workspace(device, f"group_{name}", num_tiles if "tile" in name else num_pairs, torch.int32)
        for name in ExpertGroups._fields
    ))  # fmt: skip
    numbers = (num_pairs, num_tokens, num_shared, num_tiles, num_experts)
    bins, width = max(triton.next_power_of_2(num_experts), 32), choose_config(num_pairs)
    if width is not None:
        _group_kernel[(num_experts,)](
            experts, groups, *numbers, BM=bm, WIDTH=width, BINS=bins,
            **dependent_options(device, 4, early=early),
        )  # fmt: skip
    else:
        chunks = triton.cdiv(num_pairs, CHUNK)
        counts = workspace(device, "group_counts", chunks * bins, torch.int16)
        _count_kernel[(chunks,)](
            experts, counts, num_pairs, CHUNK=CHUNK, BINS=bins, **launch_options(4)
        )
        _place_kernel[(chunks,)](
            experts, counts, groups, *numbers, BM=bm, CHUNK=CHUNK, BINS=bins, **launch_options(8)
        )
    return ExpertTiles(groups, num_tiles)
