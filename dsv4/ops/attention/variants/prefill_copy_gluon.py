# mypy: ignore-errors
"""What the copying warps of `prefill_gluon` do, and what they share with the other ones.

Shared memory has three places for 64 rows of 512 channels: one for queries, two for tiles of
entries in turn. When the place of a query's last tile but one is free, the next queries are copied
there and prepared, and their first tile goes where the queries were.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from dsv4.ops.core.helpers_device import narrow, widen
from dsv4.ops.gemm.variants.stream_gluon import barrier, begin_copy
from dsv4.ops.kv.rope_device import sin_cos

DIM, ROPE, WARPS = 512, 64, 8
ARRIVALS = gl.constexpr(32 * WARPS + 1)  # of a tile: threads, and once more what they store
BT = gl.constexpr(64)
WIDTH, QUARTER = gl.constexpr(DIM), gl.constexpr(DIM // 4)
TURNED = gl.constexpr(ROPE // 2)  # rotated pairs of channels, at the end
HALF = gl.constexpr(DIM // 4)  # pairs of channels of half a head
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0]))
HALF_HEADS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0]))
PAIRS = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))
LINES = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0]))  # of 128 bytes
PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")
turn, to_dtype, to_fp32 = gluon.jit(sin_cos.fn), gluon.jit(narrow.fn), gluon.jit(widen.fn)


class Shared(NamedTuple):
    """Shared memory. Barriers: what is filled, what is free again."""

    places: object  # of queries, and of tiles
    bounds: object  # of a place's entries: 0, or -inf
    shares: object  # of a tile, by the group that scored it
    tops: object
    ones: object
    inverses: object  # of the norms of heads
    sines: object  # of this query and the next
    cosines: object
    full: object  # places
    free: object  # quarters 0 and 2 of a place's channels, then 1 and 3: a group has two quarters
    shares_full: object
    shares_free: object


class Places(NamedTuple):
    """Of a query, and which of them were used an odd number of times, as bits."""

    queries: int
    even: int  # tiles
    odd: int
    used: int


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
def facts(item, by, WT: gl.constexpr):
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
def _wait_free(b, place, used, half: gl.constexpr):
    mbarrier.wait(b.free.index(place * 2 + half), ((used >> place) + 1) & 1)


@gluon.jit
def after(places, num_tiles):
    """Places of the next query: its first tile is where this one's queries were."""
    last_is_odd = (num_tiles & 1) == 0
    queries = gl.where(last_is_odd, places.even, places.odd)
    last = gl.where(last_is_odd, places.odd, places.even)
    return Places(queries, places.queries, last, places.used)


@gluon.jit
def with_used(places, used):
    return Places(places.queries, places.even, places.odd, used)


@gluon.jit
def _copy_tile(
    b, place, used, entries, step, chosen, most, position, seq, row, recent, older_width, by,
    SELECTED: gl.constexpr, WT: gl.constexpr,
):  # fmt: skip
    """Masked slots are filled with zeros and read nothing: if all of them read one dummy entry, in
    all programs at once, its few lines of the L2 cache set the pace. Their bound, -inf, is added to
    their scores."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, COPY)
    oldest = row + seq * (by.window - 1)
    older_first = recent + seq * older_width
    recency = step * BT + gl.arange(0, BT, layout=LAYOUT)
    held = (recency < by.window) & (position + 1 - by.window + recency >= 0)
    j = recency - WT * BT
    present = j < most
    if SELECTED:
        j = chosen
        present = present & (j >= 0)
    present = gl.where(step < WT, held, present)
    at = gl.where(present, gl.where(step < WT, oldest + recency, older_first + j), oldest)
    channel = gl.arange(0, QUARTER, layout=gl.SliceLayout(0, COPY))
    at = gl.expand_dims(at.to(gl.int64) * WIDTH, 1) + gl.expand_dims(channel, 0)
    live = gl.expand_dims(present, 1) & gl.expand_dims(channel >= 0, 0)
    for half in gl.static_range(2):
        _wait_free(b, place, used, half)
        if half == 0:
            b.bounds.index(place).store(gl.where(present, 0.0, float("-inf")))
        for group in gl.static_range(2):
            to = b.places.index(place).slice((2 * group + half) * QUARTER, QUARTER, dim=1)
            begin_copy(to, entries + at + (2 * group + half) * QUARTER, mask=live)
    async_copy.mbarrier_arrive(b.full.index(place), increment_count=False)
    barrier()
    mbarrier.arrive(b.full.index(place), count=1)
    return used ^ (1 << place)


@gluon.jit
def _copy_queries(b, place, used, q, item, row, by):
    blocks = gl.cdiv(by.num_heads, BT)
    head = (item % blocks) * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, COPY))
    head = gl.minimum(head, by.num_heads - 1)
    channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    at = gl.expand_dims((row.to(gl.int64) * by.num_heads + head) * WIDTH, 1)
    for half in gl.static_range(2):
        _wait_free(b, place, used, half)
    begin_copy(b.places.index(place), q + at + gl.expand_dims(channel, 0))
    async_copy.commit_group()
    return used ^ (1 << place)


@gluon.jit
def _prefetch_queries(q, item, by):
    """Into the L2 cache, a whole query ahead: their place in shared memory is free late."""
    blocks = gl.cdiv(by.num_heads, BT)
    head = (item % blocks) * BT + gl.arange(0, BT, layout=gl.SliceLayout(1, LINES))
    head = gl.expand_dims(gl.minimum(head, by.num_heads - 1), 1)
    line = gl.expand_dims(gl.arange(0, WIDTH // 64, layout=gl.SliceLayout(0, LINES)), 0)
    at = q + ((item // blocks).to(gl.int64) * by.num_heads + head) * WIDTH + line * 64
    gl.inline_asm_elementwise(PREFETCH, "=r,l", [at.to(gl.int64)], gl.int32, False, 1)


@gluon.jit
def _begin(
    b, places, q, entries, seq_idx, frequency, recent, older_width, item, count, by,
    OT: gl.constexpr, PREPARE: gl.constexpr, SELECTED: gl.constexpr, WT: gl.constexpr,
):  # fmt: skip
    """A query's first tile, from its window, and its queries. Returns the bits of used places."""
    row, position, visible, _ = facts(item, by, WT)
    seq = gl.load(seq_idx + row).to(gl.int32)
    used = _copy_queries(b, places.queries, places.used, q, item, row, by)
    none = gl.full([BT], -1, gl.int32, gl.SliceLayout(1, COPY))
    used = _copy_tile(
        b, places.even, used, entries, 0, none, visible, position, seq, row, recent, older_width,
        by, SELECTED, WT,
    )  # fmt: skip
    sine, cosine = turn(position.to(gl.float32) * frequency)
    b.sines.index(count & 1).store(sine)
    b.cosines.index(count & 1).store(cosine)
    async_copy.wait_group(0)
    barrier()
    _prepare(b, places.queries, count & 1, by.eps, OT, PREPARE)
    fence_async_shared()
    barrier()
    mbarrier.arrive(b.full.index(places.queries), count=ARRIVALS)
    return used


