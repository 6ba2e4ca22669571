# mypy: ignore-errors
"""`index_select` of prompts: a program takes a whole row, and reads it twice if it is long.

The first time it finds the peaks of TILE parts of the row, whose `topk`-th largest is a bound that
the best reach and few others do; the second time it keeps what reaches it, in ascending order, and
selects among that. Rows in which too many reach it (ties) are searched as they are, pass by pass.
"""

import torch
import triton
import triton.language as tl

from dsv4.ops.attention.index_select_triton import (
    count_reaching,
    eighth,
    fill,
    find_bound,
    find_ends,
    find_places,
    find_threshold,
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
def _select_held(key, index, out, topk, out_width):
    """The `topk` best of the keys in a program's registers. The search begins at their range, and
    if there are no more than `topk` it finds nothing to do."""
    top, lowest = find_ends(key)
    count = tl.sum((key > 0).to(tl.int32), axis=0)
    threshold, _ = find_threshold(key, lowest, eighth(lowest, top), count, topk, topk)
    above, equal, upto, totals = find_places(key, threshold)
    num_above = totals & 0xFFFF
    room = topk - num_above
    kept, order = keep(above, equal, upto, room, topk)
    tl.store(out + order, index, mask=kept)
    fill(out, num_above + tl.minimum((totals >> 16) & 0xFFFF, room), out_width, 64)


@triton.jit
def _keep_reaching(scores, kept, low, width, TILE: tl.constexpr, ROOM: tl.constexpr):
    """Store entries that reach `low`, as far as there is room; how many do."""
    total = tl.full((), 0, tl.int32)
    for first in tl.range(0, width, TILE):
        key, place = _load_keys(scores, first, width, TILE)
        live = (key >= low).to(tl.int32)
        order = total + tl.cumsum(live, axis=0) - 1
        both = (key.to(tl.int64) << 32) | place
        tl.store(kept + order, both, mask=(live > 0) & (order < ROOM))
        total += tl.sum(live, axis=0)
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
    low, top = find_bound(peak, topk)
    total = _keep_reaching(scores, kept, low, width, TILE, ROOM)
    if total <= ROOM:
        tl.debug_barrier()  # all threads have stored
        place = tl.arange(0, ROOM)
        key, index = load_kept(kept, place, place < total)
        _select_held(key, index, out, topk, out_width)
    else:
        _select_in_row(scores, out, low, top, width, topk, out_width, TILE)


@triton.jit(do_not_specialize=["width"])
def _select_short_kernel(scores, out, width, topk, out_width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    key, place = _load_keys(scores + row * width, 0, width, TILE)
    _select_held(key, place.to(tl.int64), out + row * out_width, topk, out_width)


def select(scores, topk, out) -> None:
    rows, width = scores.shape
    if width <= TILE:
        tile = max(64, triton.next_power_of_2(width))
        _select_short_kernel[(rows,)](
            scores, out, width, topk, out.shape[1], TILE=tile, **launch_options(max(1, tile // 512))
        )
        return
    room = 2 * triton.next_power_of_2(topk)
    kept = workspace(scores.device, "select_rows", rows * room, torch.int64)
    tile = max(TILE, room)
    _select_row_kernel[(rows,)](
        scores, kept, out, width, topk, out.shape[1], TILE=tile, ROOM=room,
        **launch_options(WARPS, maxnreg=REGISTERS),
    )  # fmt: skip
