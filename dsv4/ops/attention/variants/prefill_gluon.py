# mypy: ignore-errors
"""`attention` over unpacked entries on sm_90: one kernel, whose warps have different jobs (Gluon).

A program walks over queries (blocks of 64 heads of a token). Eight warps copy queries and tiles of
64 entries, and prepare queries (prefill_copy_gluon.py), beside what the others do with the tiles
before. Two groups of four warps score every other tile each, and multiply shares and values of all
tiles, half of the channels each: a group leaves the shares of its tile for the other one in shared
memory. Queries are read once a tile, and shares go from registers into products, two of which are
in the tensor core.

Sums and their order are those of `attention_triton`, whose variants are tested everywhere; the
interpreter does not run Gluon, so a GPU test compares bits. Of a tile, products of 32 channels
begin at zero, are scaled and added to those of the tiles before, in order.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.ops.attention.tile_device import LOG2E, most_entries, ratio_of
from dsv4.ops.attention.variants import prefill_copy_gluon as copying
from dsv4.ops.attention.variants.prefill_copy_gluon import (
    ARRIVALS,
    BT,
    DIM,
    HALF,
    TURNED,
    WIDTH,
    Places,
    PrefillJob,
    Shared,
    after,
    copy,
    facts,
    to_dtype,
    to_fp32,
    turn_pairs,
    with_used,
)
from dsv4.ops.attention.variants.unpack_triton import max_entries
from dsv4.ops.gemm.variants.prompt_gluon import joined
from dsv4.ops.gemm.variants.stream_gluon import barrier

HEADS, WARPS, REGISTERS, COPY_REGISTERS = 64, 4, 208, 48
PIECE = 32  # channels per product of shares and values: sums take most of the registers
CHANNELS, PIECES = gl.constexpr(PIECE), gl.constexpr(DIM // 2 // PIECE)  # of a group's channels
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16]))
HEAD = gl.constexpr(gl.SliceLayout(1, SUMS))
STORE = gl.constexpr(  # of two products
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
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
# product, its factor, sum so far, that one's factor
SCALED_SUM = gl.constexpr("{ .reg .f32 s; mul.rn.f32 s, $3, $4; fma.rn.f32 $0, $1, $2, s; }")


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
def _score(b, queries, place, parity, used, qk_scale, OWN: gl.constexpr):
    """A group's tile: shares of its entries and their largest score per head, which both groups
    find in shared memory."""
    MT: gl.constexpr = b.places.dtype
    mbarrier.wait(b.full.index(place), parity)
    fence_async_shared()
    bound = gl.expand_dims(b.bounds.index(place).load(gl.SliceLayout(0, SCORES)), 0)
    keys = b.places.index(place).permute((1, 0))
    zero = gl.zeros([BT, BT], gl.float32, SCORES)
    scores = warpgroup_mma(b.places.index(queries), keys, zero, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    scores = scores * qk_scale + bound
    top = gl.maximum(gl.max(scores, axis=1), -1e30)
    shares = gl.exp2(scores - gl.expand_dims(top, 1)).to(MT)
    mbarrier.wait(b.shares_free.index(OWN), (used + 1) & 1)
    b.shares.index(OWN).store(_by_thread(shares))
    b.tops.index(OWN).store(gl.convert_layout(top, HEAD, assert_trivial=True))
    barrier()
    mbarrier.arrive(b.shares_full.index(OWN), count=1)


@gluon.jit
def _found(b, place, parity, which, used):
    """What `_score` left of a tile, as operand and per head."""
    mbarrier.wait(b.shares_full.index(which), used & 1)
    shares = _of_threads(b.shares.index(which).load(THREADS))
    top = b.tops.index(which).load(HEAD)
    barrier()
    mbarrier.arrive(b.shares_free.index(which), count=1)
    mbarrier.wait(b.full.index(place), parity)
    fence_async_shared()
    return shares, top


@gluon.jit
def _multiply(shares, b, place, FIRST: gl.constexpr):
    values = b.places.index(place).slice(FIRST, CHANNELS, dim=1)
    zero = gl.zeros([BT, CHANNELS], gl.float32, SUMS)
    return warpgroup_mma(shares, values, zero, use_acc=False, is_async=True)


@gluon.jit
def _sum_shares(shares, b):
    """Of a tile's entries, `[64, 8]`, all columns equal."""
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    operand = gl.convert_layout(shares, gl.DotOperandLayout(0, TOTAL, 2), assert_trivial=True)
    zero = gl.zeros([BT, 8], gl.float32, TOTAL)
    return warpgroup_mma(operand, b.ones, zero, use_acc=False, is_async=True)