@gluon.jit
def copy(
    q, out, entries, seq_idx, selected, frequencies, recent, older_width, b, by,
    SELECTED: gl.constexpr, WT: gl.constexpr, PREPARE: gl.constexpr,
):  # fmt: skip
    """The job of the copying warps."""
    OT: gl.constexpr = out.dtype.element_ty
    pair = gl.arange(0, HALF, layout=PAIRS) - (HALF - TURNED)
    frequency = gl.load(frequencies + pair, mask=pair >= 0, other=0.0)
    places = Places(1, 0, 2, 0)
    count = 0
    # before the first item there is one without tiles
    for item in range(gl.program_id(0) - gl.num_programs(0), by.num_items, gl.num_programs(0)):
        row, position, visible, num_tiles = facts(gl.maximum(item, 0), by, WT)
        num_tiles = gl.where(item < 0, 0, num_tiles)
        seq = gl.load(seq_idx + row).to(gl.int32)
        most = by.num_selected if SELECTED else visible
        chosen = gl.full([BT], -1, gl.int32, gl.SliceLayout(1, COPY))
        later = chosen
        if SELECTED:  # two tiles ahead
            chosen = _choice(selected, row, 1, by.num_selected, WT)
            later = _choice(selected, row, 2, by.num_selected, WT)
        used = places.used
        following = item + gl.num_programs(0)
        if following < by.num_items:
            _prefetch_queries(q, following, by)
        for step in range(1, num_tiles):
            place = gl.where(step % 2 == 0, places.even, places.odd)
            used = _copy_tile(
                b, place, used, entries, step, chosen, most, position, seq, row, recent,
                older_width, by, SELECTED, WT,
            )  # fmt: skip
            if SELECTED:
                chosen = later
                later = _choice(selected, row, step + 2, by.num_selected, WT)
        places = after(with_used(places, used), num_tiles)
        if following < by.num_items:
            used = _begin(
                b, places, q, entries, seq_idx, frequency, recent, older_width, following, count,
                by, OT, PREPARE, SELECTED, WT,
            )  # fmt: skip
            places = with_used(places, used)
        count = count + 1
    async_copy.wait_group(0)


@gluon.jit
def turn_pairs(
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
def _inverse_norms(b, place, eps, OT: gl.constexpr):
    """Of queries. In `query_prepare` a warp sums the squares of half a head, here of a whole one:
    the halves are summed separately, then added."""
    squares = gl.zeros([BT], gl.float32, gl.SliceLayout(1, HALF_HEADS))
    for first in gl.static_range(0, WIDTH, 2 * HALF):
        x = b.places.index(place).slice(first, 2 * HALF, dim=1).load(HALF_HEADS)
        x = to_fp32(x.to(OT, bitcast=True), True)
        squares += gl.sum(x * x, axis=1)
    b.inverses.store(gl.rsqrt(squares / WIDTH + eps))
    barrier()
    return gl.expand_dims(b.inverses.load(gl.SliceLayout(1, COPY)), 1)


@gluon.jit
def _prepare(b, place, turned, eps, OT: gl.constexpr, PREPARE: gl.constexpr):
    """Queries in their place, as multiplied; with PREPARE `query_prepare` is fused."""
    MT: gl.constexpr = b.places.dtype
    if PREPARE:
        inverse = _inverse_norms(b, place, eps, OT)
    for first in gl.static_range(0, WIDTH, 2 * TURNED):
        part = b.places.index(place).slice(first, 2 * TURNED, dim=1)
        x = part.load(COPY).to(OT, bitcast=True)
        if PREPARE:
            x = to_fp32(to_dtype(to_fp32(x, True) * inverse, OT, True), True)
            if first == WIDTH - 2 * TURNED:
                sines, cosines = b.sines.index(turned), b.cosines.index(turned)
                x = turn_pairs(x, sines, cosines, 1.0, BT, HALF - TURNED, TURNED)
                x = gl.convert_layout(to_fp32(to_dtype(x, OT, True), True), COPY)
        part.store(x.to(MT))
