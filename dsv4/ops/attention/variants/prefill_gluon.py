# mypy: ignore-errors
"""`attention` over unpacked entries on sm_90: one kernel, whose warps have different jobs (Gluon).

A program walks over queries (blocks of 64 heads of a token). Four warps copy queries, and tiles of
64 entries into two buffers. Two groups of four warps score every other tile each, and multiply
shares and values of all tiles, half of the channels each: a group leaves the shares of its tile,
and their sums, for the other one in shared memory. So one group scores while the other multiplies,
queries are read once a tile, and shares go from registers into products.

Sums and their order are those of `attention_triton`, whose variants are tested everywhere; the
interpreter does not run Gluon, so a GPU test compares bits. Of a tile, products of 64 channels
begin at zero, are scaled and added to those of the tiles before, in order.

Shared memory holds a block of queries, two tiles, and little else.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.ops.attention.tile_device import LOG2E, most_entries, ratio_of
from dsv4.ops.attention.variants.unpack_triton import max_entries
from dsv4.ops.core.helpers_device import narrow, widen
from dsv4.ops.gemm.variants.prompt_gluon import joined
from dsv4.ops.gemm.variants.stream_gluon import barrier, begin_copy
from dsv4.ops.kv.rope_device import sin_cos

DIM, ROPE, HEADS, WARPS = 512, 64, 64, 4
REGISTERS, COPY_REGISTERS = 232, 48
BT = gl.constexpr(64)
WIDTH = gl.constexpr(DIM)
PIECE = 32  # channels per product of shares and values: sums take most of the registers
CHANNELS, PIECES = gl.constexpr(PIECE), gl.constexpr(DIM // 2 // PIECE)  # of a group's channels
TURNED = gl.constexpr(ROPE // 2)  # rotated pairs of channels, at the end
HALF = gl.constexpr(DIM // 4)  # pairs of channels of half a head
AT_ONCE = gl.constexpr(16)  # heads prepared together
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16]))
HEAD = gl.constexpr(gl.SliceLayout(1, SUMS))
STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *([0, 32 << i] for i in range(PIECE // 64)), [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, PIECE],
    )
)
THREADS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 16, 0]],
        warp_bases=[[0, 32, 0], [0, 64, 0]],
        block_bases=[],
        shape=[4, 128, 8],
    )
)

turn, to_dtype, to_fp32 = gluon.jit(sin_cos.fn), gluon.jit(narrow.fn), gluon.jit(widen.fn)


class Shared(NamedTuple):
    """Shared memory. Barriers: what is filled, what is free again."""

    queries: object
    tiles: object
    bounds: object  # of a tile's entries: 0, or -inf
    shares: object  # of a tile, by the group that scored it
    tops: object
    parts: object
    ones: object
    sines: object
    cosines: object
    tile_full: object
    tile_free: object
    shares_full: object
    shares_free: object
    queries_full: object
    queries_free: object
    queries_ready: object


class PrefillJob(NamedTuple):
    """What is read: see `_prefill_kernel`."""

    positions: object
    num_selected: int
    num_heads: int
    num_items: int
    window: int
    ratio: int
    qk_scale: float
    eps: float


@gluon.jit
def _facts(item, by, WT: gl.constexpr):
    """(row, its position, how many compressed entries it sees, its tiles) of an item."""
    row = item // gl.cdiv(by.num_heads, BT)
    position = gl.load(by.positions + row).to(gl.int32)
    visible = gl.minimum((position + 1) // by.ratio, by.num_selected)
    return row, position, visible, WT + gl.cdiv(visible, BT)


@gluon.jit
def _choice(selected, row, step, num_selected, WT: gl.constexpr):
    """A tile's selected compressed entries; -1: none."""
    j = (step - WT) * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, COPY))
    live = (j >= 0) & (j < num_selected)
    return gl.load(selected + row.to(gl.int64) * num_selected + j, mask=live, other=-1).to(gl.int32)