@gluon.jit
def _stay(b, by):
    """Never waits; the compiler does not mix instructions before and after it."""
    if by.num_heads < 0:
        mbarrier.wait(b.shares_full.index(0), 0)


@gluon.jit
def _scaled_sum(product, new, sums, old):
    given = [product, new, sums, old]
    return gl.inline_asm_elementwise(SCALED_SUM, "=f,f,f,f,f", given, gl.float32, False, 1)


@gluon.jit
def _add(b, place, parity, which, used, best, total, sums, by, OWN: gl.constexpr):
    """Add a tile to the largest score, the total, and the sums of 32 channels each."""
    FIRST: gl.constexpr = OWN * PIECES * CHANNELS
    shares, top = _found(b, place, parity, which, used)
    part = _sum_shares(shares, b)
    products = (_multiply(shares, b, place, FIRST),)
    products = joined(products, _multiply(shares, b, place, FIRST + CHANNELS))
    part = warpgroup_mma_wait(2, deps=(part,))
    part = gl.convert_layout(gl.max(part, axis=1), HEAD, assert_trivial=True)
    new_best = gl.maximum(best, top)
    old_share = gl.exp2(best - new_best)
    new_share = gl.exp2(top - new_best)
    total = gl.fma(part, new_share, total * old_share)
    old, new = gl.expand_dims(old_share, 1), gl.expand_dims(new_share, 1)
    added = ()
    for i in gl.static_range(PIECES):
        done = warpgroup_mma_wait(1 if i + 1 < PIECES else 0, deps=(products[i],))
        if i + 2 < PIECES:
            products = joined(products, _multiply(shares, b, place, FIRST + (i + 2) * CHANNELS))
        if i % (PIECES // 2) == PIECES // 2 - 1:
            mbarrier.arrive(b.free.index(place * 2 + i // (PIECES // 2)), count=1)
        _stay(b, by)
        added = joined(added, _scaled_sum(done, new, sums[i], old))
    return new_best, total, added


@gluon.jit
def _beside(first, second):
    """Channels of two products."""
    return gl.permute(gl.join(first, second), [0, 2, 1]).reshape([BT, 2 * CHANNELS])


@gluon.jit
def _attend(sink, out, b, by, OWN: gl.constexpr, WT: gl.constexpr):
    """The job of a group of four warps. OWN: 0 or 1, which of two tiles it scores, and which half
    of the channels it adds up."""
    OT: gl.constexpr = out.dtype.element_ty
    blocks = gl.cdiv(by.num_heads, BT)
    places = Places(0, 1, 2, 0)
    even, odd, count = 0, 0, 0
    for item in range(gl.program_id(0), by.num_items, gl.num_programs(0)):
        row, _, _, num_tiles = facts(item, by, WT)
        head = (item % blocks) * BT + gl.arange(0, BT, layout=HEAD)
        best = gl.load(sink + head, mask=head < by.num_heads, other=0.0).to(gl.float32) * LOG2E
        total = gl.full([BT], 1.0, gl.float32, HEAD)
        zero = gl.zeros([BT, CHANNELS], gl.float32, SUMS)
        sums = ()
        for _ in gl.static_range(PIECES):
            sums = joined(sums, zero)
        used = places.used
        mbarrier.wait(b.full.index(places.queries), (used >> places.queries) & 1)
        used = used ^ (1 << places.queries)
        fence_async_shared()
        for step in range(0, num_tiles):
            which = step & 1
            if which == 0:
                none = step >> 30  # 0; a compiler that knew would keep all addresses
                queries = places.queries + none
                own = none + (places.odd if OWN == 1 else places.even)
                if step + OWN < num_tiles:
                    scored = odd if OWN == 1 else even
                    _score(b, queries, own, (used >> own) & 1, scored, by.qk_scale, OWN)
                for half in gl.static_range(2):
                    is_last = step + 2 >= num_tiles
                    mbarrier.arrive(b.free.index(queries * 2 + half), count=1, pred=is_last)
            place = gl.where(which == 0, places.even, places.odd)
            found = gl.where(which == 0, even, odd)
            parity = (used >> place) & 1
            best, total, sums = _add(
                b, place, parity, which, found, best, total, sums, by, OWN
            )  # fmt: skip
            used = used ^ (1 << place)
            even += 1 - which
            odd += which
        places = after(with_used(places, used), num_tiles)
        scale = gl.expand_dims(1.0 / total, 1)
        head = (item % blocks) * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, STORE))
        channel = gl.arange(0, 2 * CHANNELS, layout=gl.SliceLayout(0, STORE))
        at = gl.expand_dims((row.to(gl.int64) * by.num_heads + head) * WIDTH, 1)
        at = out + at + gl.expand_dims(OWN * PIECES * CHANNELS + channel, 0)
        live = gl.expand_dims(head < by.num_heads, 1)
        for i in gl.static_range(PIECES // 2):
            x = _beside(sums[2 * i] * scale, sums[2 * i + 1] * scale)
            if OWN == 1 and i == PIECES // 2 - 1:  # channels that turn
                x = to_fp32(to_dtype(x, OT, True), True)
                sines, cosines = b.sines.index(count & 1), b.cosines.index(count & 1)
                x = turn_pairs(x, sines, cosines, -1.0, BT, HALF - TURNED, TURNED)
            x = gl.convert_layout(to_dtype(x, OT, True), STORE)
            gl.store(at + i * 2 * CHANNELS, x, mask=live)
        count = count + 1


@gluon.jit(do_not_specialize=["num_items", "num_selected", "recent", "older_width"])
def _prefill_kernel(
    q, sink, out, entries, positions, seq_idx, selected, num_selected, frequencies, num_heads,
    num_items, recent, older_width, window, ratio, qk_scale, eps,
    SELECTED: gl.constexpr, WT: gl.constexpr, PREPARE: gl.constexpr, NUM_REGISTERS: gl.constexpr,
    NUM_COPY_WARPS: gl.constexpr, NUM_COPY_REGISTERS: gl.constexpr,
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
        gl.allocate_shared_memory(MT, [3, BT, WIDTH], SHARED),
        gl.allocate_shared_memory(gl.float32, [3, BT], LINE),
        gl.allocate_shared_memory(MT, [2, 4, 128, 8], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, BT], LINE),
        gl.allocate_shared_memory(MT, [BT, 8], gl.NVMMASharedLayout(32, 16, 2, True), ones),
        gl.allocate_shared_memory(gl.float32, [BT], LINE),
        gl.allocate_shared_memory(gl.float32, [2, HALF], LINE),
        gl.allocate_shared_memory(gl.float32, [2, HALF], LINE),
        gl.allocate_shared_memory(gl.int64, [3, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [3 * 2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
    )
    for i in gl.static_range(3):
        mbarrier.init(b.full.index(i), count=ARRIVALS)
        mbarrier.init(b.free.index(2 * i), count=2)
        mbarrier.init(b.free.index(2 * i + 1), count=2)
    for i in gl.static_range(2):
        mbarrier.init(b.shares_full.index(i), count=1)
        mbarrier.init(b.shares_free.index(i), count=2)
    fence_async_shared()  # the ones
    by = PrefillJob(positions, num_selected, num_heads, num_items, window, ratio, qk_scale, eps)
    gl.warp_specialize(
        [
            (_attend, (sink, out, b, by, 0, WT)),
            (_attend, (sink, out, b, by, 1, WT)),
            (
                copy,
                (
                    q, out, entries, seq_idx, selected, frequencies, recent, older_width, b, by,
                    SELECTED, WT, PREPARE,
                ),
            ),
        ],
        [4, NUM_COPY_WARPS], [NUM_REGISTERS, NUM_COPY_REGISTERS],
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
        NUM_COPY_WARPS=copying.WARPS, NUM_COPY_REGISTERS=COPY_REGISTERS, num_warps=WARPS,
    )  # fmt: skip
    return out
