# mypy: ignore-errors
"""Merges tiles that ran in parallel: in ascending order from the sink, one program per block of
channels of a head. The first tiles are prefetched before their number is known; for long lists
many loads are in flight, and each merged group makes room for the next."""

import torch
import triton
import triton.language as tl

from dsv4.ops.attention.tile_device import BT, LOG2E, add_tile, most_entries, ratio_of
from dsv4.ops.core.helpers_device import append, depend
from dsv4.ops.core.launch import dependent_options
from dsv4.ops.kv.rope_device import rope_angles, rotate

SHORT = (4, 12, 24)  # tiles of short lists, loaded and merged without a loop
AHEAD = 32  # tiles of longer lists in flight: all heads' sums of each are 131 KB
GROUP = tl.constexpr(8)  # tiles merged, then prefetched, together
WIDTHS = {False: (256, 128), True: (128, 64)}  # channels of a program and a warp; of long lists
NOTHING = tl.constexpr(0xFF800000)  # -inf and a sum of 0


@triton.jit
def _load_tiles(sums, stats, first, last, apart, live, COUNT: tl.constexpr, DIM: tl.constexpr):
    """Sums and statistics of tiles `first` to `first + COUNT`; tiles past the last duplicate it.
    `apart`: stride between tiles, in heads."""
    found = ()
    pairs = ()
    for i in tl.static_range(COUNT):
        at = (tl.minimum(first + i, last) * apart).to(tl.int64)
        pairs = append(pairs, tl.load(stats + at))
        found = append(found, tl.load(sums + at * DIM, mask=live, other=0.0))
    return found, pairs


@triton.jit
def _without(tiles, left):
    """Mask tiles: only the first `left` exist, the others are undefined."""
    found = ()
    pairs = ()
    for i in tl.static_range(len(tiles[0])):
        found = append(found, tl.where(i < left, tiles[0][i], 0.0))
        pairs = append(pairs, tl.where(i < left, tiles[1][i], NOTHING))
    return found, pairs


@triton.jit
def _add_tiles(best, total, acc, tiles, left, LONG: tl.constexpr):
    """LONG: only `left` of these tiles exist; the others change nothing."""
    for i in tl.static_range(len(tiles[0])):
        top = tiles[1][i].to(tl.int32).to(tl.float32, bitcast=True)
        if LONG:
            top = tl.where(i < left, top, float("-inf"))
        weights = (tiles[1][i] >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        best, total, old_share, new_share = add_tile(best, total, top, weights)
        acc = tl.fma(tiles[0][i], new_share, acc * old_share)
    return best, total, acc


@triton.jit(do_not_specialize=["num_tokens", "most"])
def _merge_kernel(
    sums, stats, sink, out, positions, frequencies, num_tokens, num_heads, most,
    RATIO: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    BT: tl.constexpr, WT: tl.constexpr, AHEAD: tl.constexpr,
    LONG: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`stats`: per tile and head, the maximum (low half) and the sum of weights. LONG: there may be
    more than AHEAD tiles."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    channel = part * WIDTH + tl.arange(0, WIDTH)
    position = tl.load(positions + row).to(tl.int32)
    best = tl.load(sink + head).to(tl.float32) * LOG2E
    depend(DEPENDENT)
    apart = num_heads * num_tokens
    mine = row * num_heads + head
    stats += mine
    sums += mine * DIM + channel
    live = (channel < DIM) | (DIM % WIDTH == 0)
    last = WT + tl.cdiv(most, BT) - 1
    COUNT: tl.constexpr = GROUP if LONG else AHEAD
    groups = ()
    for i in tl.static_range(0, AHEAD, COUNT):
        groups = append(groups, _load_tiles(sums, stats, i, last, apart, live, COUNT, DIM))
    pair = part * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
    turned, sine, cosine = rope_angles(pair, position, frequencies, -1.0, DIM - ROPE, DIM)
    num_tiles = WT + tl.cdiv(tl.minimum((position + 1) // RATIO, most), BT)
    waiting = ()
    for i in tl.static_range(len(groups)):
        waiting = append(waiting, _without(groups[i], num_tiles - i * COUNT))
    total = best * 0.0 + 1.0
    acc = tl.zeros((WIDTH,), tl.float32)
    # one iteration even for a short list: everything else is loaded before it, together
    for first in tl.range(0, num_tiles if LONG else tl.maximum(last, 1), AHEAD):
        following = ()
        for i in tl.static_range(len(groups)):
            group = waiting[i]
            at = first + i * COUNT
            if at < num_tiles:  # also issues these loads before the next group is merged
                best, total, acc = _add_tiles(best, total, acc, group, num_tiles - at, LONG)
                if LONG:
                    group = _load_tiles(
                        sums, stats, at + AHEAD, num_tiles - 1, apart, live, COUNT, DIM
                    )
            following = append(following, group)
        waiting = following
    x = (acc * (1.0 / total)).to(out.dtype.element_ty).to(tl.float32)[None, :]
    x = rotate(x, turned, sine, cosine, 1, WIDTH)
    tl.store(out + mine * DIM + channel[None, :], x.to(out.dtype.element_ty), mask=live[None, :])


def tiles_ahead(num_tiles: int) -> int:
    """How many tiles are loaded together; each count compiles its own kernel."""
    return next((most for most in SHORT if num_tiles <= most), AHEAD)


def merge_tiles(q, to, out, sums, stats) -> None:
    tokens, heads, dim = q.shape
    pad, most, window = triton.next_power_of_2(dim), most_entries(to.compressed), to.window
    ahead = tiles_ahead(triton.cdiv(window, BT) + triton.cdiv(most, BT))
    width, of_warp = WIDTHS[ahead not in SHORT]
    width = min(width, pad)
    _merge_kernel[(tokens, heads, pad // width)](
        sums, stats.view(torch.int64), to.sink, out, to.batch.positions, to.frequencies, tokens,
        heads, most, RATIO=ratio_of(to), DIM=dim, WIDTH=width, ROPE=2 * to.frequencies.shape[0],
        BT=BT, WT=triton.cdiv(window, BT), AHEAD=ahead, LONG=ahead not in SHORT,
        **dependent_options(q.device, max(1, width // of_warp)),
    )  # fmt: skip
