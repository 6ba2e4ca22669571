# mypy: ignore-errors
"""`attention` over unpacked entries on sm_90: a program walks a query's tiles.

Written in Gluon, where copies and products are begun and awaited by name: while the scores of a
tile are multiplied the next tile is copied, sums are added while the next channels are multiplied,
and while a result is stored the next query and its first tile arrive. Triton's own compiler, given
the same rows, awaits each of nine products of a tile where it stands: 2,630 us for 8,192 queries
instead of 2,080. The interpreter does not know Gluon; a GPU test compares this form, to the last
bit, with those of `attention_triton`, which are tested everywhere. Sums and their order are theirs.

Shared memory holds a block of queries, two tiles of 64 entries, and little else: 218 KB.
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

from dsv4.ops.attention.tiles_triton import LOG2E
from dsv4.ops.kv.entry_triton import sin_cos

DIM, ROPE, HEADS, WARPS = 512, 64, 64, 8
BT = gl.constexpr(64)
WIDTH = gl.constexpr(DIM)
CHANNELS = gl.constexpr(128)  # of a product of weights and values
TURNED = gl.constexpr(ROPE // 2)  # pairs of channels, at the end

commit_group, wait_group = async_copy.commit_group, async_copy.wait_group
if hasattr(async_copy, "async_load"):
    begin_copy = async_copy.async_load
else:  # triton 3.6
    begin_copy = async_copy.async_copy_global_to_shared
turn = gluon.jit(sin_cos.fn)


@gluon.jit
def _older(
    step, visible, row, selected, num_selected, SELECTED: gl.constexpr, WT: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Which compressed entries a tile has, -1 for none."""
    j = (step - WT) * BT + gl.arange(0, BT, layout=LAYOUT)
    if SELECTED:
        live = (j >= 0) & (j < num_selected)
        return gl.load(selected + row * num_selected + j, mask=live, other=-1)
    else:
        return gl.where(j < visible, j, -1)


@gluon.jit
def _present(step, older, position, window, WT: gl.constexpr, LAYOUT: gl.constexpr):
    recency = step * BT + gl.arange(0, BT, layout=LAYOUT)
    held = (recency < window) & (position + 1 - window + recency >= 0)
    return gl.where(step < WT, held, older >= 0)


@gluon.jit
def _copy_tile(
    tile, entries, step, older, position, window, oldest, older_first, WT: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    """In place of an absent entry another one that exists: nothing but numbers is read."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, COPY)
    older = older.to(gl.int32)
    present = _present(step, older, position, window, WT, LAYOUT)
    recency = step * BT + gl.arange(0, BT, layout=LAYOUT)
    recent = gl.where(present, oldest + recency, oldest + window - 1)
    place = gl.where(step < WT, recent, older_first + gl.where(present, older, 0))
    channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    at = gl.expand_dims(place.to(gl.int64) * WIDTH, 1) + gl.expand_dims(channel, 0)
    begin_copy(tile, entries + at)


@gluon.jit
def _copy_first(
    tile, raw, entries, q, item, position, seq, window, num_heads, WT: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    """A query's first tile, which is of its window, and the block of queries as it is stored."""
    blocks = gl.cdiv(num_heads, BT)
    row = (item // blocks).to(gl.int64)
    older = gl.full([BT], -1, gl.int32, gl.SliceLayout(1, COPY))
    oldest = row.to(gl.int32) + seq * (window - 1)
    _copy_tile(tile, entries, 0, older, position, window, oldest, 0, WT, COPY)
    head = (item % blocks) * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, COPY))
    head = gl.minimum(head, num_heads - 1)
    channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    at = gl.expand_dims((row * num_heads + head) * WIDTH, 1) + gl.expand_dims(channel, 0)
    begin_copy(raw, q + at)
    commit_group()


