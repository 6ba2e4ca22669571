# mypy: ignore-errors
"""`index_select` of prompts: a program takes a whole row, and reads it twice if it is long.

A short row has one warp, which needs no barriers to count its scores. Of a long row the first pass
finds the peaks of TILE parts, whose `topk`-th largest is a bound that the best reach and few others
do; the second keeps what reaches it, in ascending order, to select among that. Rows in which too
many reach it (ties) are searched as they are, pass by pass.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.attention.index_select_triton import (
    count_reaching,
    eighth,
    fill,
    find_places,
    keep,
    load_kept,
    raise_bound,
    saturated,
    sort_key,
)
from dsv4.ops.core.launch import launch_options
from dsv4.ops.core.workspace import workspace

TILE, WARPS = 2048, 4
REGISTERS = 96  # of a thread; the search of a whole row takes more and is rare


@triton.jit
def _load_keys(scores, first, width, TILE: tl.constexpr):
    place = first + tl.arange(0, TILE)
    score = tl.load(scores + place, mask=place < width, other=float("-inf"))
    return sort_key(score), place


@triton.jit
def _score(key):
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, ~key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _find_threshold(key, topk, most):
    """A bound that `topk` to `most` keys reach, or all if there are fewer, or the `topk`-th largest
    key; how many reach it; the highest key. Each pass counts the keys that reach one guess, which
    interpolates scores by their counts (Illinois method); after 16 passes it bisects the keys."""
    top, lowest = tl.split(tl.max(tl.join(key, 0 - key), axis=0))
    low = tl.maximum(0 - lowest, 1)  # 0 means no entry
    one = tl.minimum(topk, 1)  # unknown to the compiler, which packs bits to count them
    count = tl.sum(tl.where(key > 0, one, 0), axis=0)
    high = top + 1  # may wrap to 0, as differences from it do
    over = (count - topk).to(tl.float32)
    under = over * 0.0 + topk
    turn = tl.full((), 0, tl.int32)
    was_reached = turn < 0
    while (count > most) & (high - low > 1):
        start = _score(low)
        guess = sort_key(start + (_score(high) - start) * (over / (over + under)))
        guess = tl.where(turn < 16, guess, low + ((high - low) >> 1))
        bound = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        found = tl.sum(tl.where(key >= bound, one, 0), axis=0)
        is_reached = found >= topk
        again = tl.where((turn > 0) & (is_reached == was_reached), 0.5, 1.0)
        missing = (found - topk).to(tl.float32)
        over = tl.where(is_reached, missing, over * again)
        under = tl.where(is_reached, under * again, -missing)
        low = tl.where(is_reached, bound, low)
        high = tl.where(is_reached, high, bound)
        count = tl.where(is_reached, found, count)
        was_reached = is_reached
        turn += 1
    return low, count, top


@triton.jit
def _count_upto(kept, TILE: tl.constexpr, LANES: tl.constexpr):
    """Prefix counts and the last. Four rows of LANES entries share a sum: each has a byte of it."""
    shift = tl.arange(0, 4) * 8
    rows = kept.to(tl.uint32).reshape(TILE // LANES // 4, 4, LANES)
    packed = tl.sum(rows << shift[None, :, None], axis=1)
    total = (tl.sum(packed, axis=1)[:, None] >> shift[None, :]) & 0xFF
    total = total.reshape(TILE // LANES)
    before = (tl.cumsum(total, axis=0) - total).reshape(TILE // LANES // 4, 4)
    upto = (tl.cumsum(packed, axis=1)[:, None, :] >> shift[None, :, None]) & 0xFF
    upto = (upto + before[:, :, None]).reshape(TILE)
    return upto.to(tl.int32), tl.sum(total, axis=0).to(tl.int32)


@triton.jit
def _store_kept(out, index, kept, TILE: tl.constexpr, LANES: tl.constexpr):
    tl.store(out + _count_upto(kept, TILE, LANES)[0] - 1, index, mask=kept)


@triton.jit
def _select_held(key, index, out, topk, out_width, TILE: tl.constexpr, LANES: tl.constexpr):
    """The `topk` best of the keys in a program's registers."""
    threshold, count, _ = _find_threshold(key, topk, topk)
    if count <= topk:
        _store_kept(out, index, key >= threshold, TILE, LANES)
    else:  # the first of those that equal the threshold
        above = key > threshold
        room = topk - tl.sum(above.to(tl.int32), axis=0)
        is_tied = key == threshold
        kept = above | (is_tied & (_count_upto(is_tied, TILE, LANES)[0] <= room))
        _store_kept(out, index, kept, TILE, LANES)
    fill(out, tl.minimum(count, topk), out_width, 64)