@gluon.jit
def _copy_tile(
    b, which, entries, step, chosen, most, position, window, oldest, older_first,
    SELECTED: gl.constexpr, WT: gl.constexpr,
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
        j = chosen
        present = present & (j >= 0)
    present = gl.where(step < WT, held, present)
    b.bounds.index(which).store(gl.where(present, 0.0, float("-inf")))
    place = gl.where(present, gl.where(step < WT, oldest + recency, older_first + j), oldest)
    channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    at = gl.expand_dims(place.to(gl.int64) * WIDTH, 1) + gl.expand_dims(channel, 0)
    live = gl.expand_dims(present, 1) & gl.expand_dims(channel >= 0, 0)
    begin_copy(b.tiles.index(which), entries + at, mask=live)


@gluon.jit
def _copy(
    q, entries, seq_idx, selected, recent, older_width, b, by, SELECTED: gl.constexpr,
    WT: gl.constexpr,
):  # fmt: skip
    """The job of the copying warps. A barrier of copies counts its 128 threads, and once more what
    they store themselves."""
    blocks = gl.cdiv(by.num_heads, BT)
    even, odd, count = 0, 0, 0  # tiles and queries so far
    for item in range(gl.program_id(0), by.num_items, gl.num_programs(0)):
        row, position, visible, num_tiles = _facts(item, by, WT)
        seq = gl.load(seq_idx + row).to(gl.int32)
        oldest = row + seq * (by.window - 1)
        older_first = recent + seq * older_width
        most = by.num_selected if SELECTED else visible
        head = (item % blocks) * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, COPY))
        head = gl.minimum(head, by.num_heads - 1)
        channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
        at = gl.expand_dims((row.to(gl.int64) * by.num_heads + head) * WIDTH, 1)
        mbarrier.wait(b.queries_free, (count + 1) & 1)
        begin_copy(b.queries.index(0), q + at + gl.expand_dims(channel, 0))
        async_copy.mbarrier_arrive(b.queries_full, increment_count=False)
        count = count + 1
        chosen = gl.full([BT], -1, gl.int32, gl.SliceLayout(1, COPY))
        if SELECTED:
            chosen = _choice(selected, row, 0, by.num_selected, WT)
        for step in range(0, num_tiles):
            which = step % 2
            used = gl.where(which == 0, even, odd)
            mbarrier.wait(b.tile_free.index(which), (used + 1) & 1)
            _copy_tile(
                b, which, entries, step, chosen, most, position, by.window, oldest, older_first,
                SELECTED, WT,
            )  # fmt: skip
            async_copy.mbarrier_arrive(b.tile_full.index(which), increment_count=False)
            barrier()
            mbarrier.arrive(b.tile_full.index(which), count=1)
            if SELECTED:
                chosen = _choice(selected, row, step + 1, by.num_selected, WT)
            even += 1 - which
            odd += which
    async_copy.wait_group(0)


