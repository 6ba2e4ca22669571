# mypy: ignore-errors
"""`attention` over unpacked entries on sm_90: a program loops over a query's tiles.

Written in Gluon, where copies and products are started and awaited explicitly. The next tile is
copied while a tile's scores are multiplied, sums are added while the next channels are multiplied,
the next query arrives during the last tile, and its first tile while the result is stored. Triton's
compiler, given the same rows, waits for each of a tile's nine products in place: 2,630 us for 8,192
queries instead of 2,080. The loop has no plain loads, which the fence before products might wait
for: selected entries are copied asynchronously too. The interpreter does not support Gluon; a GPU
test compares this variant, to the last bit, with those of `attention_triton`, which are tested
everywhere. Sums and their order are the same.

Shared memory holds a block of queries, two tiles of 64 entries, and little else: 220 KB.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.ops.attention.tile_device import LOG2E, most_entries, ratio_of
from dsv4.ops.attention.variants.unpack_triton import max_entries
from dsv4.ops.core.helpers_device import narrow, widen
from dsv4.ops.kv.rope_device import sin_cos

DIM, ROPE, HEADS, WARPS = 512, 64, 64, 8
BT = gl.constexpr(64)
WIDTH = gl.constexpr(DIM)
CHANNELS = gl.constexpr(128)  # per product of weights and values
TURNED = gl.constexpr(ROPE // 2)  # rotated pairs of channels, at the end
HALF = gl.constexpr(DIM // 4)  # pairs of channels of half a head
AT_ONCE = gl.constexpr(64)  # heads prepared together

commit_group, wait_group = async_copy.commit_group, async_copy.wait_group
if hasattr(async_copy, "async_load"):
    begin_copy = async_copy.async_load
else:  # triton 3.6
    begin_copy = async_copy.async_copy_global_to_shared
turn, to_dtype, to_fp32 = gluon.jit(sin_cos.fn), gluon.jit(narrow.fn), gluon.jit(widen.fn)


@gluon.jit
def _copy_choice(choice, step, row, selected, num_selected, WT: gl.constexpr):
    """Copy the indices of a tile's selected compressed entries."""
    j = (step - WT) * BT + gl.arange(0, BT, layout=gl.BlockedLayout([1], [32], [8], [0]))
    live = (j >= 0) & (j < num_selected)
    begin_copy(choice, selected + row * num_selected + j, mask=live)


