# mypy: ignore-errors
"""How tiles that ran in parallel become one result: in ascending order from the sink on, a program
for some channels of a head. The next tiles are on the way while some are merged; the first ones
are asked for before it is known how many there are."""

import torch
import triton
import triton.language as tl

from dsv4.ops.attention.tiles_triton import BT, LOG2E, add_tile
from dsv4.ops.device import launch_options
from dsv4.ops.kv.entry_triton import append, rope_angles, rotate

SHORT = (4, 12)  # tiles of short lists, loaded and merged without a loop
AHEAD = 8  # tiles of longer ones that are loaded together
PARTS = 2  # programs of a head
NOTHING = tl.constexpr(0xFF800000)  # -inf and a sum of 0


@triton.jit
def _load_tiles(sums, stats, first, limit, apart, live, AHEAD: tl.constexpr, DIM: tl.constexpr):
    """Sums and statistics of tiles `first` to `first + AHEAD`; from `limit` on such as change
    nothing. `apart`: from a tile to the next, in heads."""
    found = ()
    pairs = ()
    for i in tl.static_range(AHEAD):
        there = first + i < limit
        at = (first + i) * apart
        pairs = append(pairs, tl.load(stats + at, mask=there, other=NOTHING))
        found = append(found, tl.load(sums + at * DIM, mask=live & there, other=0.0))
    return found, pairs


@triton.jit
def _load_first(sums, stats, last, apart, live, AHEAD: tl.constexpr, DIM: tl.constexpr):
    """The first AHEAD tiles, the last one again in place of those there is no room for."""
    found = ()
    pairs = ()
    for i in tl.static_range(AHEAD):
        at = tl.minimum(i, last) * apart
        pairs = append(pairs, tl.load(stats + at))
        found = append(found, tl.load(sums + at * DIM, mask=live, other=0.0))
    return found, pairs


@triton.jit
def _without(found, pairs, limit):
    """The first tiles, of which those from `limit` on turned out not to be there."""
    kept = ()
    kept_pairs = ()
    for i in tl.static_range(len(found)):
        kept = append(kept, tl.where(i < limit, found[i], 0.0))
        kept_pairs = append(kept_pairs, tl.where(i < limit, pairs[i], NOTHING))
    return kept, kept_pairs


@triton.jit
def _add_tiles(best, total, acc, found, pairs):
    for i in tl.static_range(len(found)):
        top = pairs[i].to(tl.int32).to(tl.float32, bitcast=True)
        weights = (pairs[i] >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        best, total, old_share, new_share = add_tile(best, total, top, weights)
        acc = tl.fma(found[i], new_share, acc * old_share)
    return best, total, acc


@triton.jit(do_not_specialize=["num_tokens", "most"])
def _merge_kernel(
    sums, stats, sink, out, positions, frequencies, num_tokens, num_heads, most,
    RATIO: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    BT: tl.constexpr, WT: tl.constexpr, AHEAD: tl.constexpr,
    LONG: tl.constexpr
):  # fmt: skip
    """`stats`: of each tile and head, the maximum (low half) and the sum of weights. LONG: there
    may be more than AHEAD tiles."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    channel = part * WIDTH + tl.arange(0, WIDTH)
    position = tl.load(positions + row).to(tl.int32)
    best = tl.load(sink + head).to(tl.float32) * LOG2E
    apart = num_heads * num_tokens.to(tl.int64)
    mine = row * num_heads + head
    stats += mine
    sums += mine * DIM + channel
    live = (channel < DIM) | (DIM % WIDTH == 0)
    last = WT + tl.cdiv(most, BT) - 1
    found, pairs = _load_first(sums, stats, last, apart, live, AHEAD, DIM)
    pair = part * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
    turned, sine, cosine = rope_angles(pair, position, frequencies, -1.0, DIM - ROPE, DIM)
    num_tiles = WT + tl.cdiv(tl.minimum((position + 1) // RATIO, most), BT)
    found, pairs = _without(found, pairs, num_tiles)
    total = best * 0.0 + 1.0
    acc = tl.zeros((WIDTH,), tl.float32)
    # a loop even for a short list, of one turn: what it does not load is loaded before, together
    for first in tl.range(0, num_tiles if LONG else tl.maximum(last, 1), AHEAD):
        if LONG:
            next_found, next_pairs = _load_tiles(
                sums, stats, first + AHEAD, num_tiles, apart, live, AHEAD, DIM
            )
        best, total, acc = _add_tiles(best, total, acc, found, pairs)
        if LONG:
            found = next_found
            pairs = next_pairs
    x = (acc * (1.0 / total)).to(out.dtype.element_ty).to(tl.float32)[None, :]
    x = rotate(x, turned, sine, cosine, 1, WIDTH)
    tl.store(
        out + mine * DIM + channel[None, :],
        x.to(out.dtype.element_ty),
        mask=live[None, :],
    )


def tiles_ahead(num_tiles: int) -> int:
    """So many tiles are loaded together; a kernel of its own for each."""
    return next((most for most in SHORT if num_tiles <= most), AHEAD)


def merge_tiles(
    q, sink, out, sums, stats, positions, frequencies, window, most, ratio, tile=BT
) -> None:
    tokens, heads, dim = q.shape
    pad = triton.next_power_of_2(dim)
    parts = PARTS if pad >= 128 * PARTS else 1
    ahead = tiles_ahead(triton.cdiv(window, tile) + triton.cdiv(most, tile))
    _merge_kernel[(tokens, heads, parts)](
        sums,
        stats.view(torch.int64),
        sink,
        out,
        positions,
        frequencies,
        tokens,
        heads,
        most,
        RATIO=ratio,
        DIM=dim,
        WIDTH=pad // parts,
        ROPE=2 * frequencies.shape[0],
        BT=tile,
        WT=triton.cdiv(window, tile),
        AHEAD=ahead,
        LONG=ahead not in SHORT,
        **launch_options(max(1, min(4, pad // parts // 128))),
    )