@triton.jit
def _keep_reaching(scores, kept, low, width, TILE: tl.constexpr, ROOM: tl.constexpr):
    """Store entries that reach `low`, as far as there is room; how many do."""
    total = tl.full((), 0, tl.int32)
    for first in tl.range(0, width, TILE):
        key, place = _load_keys(scores, first, width, TILE)
        live = key >= low
        upto, more = _count_upto(live, TILE, min(128, TILE // 4))
        order = total + upto - 1
        both = (key.to(tl.int64) << 32) | place
        tl.store(kept + order, both, mask=live & (order < ROOM))
        total += more
    return total


@triton.jit
def _select_in_row(scores, out, low, top, width, topk, out_width, TILE: tl.constexpr):
    """Any number of entries may reach `low`."""
    bit = eighth(low, top)
    count = tl.full((), 0x7FFF, tl.int32)
    while (bit > 0) & (count > topk):
        reached = tl.zeros((2, 2), tl.int32)
        for first in tl.range(0, width, TILE):
            key, _ = _load_keys(scores, first, width, TILE)
            reached = saturated(reached + count_reaching(key, low, bit))
        low, count, bit = raise_bound(reached, low, bit, count, topk)
    num_above = tl.full((), 0, tl.int32)
    for first in tl.range(0, width, TILE):
        key, _ = _load_keys(scores, first, width, TILE)
        num_above += tl.sum((key > low).to(tl.int32), axis=0)
    room = topk - num_above
    totals = tl.full((), 0, tl.int32)
    for first in tl.range(0, width, TILE):
        key, place = _load_keys(scores, first, width, TILE)
        above, equal, upto, more = find_places(key, low)
        chosen, order = keep(above, equal, upto + totals, room, topk)
        tl.store(out + order, place.to(tl.int64), mask=chosen)
        totals = saturated(totals + more)
    fill(out, num_above + tl.minimum((totals >> 16) & 0xFFFF, room), out_width, 64)


@triton.jit(do_not_specialize=["width"])
def _select_row_kernel(
    scores, kept, out, width, topk, out_width, TILE: tl.constexpr, ROOM: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * width
    kept += row * ROOM
    out += row * out_width
    peak = tl.zeros((TILE,), tl.uint32)
    for first in tl.range(0, width, TILE):
        peak = tl.maximum(peak, _load_keys(scores, first, width, TILE)[0])
    low, count, top = _find_threshold(peak, topk, topk + (topk >> 4))
    low = tl.where(count < topk, 1, low).to(tl.uint32)  # 0 means no entry
    total = _keep_reaching(scores, kept, low, width, TILE, ROOM)
    if total <= ROOM:
        tl.debug_barrier()  # all threads have stored
        place = tl.arange(0, ROOM)
        key, index = load_kept(kept, place, place < total)
        _select_held(key, index, out, topk, out_width, ROOM, min(128, ROOM // 4))
    else:
        _select_in_row(scores, out, low, top, width, topk, out_width, TILE)


@triton.jit(do_not_specialize=["width"])
def _select_short_kernel(scores, out, width, topk, out_width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    key, place = _load_keys(scores + row * width, 0, width, TILE)
    index, out = place.to(tl.int64), out + row * out_width
    early, late = tl.split(key.reshape(2, TILE // 2).trans())
    if tl.max(late, axis=0) > 0:
        _select_held(key, index, out, topk, out_width, TILE, 32)
    else:  # an early token's row: half the work
        first = tl.arange(0, TILE // 2).to(tl.int64)
        _select_held(early, first, out, topk, out_width, TILE // 2, 32)


def select(scores, topk, out) -> None:
    rows, width = scores.shape
    if width <= TILE:
        tile = max(256, triton.next_power_of_2(width))
        _select_short_kernel[(rows,)](
            scores, out, width, topk, out.shape[1], TILE=tile, **launch_options(1)
        )
        return
    room = 2 * triton.next_power_of_2(topk)
    kept = workspace(scores.device, "select_rows", rows * room, torch.int64)
    tile = max(TILE, room)
    _select_row_kernel[(rows,)](
        scores, kept, out, width, topk, out.shape[1], TILE=tile, ROOM=room,
        **launch_options(WARPS, maxnreg=REGISTERS),
    )  # fmt: skip