@gluon.jit
def _copy_tile(
    tile, bounds, entries, step, older, most, position, window, oldest, older_first,
    SELECTED: gl.constexpr, WT: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Masked slots are filled with zeros and read nothing: if all of them read one dummy entry, in
    all programs at once, its few lines of the L2 cache set the pace. Their bound, -inf, is added to
    their scores."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, COPY)
    recency = step * BT + gl.arange(0, BT, layout=LAYOUT)
    held = (recency < window) & (position + 1 - window + recency >= 0)
    j = recency - WT * BT
    present = j < most
    if SELECTED:
        j = older.to(gl.int32)
        present = present & (j >= 0)
    present = gl.where(step < WT, held, present)
    bounds.store(gl.where(present, 0.0, float("-inf")))
    place = gl.where(present, gl.where(step < WT, oldest + recency, older_first + j), oldest)
    channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    at = gl.expand_dims(place.to(gl.int64) * WIDTH, 1) + gl.expand_dims(channel, 0)
    live = gl.expand_dims(present, 1) & gl.expand_dims(channel >= 0, 0)
    begin_copy(tile, entries + at, mask=live)


@gluon.jit
def _copy_first(
    tile, bounds, choice, entries, item, position, seq, window, num_heads, selected, num_selected,
    SELECTED: gl.constexpr, WT: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """A query's first tile, from its window, and the selection of the second."""
    row = item // gl.cdiv(num_heads, BT)
    none = gl.full([BT], -1, gl.int32, gl.SliceLayout(1, COPY))
    oldest = row + seq * (window - 1)
    _copy_tile(
        tile, bounds, entries, 0, none, 0, position, window, oldest, 0, SELECTED, WT, COPY
    )  # fmt: skip
    if SELECTED and WT == 1:
        _copy_choice(choice, 1, row.to(gl.int64), selected, num_selected, WT)
    commit_group()


@gluon.jit
def _copy_queries(raw, q, item, num_heads, COPY: gl.constexpr):
    """A block of queries, as stored."""
    blocks = gl.cdiv(num_heads, BT)
    row = (item // blocks).to(gl.int64)
    head = (item % blocks) * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, COPY))
    head = gl.minimum(head, num_heads - 1)
    channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    at = gl.expand_dims((row * num_heads + head) * WIDTH, 1) + gl.expand_dims(channel, 0)
    begin_copy(raw, q + at)


@gluon.jit
def _turn(x, sines, cosines, SIGN: gl.constexpr, ROWS: gl.constexpr, PAIRS: gl.constexpr):
    """Rotate the last channels of fp32 `[ROWS, 2 * PAIRS]`, as `rotate` does."""
    u, v = gl.split(gl.reshape(x, [ROWS, PAIRS, 2]))
    LAYOUT: gl.constexpr = gl.SliceLayout(0, u.type.layout)
    live = gl.expand_dims(gl.arange(0, PAIRS, layout=LAYOUT) >= PAIRS - TURNED, 0)
    sine = gl.expand_dims(sines.slice(HALF - PAIRS, PAIRS).load(LAYOUT) * SIGN, 0)
    cosine = gl.expand_dims(cosines.slice(HALF - PAIRS, PAIRS).load(LAYOUT), 0) + gl.zeros_like(u)
    turned_u = gl.where(live, gl.fma(u, cosine, -(v * sine)), u)
    turned_v = gl.where(live, gl.fma(v, cosine, u * sine), v)
    return gl.reshape(gl.join(turned_u, turned_v), [ROWS, 2 * PAIRS])


@gluon.jit
def _prepare(raw, queries, sines, cosines, eps, OT: gl.constexpr, PREPARE: gl.constexpr):
    """Queries as multiplied; with PREPARE `query_prepare` is fused. There a warp sums the squares
    of half a head, here of a whole one: the halves are summed separately, then added."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    MT: gl.constexpr = queries.dtype
    for i in gl.static_range(BT // AT_ONCE):
        found = raw.slice(i * AT_ONCE, AT_ONCE, dim=0)
        ready = queries.slice(i * AT_ONCE, AT_ONCE, dim=0)
        a = found.slice(0, 2 * HALF, dim=1).load(LAYOUT).to(OT, bitcast=True)
        b = found.slice(2 * HALF, 2 * HALF, dim=1).load(LAYOUT).to(OT, bitcast=True)
        if PREPARE:
            a = to_fp32(a, True)
            b = to_fp32(b, True)
            squares = gl.sum(a * a, axis=1) + gl.sum(b * b, axis=1)
            inverse = gl.expand_dims(gl.rsqrt(squares / WIDTH + eps), 1)
            a = to_fp32(to_dtype(a * inverse, OT, True), True)
            b = to_fp32(to_dtype(b * inverse, OT, True), True)
            b = to_dtype(_turn(b, sines, cosines, 1.0, AT_ONCE, HALF), OT, True)
            b = to_fp32(b, True)
            b = gl.convert_layout(b, LAYOUT)
        ready.slice(0, 2 * HALF, dim=1).store(a.to(MT))
        ready.slice(2 * HALF, 2 * HALF, dim=1).store(b.to(MT))


@gluon.jit
def _row_maximum(scores, room, LAYOUT: gl.constexpr):
    """Each warpgroup has half of the entries: they exchange maxima once through shared memory."""
    halves = gl.max(gl.reshape(scores, [BT, 2, BT // 2]), axis=2)
    room.store(gl.reshape(gl.permute(halves, [1, 0]), [2 * BT]))
    first = room.slice(0, BT).load(gl.SliceLayout(1, LAYOUT))
    return gl.maximum(first, room.slice(BT, BT).load(gl.SliceLayout(1, LAYOUT)))


@gluon.jit
def _multiply(weights, tile, zero, PIECE: gl.constexpr):
    values = tile.slice(PIECE * CHANNELS, CHANNELS, dim=1)
    return warpgroup_mma(weights, values, zero, use_acc=False, is_async=True)


@gluon.jit(do_not_specialize=["num_items", "num_selected", "recent", "older_width"])
def _prefill_kernel(
    q, sink, out, entries, positions, seq_idx, selected, num_selected, frequencies, num_heads,
    num_items, recent, older_width, window, ratio, qk_scale, eps,
    SELECTED: gl.constexpr, WT: gl.constexpr, PREPARE: gl.constexpr,
):  # fmt: skip
    """Items are (token, block of heads), heads fastest. `q` and `entries`: 16 bits; `q` has the
    type of `out`, reinterpreted as that of `entries`. `recent`: rows before compressed ones."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 8, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    HEAD: gl.constexpr = gl.SliceLayout(1, SUMS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    MT: gl.constexpr = entries.dtype.element_ty
    OT: gl.constexpr = out.dtype.element_ty
    queries = gl.allocate_shared_memory(MT, [BT, WIDTH], SHARED)
    tiles = gl.allocate_shared_memory(MT, [2, BT, WIDTH], SHARED)
    shares = gl.allocate_shared_memory(MT, [BT, BT], SHARED)
    ones = gl.full([BT, 8], 1.0, MT, gl.BlockedLayout([1, 1], [4, 8], [8, 1], [1, 0]))
    ones = gl.allocate_shared_memory(MT, [BT, 8], gl.NVMMASharedLayout(32, 16, 2, True), ones)
    room = gl.allocate_shared_memory(gl.float32, [2 * BT], LINE)
    bounds = gl.allocate_shared_memory(gl.float32, [2, BT], LINE)
    choices = gl.allocate_shared_memory(selected.dtype.element_ty, [2, BT], LINE)
    sines = gl.allocate_shared_memory(gl.float32, [HALF], LINE)
    cosines = gl.allocate_shared_memory(gl.float32, [HALF], LINE)
    pair = gl.arange(0, HALF, layout=gl.BlockedLayout([1], [32], [8], [0])) - (HALF - TURNED)
    frequency = gl.load(frequencies + pair, mask=pair >= 0, other=0.0)
    blocks = gl.cdiv(num_heads, BT)
    item = gl.program_id(0)
    position = gl.load(positions + item // blocks).to(gl.int32)
    seq = gl.load(seq_idx + item // blocks).to(gl.int32)
    now = 0  # which of the two buffers is multiplied
    _copy_queries(tiles.index(1), q, item, num_heads, COPY)
    commit_group()
    _copy_first(
        tiles.index(0), bounds.index(0), choices.index(1), entries, item, position, seq, window,
        num_heads, selected, num_selected, SELECTED, WT, COPY,
    )  # fmt: skip
    sine, cosine = turn(position.to(gl.float32) * frequency)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        sines.store(sine)
        cosines.store(cosine)
        row = (item // blocks).to(gl.int64)
        head = (item % blocks) * BT + gl.arange(0, BT, layout=HEAD)
        following = gl.minimum(item + gl.num_programs(0), num_items - 1)
        next_position = gl.load(positions + following // blocks).to(gl.int32)
        next_seq = gl.load(seq_idx + following // blocks).to(gl.int32)
        visible = gl.minimum((position + 1) // ratio, num_selected)
        num_tiles = WT + gl.cdiv(visible, BT)
        most = num_selected if SELECTED else visible
        oldest = row.to(gl.int32) + seq * (window - 1)
        older_first = recent + seq * older_width
        best = gl.load(sink + head, mask=head < num_heads, other=0.0).to(gl.float32) * LOG2E
        total = gl.full([BT], 1.0, gl.float32, HEAD)
        no_scores = gl.zeros([BT, BT], gl.float32, SCORES)
        no_total = gl.zeros([BT, 8], gl.float32, TOTAL)
        zero = gl.zeros([BT, CHANNELS], gl.float32, SUMS)
        s0, s1, s2, s3 = zero, zero, zero, zero
        wait_group(1)  # for the queries
        _prepare(tiles.index(1 - now), queries, sines, cosines, eps, OT, PREPARE)
        fence_async_shared()
        for step in range(0, num_tiles):
            tile = tiles.index(now)
            wait_group(0)
            older = choices.index(1 - now).load(ROWS)
            bound = gl.expand_dims(bounds.index(now).load(COLUMNS), 0)
            keys = tile.permute((1, 0))
            scores = warpgroup_mma(queries, keys, no_scores, use_acc=False, is_async=True)
            if step + 1 < num_tiles:
                _copy_tile(
                    tiles.index(1 - now), bounds.index(1 - now), entries, step + 1, older, most,
                    position, window, oldest, older_first, SELECTED, WT, COPY,
                )  # fmt: skip
                if SELECTED:
                    _copy_choice(choices.index(now), step + 2, row, selected, num_selected, WT)
            else:
                _copy_queries(tiles.index(1 - now), q, following, num_heads, COPY)
            commit_group()
            scores = warpgroup_mma_wait(0, deps=(scores,))
            scores = scores * qk_scale + bound
            top = gl.maximum(_row_maximum(scores, room, SCORES), -1e30)
            weights = gl.exp2(scores - gl.expand_dims(top, 1)).to(MT)
            shares.store(weights)
            fence_async_shared()
            part = warpgroup_mma(shares, ones, no_total, use_acc=False, is_async=True)
            o0 = _multiply(shares, tile, zero, 0)
            o1 = _multiply(shares, tile, zero, 1)
            part = warpgroup_mma_wait(2, deps=(part,))
            part = gl.convert_layout(gl.max(part, axis=1), HEAD)  # all equal
            top = gl.convert_layout(top, HEAD)
            new_best = gl.maximum(best, top)
            old_share = gl.exp2(best - new_best)
            new_share = gl.exp2(top - new_best)
            total = gl.fma(part, new_share, total * old_share)
            best = new_best
            old = gl.expand_dims(old_share, 1)
            new = gl.expand_dims(new_share, 1) + zero
            o0 = warpgroup_mma_wait(1, deps=(o0,))
            s0 = gl.fma(o0, new, s0 * old)
            o2 = _multiply(shares, tile, zero, 2)
            o1 = warpgroup_mma_wait(1, deps=(o1,))
            s1 = gl.fma(o1, new, s1 * old)
            o3 = _multiply(shares, tile, zero, 3)
            o2 = warpgroup_mma_wait(1, deps=(o2,))
            s2 = gl.fma(o2, new, s2 * old)
            o3 = warpgroup_mma_wait(0, deps=(o3,))
            s3 = gl.fma(o3, new, s3 * old)
            now = 1 - now
        now = 1 - now  # the other buffer has the next query's tile
        _copy_first(
            tiles.index(now), bounds.index(now), choices.index(1 - now), entries, following,
            next_position, next_seq, window, num_heads, selected, num_selected,
            SELECTED, WT, COPY,
        )  # fmt: skip
        sine, cosine = turn(next_position.to(gl.float32) * frequency)
        scale = gl.expand_dims(1.0 / total, 1)
        head = (item % blocks) * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, STORE))
        channel = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, STORE))
        at = gl.expand_dims((row * num_heads + head) * WIDTH, 1) + gl.expand_dims(channel, 0)
        live = gl.expand_dims(head < num_heads, 1)
        gl.store(out + at, gl.convert_layout((s0 * scale).to(OT), STORE), mask=live)
        at += CHANNELS
        gl.store(out + at, gl.convert_layout((s1 * scale).to(OT), STORE), mask=live)
        at += CHANNELS
        gl.store(out + at, gl.convert_layout((s2 * scale).to(OT), STORE), mask=live)
        at += CHANNELS
        x = to_fp32(to_dtype(s3 * scale, OT, True), True)
        x = _turn(x, sines, cosines, -1.0, BT, CHANNELS // 2)
        gl.store(out + at, gl.convert_layout(to_dtype(x, OT, True), STORE), mask=live)
        position, seq = next_position, next_seq


def prefill(q, to, entries, recent, num_programs, eps):
    """`entries` and `recent` as returned by `unpack`; with `eps` queries are prepared here."""
    tokens, heads, dim = q.shape
    selected = None if to.compressed is None else to.compressed.selected
    out = torch.empty_like(q)
    items = tokens * triton.cdiv(heads, HEADS)
    _prefill_kernel[(min(items, num_programs),)](
        q.view(entries.dtype), to.sink, out, entries, to.batch.positions, to.batch.seq_idx,
        to.batch.positions if selected is None else selected, most_entries(to.compressed),
        to.frequencies, heads, items, recent, max_entries(to.compressed), to.window, ratio_of(to),
        dim**-0.5 * LOG2E.value, eps or 0.0, SELECTED=selected is not None,
        WT=triton.cdiv(to.window, 64), PREPARE=eps is not None, num_warps=WARPS,
    )  # fmt: skip
    return out
