# mypy: ignore-errors
"""`attention` of a batch of queries in two launches: softmax weights of all tiles, then values.

In the first launch a program computes one tile of one query for 64 heads: scores and their softmax,
stored in the precision that multiplies values (8 KB). In the second a program computes some
channels of one query's result and loops over its tiles, merging each product immediately. Each
launch converts an entry once per 64 heads, no partial sums go through memory, and programs are many
and small.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from dsv4.ops.attention import tile_device as td
from dsv4.ops.core.helpers_device import append
from dsv4.ops.core.launch import launch_options
from dsv4.ops.core.workspace import workspace
from dsv4.ops.kv.rope_device import rope_tile

GROUP = 2  # pieces of queries and keys in shared memory at a time
REGISTERS = 168  # per thread of the weights kernel: three programs of four warps fit
MOST_TILES = 4096  # (tile, 64 heads) pairs: their weights take 33 MB


@triton.jit
def _load_group(q, q_at, group: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr):
    """GROUP pieces of queries, as stored."""
    found = ()
    for i in tl.static_range(GROUP):
        first = td.piece_first(T.dim, T.rope, group * GROUP + i)
        channel = first + tl.arange(0, td.pieces(T.dim, T.rope)[group * GROUP + i])
        found = append(found, tl.load(q + q_at + channel[None, :]))
    return found


@triton.jit(do_not_specialize=["num_tokens", "num_selected", "w_width", "c_width"])
def _weights_kernel(
    q, weights_out, stat_out, slots_out, at, num_selected, w_width, c_width, num_heads, num_tokens,
    window, qk_scale, RATIO: tl.constexpr, BH: tl.constexpr, GROUP: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A block of heads, a token and a tile."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2)
    head = block * BH + tl.arange(0, BH)
    position = tl.load(at.positions + row).to(tl.int32)
    seq = tl.load(at.seq_idx + row).to(tl.int64)
    visible = tl.minimum((position + 1) // RATIO, num_selected)
    if not T.selected:  # noqa: SIM102 - settled by the compiler
        if tile >= T.wt + tl.cdiv(visible, T.bt):
            return
    slot, present = td.tile_slots(
        tile, position, visible, seq, row, window, at, num_selected, w_width, c_width, T
    )
    if T.selected:
        slot = tl.where((visible > 0) | (tile < T.wt), slot, 0)  # no compressed entries, no page
    stored, scales = td.fetch_tile(slot, tile < T.wt, at, T)
    room = tile.to(tl.int64) * num_tokens + row
    entry = tl.arange(0, T.bt)
    if block == 0:
        tl.store(slots_out + room * T.bt + entry, slot.to(tl.int32))
    q_at = (row * num_heads + head)[:, None] * T.dim
    found = _load_group(q, q_at, 0, GROUP, T)
    tl.debug_barrier()  # issues all loads before the first wait
    ENTRIES: tl.constexpr = T.bt
    scores = tl.zeros((BH, ENTRIES), tl.float32)
    for group in tl.static_range(len(td.pieces(T.dim, T.rope)) // GROUP):
        queries = ()
        keys = ()
        for i in tl.static_range(GROUP):
            queries = append(queries, td.to_half(found[i], T.mt, T.asm))
        if group + 1 < len(td.pieces(T.dim, T.rope)) // GROUP:
            found = _load_group(q, q_at, group + 1, GROUP, T)
        for i in tl.static_range(GROUP):
            k = td.widen_piece(
                stored[group * GROUP + i], scales, td.piece_first(T.dim, T.rope, group * GROUP + i),
                T, False,
            )  # fmt: skip
            keys = append(keys, k)
        for i in tl.static_range(GROUP):
            scores = td.dot(queries[i], tl.trans(keys[i]), scores, T.mt)
    weights, top = td.softmax(scores, present, qk_scale, T.mt)
    part = td.weights_sum(weights, BH, T.bt, T.mt)
    to = room * num_heads + head
    tl.store(stat_out + to * 2, top)
    tl.store(stat_out + to * 2 + 1, part)
    tl.store(weights_out + to[:, None] * T.bt + entry[None, :], weights)


@triton.jit
def _sum_values(
    weights, stats, slots, sink, row, head, tiles, first, num_heads, num_tokens, places,
    TAIL: tl.constexpr, BH: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Sums of a piece of channels from `first` on, divided by the sum of weights. TAIL: the
    channels are stored separately."""
    WIDTH: tl.constexpr = td.pieces(T.dim, T.rope)[0]
    best = tl.load(sink + head).to(tl.float32) * td.LOG2E
    total = tl.full((BH,), 1.0, tl.float32)
    sums = tl.zeros((BH, WIDTH), tl.float32)
    channel = first + tl.arange(0, WIDTH)[None, :]
    entry = tl.arange(0, T.bt)
    # prefetched: the addresses of the next tile's entries and the sum of its weights
    slot = tl.load(slots + row * T.bt + entry).to(tl.int64)
    last = tiles - 1
    later = tl.load(slots + (tl.minimum(1, last) * num_tokens + row) * T.bt + entry)
    pair = tl.load(stats + row * num_heads + head)
    for step in tl.range(0, tiles):
        at = (step * num_tokens + row) * num_heads + head
        given = tl.load(weights + at[:, None] * T.bt + entry[None, :])
        pool = td.pool_of(step < T.wt, places)
        if TAIL:
            tail_at = slot[:, None] * (T.dim - T.nope) + (channel - T.nope)
            value = tl.load(pool.tail + tail_at).to(T.mt)
        elif T.kind == 2:
            scales = tl.load(pool.scale + slot)
            codes = tl.load(pool.data + slot[:, None] * T.nope + channel)
            value = td.widen_codes(codes, scales, first // 64, T.mt, False)
        else:
            value = tl.load(pool.data + slot[:, None] * T.dim + channel).to(T.mt)
        slot = later.to(tl.int64)
        later = tl.load(slots + (tl.minimum(step + 2, last) * num_tokens + row) * T.bt + entry)
        top = pair.to(tl.int32).to(tl.float32, bitcast=True)
        part = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        pair = tl.load(stats + (tl.minimum(step + 1, last) * num_tokens + row) * num_heads + head)
        best, total, old_share, new_share = td.add_tile(best, total, top, part)
        zero = tl.zeros((BH, WIDTH), tl.float32)
        acc = td.dot(given, value, zero, T.mt)
        sums = tl.fma(acc, new_share[:, None] + zero, sums * old_share[:, None])
    return sums * (1.0 / total)[:, None]


@triton.jit(do_not_specialize=["num_tokens", "most"])
def _values_kernel(
    weights, stats, slots, sink, out, at, most, frequencies, num_heads, num_tokens,
    RATIO: tl.constexpr, BH: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A piece of channels, a block of heads and a token. `stats`: per tile and head, the maximum
    (low half) and the sum of weights."""
    WIDTH: tl.constexpr = td.pieces(T.dim, T.rope)[0]
    first = tl.program_id(0) * WIDTH
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    row = tl.program_id(2).to(tl.int64)
    position = tl.load(at.positions + row).to(tl.int32)
    tiles = T.wt + tl.cdiv(tl.minimum((position + 1) // RATIO, most), T.bt)
    out_at = (row * num_heads + head)[:, None] * T.dim + first + tl.arange(0, WIDTH)[None, :]
    if first < T.dim - T.rope:
        x = _sum_values(
            weights, stats, slots, sink, row, head, tiles, first, num_heads, num_tokens, at,
            False, BH, T,
        )  # fmt: skip
        tl.store(out + out_at, x.to(out.dtype.element_ty))
    else:
        x = _sum_values(
            weights, stats, slots, sink, row, head, tiles, first, num_heads, num_tokens, at,
            T.kind == 2, BH, T,
        )  # fmt: skip
        x = x.to(out.dtype.element_ty).to(tl.float32)
        table = frequencies + (first - (T.dim - T.rope)) // 2
        x = rope_tile(x, position, table, -1.0, BH, 0, WIDTH, WIDTH)
        tl.store(out + out_at, x.to(out.dtype.element_ty))


def run(q, to, out, config) -> None:
    tokens, heads, dim = q.shape
    places, counts = td.tile_places(to)
    sizes = {"RATIO": td.ratio_of(to), "BH": config.heads, "T": td.tile_format(q, to)}
    num_tiles = triton.cdiv(to.window, td.BT) + triton.cdiv(counts[0], td.BT)
    rows = max(MOST_TILES * 64, num_tiles * tokens * heads)  # full size: growing would allocate
    weights = workspace(q.device, "attention_sums", rows * td.BT // 2, torch.float32)
    weights = weights.view(torch.float16 if sizes["T"].mt == tl.float16 else torch.bfloat16)
    stats = workspace(q.device, "attention_stats", 2 * rows, torch.float32)
    slots = workspace(q.device, "attention_slots", rows // 64 * td.BT, torch.int32)
    count = len(td.pieces(dim, 2 * to.frequencies.shape[0]))
    _weights_kernel[(heads // config.heads, tokens, num_tiles)](
        q, weights, stats, slots, places, *counts, heads, tokens, to.window,
        dim**-0.5 * td.LOG2E.value, GROUP=gcd(GROUP, count), **sizes,
        **launch_options(config.num_warps, maxnreg=REGISTERS),
    )  # fmt: skip
    _values_kernel[(count, heads // config.heads, tokens)](
        weights, stats.view(torch.int64), slots, to.sink, out, places, counts[0], to.frequencies,
        heads, tokens, **sizes, **launch_options(4, config.num_stages),
    )  # fmt: skip
