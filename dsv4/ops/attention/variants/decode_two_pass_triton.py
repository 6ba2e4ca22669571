# mypy: ignore-errors
"""`attention` of a batch of queries in two launches: softmax weights of all tiles, then values.

In the first launch a program computes one tile of one query for 64 heads: scores and their softmax,
stored in the precision that multiplies values (8 KB). In the second a program computes some
channels of one query's result and loops over its tiles, merging each product at once. Each launch
converts an entry once per 64 heads, no partial sums go through memory, and programs are many and
small.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from dsv4.ops.attention.tile_device import (
    BT,
    LOG2E,
    add_tile,
    dot,
    fetch_tile,
    num_pieces,
    piece_first,
    piece_width,
    pieces,
    softmax,
    tile_slots,
    to_half,
    weights_sum,
    widen_codes,
    widen_piece,
)
from dsv4.ops.core.helpers_device import append
from dsv4.ops.core.launch import launch_options
from dsv4.ops.core.workspace import workspace
from dsv4.ops.kv.rope_device import rope_tile

GROUP = 2  # pieces of queries and keys in shared memory at a time
REGISTERS = 168  # per thread of the weights kernel: three programs of four warps fit
MOST_ROOMS = 4096  # (tile, 64 heads) pairs: their weights take 33 MB


@triton.jit
def _load_group(
    q, q_at, group: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr
):
    """GROUP pieces of queries, as stored."""
    found = ()
    for i in tl.static_range(GROUP):
        first = piece_first(DIM, ROPE, group * GROUP + i)
        channel = first + tl.arange(0, piece_width(DIM, ROPE, group * GROUP + i))
        found = append(found, tl.load(q + q_at + channel[None, :]))
    return found


@triton.jit
def _widen(
    x, scales, piece: tl.constexpr, FORMAT: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr,
    ROPE: tl.constexpr, MT: tl.constexpr,
):  # fmt: skip
    return widen_piece(x, scales, piece_first(DIM, ROPE, piece), FORMAT, NOPE, MT, False)


@triton.jit(do_not_specialize=["num_tokens", "num_selected", "w_width", "c_width"])
def _weights_kernel(
    q, weights_out, stat_out, slots_out, positions, seq_idx, selected, num_selected,
    w_data, w_tail, w_scale, w_table, w_width, c_data, c_tail, c_scale, c_table, c_width,
    num_heads, num_tokens, window, qk_scale,
    RATIO: tl.constexpr, FORMAT: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr,
    ROPE: tl.constexpr, SELECTED: tl.constexpr, BH: tl.constexpr, GROUP: tl.constexpr,
    BT: tl.constexpr, WT: tl.constexpr, W_ENTRIES: tl.constexpr, C_ENTRIES: tl.constexpr,
    MT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A block of heads, a token and a tile."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2)
    head = block * BH + tl.arange(0, BH)
    position = tl.load(positions + row).to(tl.int32)
    seq = tl.load(seq_idx + row).to(tl.int64)
    visible = tl.minimum((position + 1) // RATIO, num_selected)
    if not SELECTED:  # noqa: SIM102 - settled by the compiler
        if tile >= WT + tl.cdiv(visible, BT):
            return
    slot, present = tile_slots(
        tile, position, visible, seq, row, window, selected, num_selected,
        w_table, w_width, c_table, c_width, WT, BT, W_ENTRIES, C_ENTRIES, SELECTED,
    )  # fmt: skip
    if SELECTED:
        slot = tl.where((visible > 0) | (tile < WT), slot, 0)  # no compressed entries, no page
    stored, scales = fetch_tile(
        slot, tile < WT, w_data, w_tail, w_scale, c_data, c_tail, c_scale, FORMAT, NOPE, DIM, ROPE
    )
    room = tile.to(tl.int64) * num_tokens + row
    if block == 0:
        tl.store(slots_out + room * BT + tl.arange(0, BT), slot.to(tl.int32))
    q_at = (row * num_heads + head)[:, None] * DIM
    found = _load_group(q, q_at, 0, GROUP, DIM, ROPE)
    tl.debug_barrier()  # issues all loads before the first wait
    scores = tl.zeros((BH, BT), tl.float32)
    for group in tl.static_range(num_pieces(DIM, ROPE) // GROUP):
        queries = ()
        keys = ()
        for i in tl.static_range(GROUP):
            queries = append(queries, to_half(found[i], MT, ASM))
        if group + 1 < num_pieces(DIM, ROPE) // GROUP:
            found = _load_group(q, q_at, group + 1, GROUP, DIM, ROPE)
        for i in tl.static_range(GROUP):
            x = stored[group * GROUP + i]
            keys = append(keys, _widen(x, scales, group * GROUP + i, FORMAT, NOPE, DIM, ROPE, MT))
        for i in tl.static_range(GROUP):
            scores = dot(queries[i], tl.trans(keys[i]), scores, MT)
    weights, top = softmax(scores, present, qk_scale, MT)
    part = weights_sum(weights, BH, BT, MT)
    at = room * num_heads + head
    tl.store(stat_out + at * 2, top)
    tl.store(stat_out + at * 2 + 1, part)
    tl.store(weights_out + at[:, None] * BT + tl.arange(0, BT)[None, :], weights)


@triton.jit
def _sum_values(
    weights, stats, slots, sink, row, head, tiles, first, num_heads, num_tokens,
    w_data, w_tail, w_scale, c_data, c_tail, c_scale,
    TAIL: tl.constexpr, FORMAT: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr,
):  # fmt: skip
    """Sums of channels `first` to `first + WIDTH`, divided by the sum of weights. TAIL: the
    channels are stored separately."""
    best = tl.load(sink + head).to(tl.float32) * LOG2E
    total = tl.full((BH,), 1.0, tl.float32)
    sums = tl.zeros((BH, WIDTH), tl.float32)
    channel = first + tl.arange(0, WIDTH)[None, :]
    entry = tl.arange(0, BT)
    # prefetched: the addresses of the next tile's entries and the sum of its weights
    slot = tl.load(slots + row * BT + entry).to(tl.int64)
    last = tiles - 1
    later = tl.load(slots + (tl.minimum(1, last) * num_tokens + row) * BT + entry)
    pair = tl.load(stats + row * num_heads + head)
    for step in tl.range(0, tiles):
        at = (step * num_tokens + row) * num_heads + head
        given = tl.load(weights + at[:, None] * BT + entry[None, :])
        if TAIL:
            tail = tl.where(step < WT, w_tail, c_tail)
            value = tl.load(tail + slot[:, None] * (DIM - NOPE) + (channel - NOPE)).to(MT)
        elif FORMAT == 2:
            scales = tl.load(tl.where(step < WT, w_scale, c_scale) + slot)
            codes = tl.load(tl.where(step < WT, w_data, c_data) + slot[:, None] * NOPE + channel)
            value = widen_codes(codes, scales, first // 64, MT, False)
        else:
            data = tl.where(step < WT, w_data, c_data)
            value = tl.load(data + slot[:, None] * DIM + channel).to(MT)
        slot = later.to(tl.int64)
        later = tl.load(slots + (tl.minimum(step + 2, last) * num_tokens + row) * BT + entry)
        top = pair.to(tl.int32).to(tl.float32, bitcast=True)
        part = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        pair = tl.load(stats + (tl.minimum(step + 1, last) * num_tokens + row) * num_heads + head)
        best, total, old_share, new_share = add_tile(best, total, top, part)
        zero = tl.zeros((BH, WIDTH), tl.float32)
        acc = dot(given, value, zero, MT)
        sums = tl.fma(acc, new_share[:, None] + zero, sums * old_share[:, None])
    return sums * (1.0 / total)[:, None]


@triton.jit(do_not_specialize=["num_tokens", "most"])
def _values_kernel(
    weights, stats, slots, sink, out, positions, most,
    w_data, w_tail, w_scale, c_data, c_tail, c_scale, frequencies, num_heads, num_tokens,
    RATIO: tl.constexpr, FORMAT: tl.constexpr, NOPE: tl.constexpr, DIM: tl.constexpr,
    ROPE: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr, WT: tl.constexpr, MT: tl.constexpr,
):  # fmt: skip
    """A piece of channels, a block of heads and a token. `stats`: per tile and head, the maximum
    (low half) and the sum of weights."""
    WIDTH: tl.constexpr = piece_width(DIM, ROPE, 0)
    first = tl.program_id(0) * WIDTH
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    row = tl.program_id(2).to(tl.int64)
    position = tl.load(positions + row).to(tl.int32)
    tiles = WT + tl.cdiv(tl.minimum((position + 1) // RATIO, most), BT)
    out_at = (row * num_heads + head)[:, None] * DIM + first + tl.arange(0, WIDTH)[None, :]
    if first < DIM - ROPE:
        x = _sum_values(
            weights, stats, slots, sink, row, head, tiles, first, num_heads, num_tokens,
            w_data, w_tail, w_scale, c_data, c_tail, c_scale,
            False, FORMAT, NOPE, DIM, WIDTH, BH, BT, WT, MT,
        )  # fmt: skip
        tl.store(out + out_at, x.to(out.dtype.element_ty))
    else:
        x = _sum_values(
            weights, stats, slots, sink, row, head, tiles, first, num_heads, num_tokens,
            w_data, w_tail, w_scale, c_data, c_tail, c_scale,
            FORMAT == 2, FORMAT, NOPE, DIM, WIDTH, BH, BT, WT, MT,
        )  # fmt: skip
        x = x.to(out.dtype.element_ty).to(tl.float32)
        table = frequencies + (first - (DIM - ROPE)) // 2
        x = rope_tile(x, position, table, -1.0, BH, 0, WIDTH, WIDTH)
        tl.store(out + out_at, x.to(out.dtype.element_ty))


def run(q, sink, out, window, frequencies, config, places, constants) -> None:
    tokens, heads, dim = q.shape
    positions, most = places[0], places[3]
    num_tiles = triton.cdiv(window, BT) + triton.cdiv(most, BT)
    rooms = max(MOST_ROOMS * 64, num_tiles * tokens * heads)  # full size: growing would allocate
    weights = workspace(q.device, "attention_sums", rooms * BT // 2, torch.float32)
    weights = weights.view(torch.float16 if constants["MT"] == tl.float16 else torch.bfloat16)
    stats = workspace(q.device, "attention_stats", 2 * rooms, torch.float32)
    slots = workspace(q.device, "attention_slots", rooms // 64 * BT, torch.int32)
    count = len(pieces(dim, 2 * frequencies.shape[0]))
    shared = ("RATIO", "FORMAT", "NOPE", "DIM", "ROPE", "BT", "WT", "MT")
    _weights_kernel[(heads // config.heads, tokens, num_tiles)](
        q,
        weights,
        stats,
        slots,
        *places,
        heads,
        tokens,
        window,
        dim**-0.5 * LOG2E.value,
        **constants,
        BH=config.heads,
        GROUP=gcd(GROUP, count),
        **launch_options(config.num_warps, maxnreg=REGISTERS),
    )
    _values_kernel[(count, heads // config.heads, tokens)](
        weights,
        stats.view(torch.int64),
        slots,
        sink,
        out,
        positions,
        most,
        *places[4:7],
        *places[9:12],
        frequencies,
        heads,
        tokens,
        **{name: constants[name] for name in shared},
        BH=config.heads,
        **launch_options(4, config.num_stages),
    )