@gluon.jit
def _turn(
    x, sines, cosines, SIGN: gl.constexpr, ROWS: gl.constexpr, FIRST: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """Rotate what is to rotate of fp32 `[ROWS, 2 * PAIRS]`, as `rotate` does; FIRST: its first pair
    in the second half of a head."""
    u, v = gl.split(gl.reshape(x, [ROWS, PAIRS, 2]))
    LAYOUT: gl.constexpr = gl.SliceLayout(0, u.type.layout)
    live = gl.expand_dims(FIRST + gl.arange(0, PAIRS, layout=LAYOUT) >= HALF - TURNED, 0)
    sine = gl.expand_dims(sines.slice(FIRST, PAIRS).load(LAYOUT) * SIGN, 0)
    cosine = gl.expand_dims(cosines.slice(FIRST, PAIRS).load(LAYOUT), 0) + gl.zeros_like(u)
    turned_u = gl.where(live, gl.fma(u, cosine, -(v * sine)), u)
    turned_v = gl.where(live, gl.fma(v, cosine, u * sine), v)
    return gl.reshape(gl.join(turned_u, turned_v), [ROWS, 2 * PAIRS])


@gluon.jit
def _prepare(b, eps, OT: gl.constexpr, PREPARE: gl.constexpr, OWN: gl.constexpr):
    """Half of the heads, in place, as multiplied; with PREPARE `query_prepare` is fused. There a
    warp sums the squares of half a head, here of a whole one: the halves are summed separately,
    then added."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    MT: gl.constexpr = b.queries.dtype
    for i in gl.static_range(BT // 2 // AT_ONCE):
        heads = b.queries.index(0).slice(OWN * (BT // 2) + i * AT_ONCE, AT_ONCE, dim=0)
        first, last = heads.slice(0, 2 * HALF, dim=1), heads.slice(2 * HALF, 2 * HALF, dim=1)
        a = first.load(LAYOUT).to(OT, bitcast=True)
        x = last.load(LAYOUT).to(OT, bitcast=True)
        if PREPARE:
            a = to_fp32(a, True)
            x = to_fp32(x, True)
            squares = gl.sum(a * a, axis=1) + gl.sum(x * x, axis=1)
            inverse = gl.expand_dims(gl.rsqrt(squares / WIDTH + eps), 1)
            a = to_fp32(to_dtype(a * inverse, OT, True), True)
            x = to_fp32(to_dtype(x * inverse, OT, True), True)
            sines, cosines = b.sines.index(OWN), b.cosines.index(OWN)
            x = to_dtype(_turn(x, sines, cosines, 1.0, AT_ONCE, 0, HALF), OT, True)
            x = gl.convert_layout(to_fp32(x, True), LAYOUT)
        first.store(a.to(MT))
        last.store(x.to(MT))


@gluon.jit
def _by_thread(shares):
    """`[64, 64]` as four times eight numbers of each of 128 threads: they store and load 16 bytes
    at a time."""
    shares = gl.permute(shares.reshape([4, 2, 8, 2, 4, 4, 2]), [1, 3, 0, 2, 5, 4, 6])
    return gl.convert_layout(shares.reshape([4, 128, 8]), THREADS, assert_trivial=True)


@gluon.jit
def _of_threads(shares):
    """What `_by_thread` was given, as operand of a product."""
    shares = gl.permute(shares.reshape([2, 2, 4, 8, 4, 4, 2]), [2, 0, 3, 1, 5, 4, 6])
    shares = shares.reshape([BT, BT])
    return gl.convert_layout(shares, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def _score(b, used, none, is_last, qk_scale, OWN: gl.constexpr):
    """A group's tile: shares of its entries, their largest score and their sum per head, which
    both groups find in shared memory."""
    MT: gl.constexpr = b.tiles.dtype
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    mbarrier.wait(b.tile_full.index(OWN), used & 1)
    fence_async_shared()
    bound = gl.expand_dims(b.bounds.index(OWN).load(gl.SliceLayout(0, SCORES)), 0)
    keys = b.tiles.index(OWN + none).permute((1, 0))
    zero = gl.zeros([BT, BT], gl.float32, SCORES)
    scores = warpgroup_mma(b.queries.index(none), keys, zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(b.queries_free, count=1, pred=is_last)
    scores = scores * qk_scale + bound
    top = gl.maximum(gl.max(scores, axis=1), -1e30)
    shares = gl.exp2(scores - gl.expand_dims(top, 1)).to(MT)
    operand = gl.convert_layout(shares, gl.DotOperandLayout(0, TOTAL, 2), assert_trivial=True)
    zero = gl.zeros([BT, 8], gl.float32, TOTAL)
    part = warpgroup_mma(operand, b.ones, zero, use_acc=False, is_async=True)
    mbarrier.wait(b.shares_free.index(OWN), (used + 1) & 1)
    b.shares.index(OWN).store(_by_thread(shares))
    b.tops.index(OWN).store(gl.convert_layout(top, HEAD, assert_trivial=True))
    part = warpgroup_mma_wait(0, deps=(part,))
    part = gl.convert_layout(gl.max(part, axis=1), HEAD, assert_trivial=True)  # all equal
    b.parts.index(OWN).store(part)
    barrier()
    mbarrier.arrive(b.shares_full.index(OWN), count=1)


@gluon.jit
def _found(b, used, WHICH: gl.constexpr, OWN: gl.constexpr):
    """What `_score` left of a tile, as operand and per head."""
    if WHICH != OWN:
        mbarrier.wait(b.shares_full.index(WHICH), used & 1)
    shares = _of_threads(b.shares.index(WHICH).load(THREADS))
    top = b.tops.index(WHICH).load(HEAD)
    part = b.parts.index(WHICH).load(HEAD)
    if WHICH != OWN:
        barrier()
        mbarrier.arrive(b.shares_free.index(WHICH), count=1)
        mbarrier.wait(b.tile_full.index(WHICH), used & 1)
        fence_async_shared()
    return shares, top, part


@gluon.jit
def _multiply(shares, b, which, FIRST: gl.constexpr):
    values = b.tiles.index(which).slice(FIRST, CHANNELS, dim=1)
    zero = gl.zeros([BT, CHANNELS], gl.float32, SUMS)
    return warpgroup_mma(shares, values, zero, use_acc=False, is_async=True)


@gluon.jit
def _add(b, used, none, best, total, sums, which: gl.constexpr, OWN: gl.constexpr):
    """Add a tile to the largest score, the total, and the sums of 32 channels each."""
    shares, top, part = _found(b, used, which, OWN)
    product = _multiply(shares, b, which + none, OWN * PIECES * CHANNELS)
    new_best = gl.maximum(best, top)
    old_share = gl.exp2(best - new_best)
    new_share = gl.exp2(top - new_best)
    total = gl.fma(part, new_share, total * old_share)
    old = gl.expand_dims(old_share, 1)
    new = gl.expand_dims(new_share, 1) + gl.zeros_like(sums[0])
    added = ()
    for i in gl.static_range(PIECES):
        done = warpgroup_mma_wait(0, deps=(product,))
        if i + 1 < PIECES:
            product = _multiply(shares, b, which + none, (OWN * PIECES + i + 1) * CHANNELS)
        else:
            mbarrier.arrive(b.tile_free.index(which), count=1)
        added = joined(added, gl.fma(done, new, sums[i] * old))
    return new_best, total, added


@gluon.constexpr_function
def first_pair(own, piece):
    """Of the second half of a head; below zero in the first half."""
    return ((own * int(PIECES) + piece) * int(CHANNELS) - DIM // 2) // 2


@gluon.jit
def _attend(
    sink, out, frequencies, b, by, OWN: gl.constexpr, WT: gl.constexpr, PREPARE: gl.constexpr
):  # fmt: skip
    """The job of a group of four warps. OWN: 0 or 1, which of two tiles it scores, and which half
    of the channels it adds up."""
    OT: gl.constexpr = out.dtype.element_ty
    pair = gl.arange(0, HALF, layout=gl.BlockedLayout([1], [32], [4], [0])) - (HALF - TURNED)
    frequency = gl.load(frequencies + pair, mask=pair >= 0, other=0.0)
    blocks = gl.cdiv(by.num_heads, BT)
    even, odd, count = 0, 0, 0
    for item in range(gl.program_id(0), by.num_items, gl.num_programs(0)):
        row, position, _, num_tiles = _facts(item, by, WT)
        sine, cosine = turn(position.to(gl.float32) * frequency)
        b.sines.index(OWN).store(sine)
        b.cosines.index(OWN).store(cosine)
        head = (item % blocks) * BT + gl.arange(0, BT, layout=HEAD)
        best = gl.load(sink + head, mask=head < by.num_heads, other=0.0).to(gl.float32) * LOG2E
        total = gl.full([BT], 1.0, gl.float32, HEAD)
        zero = gl.zeros([BT, CHANNELS], gl.float32, SUMS)
        sums = ()
        for _ in gl.static_range(PIECES):
            sums = joined(sums, zero)
        mbarrier.wait(b.queries_full, count & 1)
        _prepare(b, by.eps, OT, PREPARE, OWN)
        fence_async_shared()
        barrier()
        mbarrier.arrive(b.queries_ready, count=1)
        mbarrier.wait(b.queries_ready, count & 1)
        count = count + 1
        for first in range(0, num_tiles - 1, 2):
            none = first >> 30  # 0, which the compiler does not know: it would keep all addresses
            if OWN == 0:
                _score(b, even, none, first + 2 >= num_tiles, by.qk_scale, 0)
            else:
                _score(b, odd, none, first + 3 >= num_tiles, by.qk_scale, 1)
            best, total, sums = _add(b, even, none, best, total, sums, 0, OWN)
            best, total, sums = _add(b, odd, none, best, total, sums, 1, OWN)
            even += 1
            odd += 1
        if num_tiles % 2 == 1:
            if OWN == 0:
                _score(b, even, num_tiles >> 30, True, by.qk_scale, 0)
            else:
                mbarrier.arrive(b.queries_free, count=1, pred=num_tiles == 1)
            best, total, sums = _add(b, even, num_tiles >> 30, best, total, sums, 0, OWN)
            even += 1
        scale = gl.expand_dims(1.0 / total, 1)
        head = (item % blocks) * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, STORE))
        channel = OWN * PIECES * CHANNELS + gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, STORE))
        at = gl.expand_dims((row.to(gl.int64) * by.num_heads + head) * WIDTH, 1)
        at = out + at + gl.expand_dims(channel, 0)
        live = gl.expand_dims(head < by.num_heads, 1)
        for i in gl.static_range(PIECES):
            x = sums[i] * scale
            if first_pair(OWN, i) >= HALF - TURNED:
                x = to_fp32(to_dtype(x, OT, True), True)
                sines, cosines = b.sines.index(OWN), b.cosines.index(OWN)
                x = _turn(x, sines, cosines, -1.0, BT, first_pair(OWN, i), CHANNELS // 2)
            x = gl.convert_layout(to_dtype(x, OT, True), STORE)
            gl.store(at + i * CHANNELS, x, mask=live)


@gluon.jit(do_not_specialize=["num_items", "num_selected", "recent", "older_width"])
def _prefill_kernel(
    q, sink, out, entries, positions, seq_idx, selected, num_selected, frequencies, num_heads,
    num_items, recent, older_width, window, ratio, qk_scale, eps,
    SELECTED: gl.constexpr, WT: gl.constexpr, PREPARE: gl.constexpr, NUM_REGISTERS: gl.constexpr,
    NUM_COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Items are (token, block of heads), heads fastest. `q` and `entries`: 16 bits; `q` has the
    type of `out`, reinterpreted as that of `entries`. `recent`: rows before compressed ones."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    MT: gl.constexpr = entries.dtype.element_ty
    ones = gl.full([BT, 8], 1.0, MT, gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
    b = Shared(
        gl.allocate_shared_memory(MT, [1, BT, WIDTH], SHARED),
        gl.allocate_shared_memory(MT, [2, BT, WIDTH], SHARED),
        gl.allocate_shared_memory(gl.float32, [2, BT], LINE),
        gl.allocate_shared_memory(MT, [2, 4, 128, 8], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, BT], LINE),
        gl.allocate_shared_memory(gl.float32, [2, BT], LINE),
        gl.allocate_shared_memory(MT, [BT, 8], gl.NVMMASharedLayout(32, 16, 2, True), ones),
        gl.allocate_shared_memory(gl.float32, [2, HALF], LINE),
        gl.allocate_shared_memory(gl.float32, [2, HALF], LINE),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    for i in gl.static_range(2):
        mbarrier.init(b.tile_full.index(i), count=129)
        mbarrier.init(b.tile_free.index(i), count=2)
        mbarrier.init(b.shares_full.index(i), count=1)
        mbarrier.init(b.shares_free.index(i), count=1)
    mbarrier.init(b.queries_full, count=128)
    mbarrier.init(b.queries_free, count=2)
    mbarrier.init(b.queries_ready, count=2)
    fence_async_shared()  # the ones
    by = PrefillJob(positions, num_selected, num_heads, num_items, window, ratio, qk_scale, eps)
    gl.warp_specialize(
        [
            (_attend, (sink, out, frequencies, b, by, 0, WT, PREPARE)),
            (_attend, (sink, out, frequencies, b, by, 1, WT, PREPARE)),
            (_copy, (q, entries, seq_idx, selected, recent, older_width, b, by, SELECTED, WT)),
        ],
        [4, 4], [NUM_REGISTERS, NUM_COPY_REGISTERS],
    )  # fmt: skip


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
        WT=triton.cdiv(to.window, 64), PREPARE=eps is not None, NUM_REGISTERS=REGISTERS,
        NUM_COPY_REGISTERS=COPY_REGISTERS, num_warps=WARPS,
    )  # fmt: skip
    return out