@gluon.jit
def _row_maximum(scores, room, LAYOUT: gl.constexpr):
    """Both groups of warps have half of the entries: they meet in shared memory, once."""
    halves = gl.max(gl.reshape(scores, [BT, 2, BT // 2]), axis=2)
    room.store(gl.reshape(gl.permute(halves, [1, 0]), [2 * BT]))
    first = room.slice(0, BT).load(gl.SliceLayout(1, LAYOUT))
    return gl.maximum(first, room.slice(BT, BT).load(gl.SliceLayout(1, LAYOUT)))


@gluon.jit
def _multiply(weights, tile, zero, PIECE: gl.constexpr):
    values = tile.slice(PIECE * CHANNELS, CHANNELS, dim=1)
    return warpgroup_mma(weights, values, zero, use_acc=False, is_async=True)


@gluon.jit
def _turn_back(x, position, frequencies):
    """The rotated channels, the last of fp32 `[heads, CHANNELS]`; as `rope_tile` does it."""
    u, v = gl.split(gl.reshape(x, [BT, CHANNELS // 2, 2]))
    pair = gl.arange(0, CHANNELS // 2, layout=gl.SliceLayout(0, u.type.layout))
    first: gl.constexpr = CHANNELS // 2 - TURNED
    live = pair >= first
    frequency = gl.load(frequencies + pair - first, mask=live, other=0.0)
    sine, cosine = turn(position.to(gl.float32) * frequency)
    zero = gl.zeros_like(u)
    sine = gl.expand_dims(sine * -1.0, 0) + zero
    cosine = gl.expand_dims(cosine, 0) + zero
    live = gl.expand_dims(live, 0)
    turned_u = gl.where(live, gl.fma(u, cosine, -(v * sine)), u)
    turned_v = gl.where(live, gl.fma(v, cosine, u * sine), v)
    return gl.reshape(gl.join(turned_u, turned_v), [BT, CHANNELS])


@gluon.jit(do_not_specialize=["num_items", "num_selected", "recent", "older_width"])
def _walk_kernel(
    q, sink, out, entries, positions, seq_idx, selected, num_selected, frequencies, num_heads,
    num_items, recent, older_width, window, ratio, qk_scale,
    SELECTED: gl.constexpr, WT: gl.constexpr,
):  # fmt: skip
    """Items are (token, block of heads), the last fastest. `q` and `entries`: 16 bits; `q` is
    what `out` is, under the name of `entries`' type. `recent`: rows before the compressed ones."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 8, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    HEAD: gl.constexpr = gl.SliceLayout(1, SUMS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    MT: gl.constexpr = entries.dtype.element_ty
    OT: gl.constexpr = out.dtype.element_ty
    queries = gl.allocate_shared_memory(MT, [BT, WIDTH], SHARED)
    tiles = gl.allocate_shared_memory(MT, [2, BT, WIDTH], SHARED)
    shares = gl.allocate_shared_memory(MT, [BT, BT], SHARED)
    ones = gl.full([BT, 8], 1.0, MT, gl.BlockedLayout([1, 1], [4, 8], [8, 1], [1, 0]))
    ones = gl.allocate_shared_memory(MT, [BT, 8], gl.NVMMASharedLayout(32, 16, 2, True), ones)
    room = gl.allocate_shared_memory(gl.float32, [2 * BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    blocks = gl.cdiv(num_heads, BT)
    item = gl.program_id(0)
    position = gl.load(positions + item // blocks).to(gl.int32)
    seq = gl.load(seq_idx + item // blocks).to(gl.int32)
    now = 0  # which of the two tiles is multiplied
    _copy_first(
        tiles.index(0), tiles.index(1), entries, q, item, position, seq, window, num_heads, WT, COPY
    )
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        row = (item // blocks).to(gl.int64)
        head = (item % blocks) * BT + gl.arange(0, BT, layout=HEAD)
        visible = gl.minimum((position + 1) // ratio, num_selected)
        num_tiles = WT + gl.cdiv(visible, BT)
        oldest = row.to(gl.int32) + seq * (window - 1)
        older_first = recent + seq * older_width
        older = _older(1, visible, row, selected, num_selected, SELECTED, WT, ROWS)
        best = gl.load(sink + head, mask=head < num_heads, other=0.0).to(gl.float32) * LOG2E
        total = gl.full([BT], 1.0, gl.float32, HEAD)
        no_scores = gl.zeros([BT, BT], gl.float32, SCORES)
        no_total = gl.zeros([BT, 8], gl.float32, TOTAL)
        zero = gl.zeros([BT, CHANNELS], gl.float32, SUMS)
        s0, s1, s2, s3 = zero, zero, zero, zero
        wait_group(0)
        for i in gl.static_range(WIDTH // CHANNELS):
            x = tiles.index(1 - now).slice(i * CHANNELS, CHANNELS, dim=1).load(STORE)
            x = x.to(OT, bitcast=True).to(MT)
            queries.slice(i * CHANNELS, CHANNELS, dim=1).store(x)
        fence_async_shared()
        for step in range(0, num_tiles):
            tile = tiles.index(now)
            wait_group(0)
            keys = tile.permute((1, 0))
            scores = warpgroup_mma(queries, keys, no_scores, use_acc=False, is_async=True)
            if step + 1 < num_tiles:
                _copy_tile(
                    tiles.index(1 - now), entries, step + 1, older, position, window, oldest,
                    older_first, WT, COPY,
                )  # fmt: skip
            commit_group()
            older = _older(step + 2, visible, row, selected, num_selected, SELECTED, WT, ROWS)
            chosen = _older(step, visible, row, selected, num_selected, SELECTED, WT, COLUMNS)
            present = _present(step, chosen, position, window, WT, COLUMNS)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            scores = gl.where(gl.expand_dims(present, 0), scores * qk_scale, float("-inf"))
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
        following = gl.minimum(item + gl.num_programs(0), num_items - 1)
        next_position = gl.load(positions + following // blocks).to(gl.int32)
        seq = gl.load(seq_idx + following // blocks).to(gl.int32)
        _copy_first(
            tiles.index(now), tiles.index(1 - now), entries, q, following, next_position, seq,
            window, num_heads, WT, COPY,
        )  # fmt: skip
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
        x = _turn_back((s3 * scale).to(OT).to(gl.float32), position, frequencies)
        gl.store(out + at, gl.convert_layout(x.to(OT), STORE), mask=live)
        position = next_position


def walk(q, sink, entries, recent, compressed, batch, window, frequencies, num_programs):
    """`entries` and `recent` as `unpack` gives them."""
    tokens, heads, dim = q.shape
    selected = None if compressed is None else compressed.selected
    held = 0
    if compressed is not None:
        held = compressed.table.shape[1] * compressed.pool.page_entries
    out = torch.empty_like(q)
    items = tokens * triton.cdiv(heads, HEADS)
    _walk_kernel[(min(items, num_programs),)](
        q.view(entries.dtype),
        sink,
        out,
        entries,
        batch.positions,
        batch.seq_idx,
        batch.positions if selected is None else selected,
        held if selected is None else selected.shape[1],
        frequencies,
        heads,
        items,
        recent,
        held,
        window,
        1 if compressed is None else compressed.ratio,
        dim**-0.5 * LOG2E.value,
        SELECTED=selected is not None,
        WT=triton.cdiv(window, 64),
        num_warps=WARPS,
    )
    return out
