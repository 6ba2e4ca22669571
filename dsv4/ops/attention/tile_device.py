# mypy: ignore-errors
"""Device code for one attention tile: entry addresses, softmax, and merging with other tiles."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4.ops.core.helpers_device import append, from_e4m3
from dsv4.ops.core.launch import interpreting
from dsv4.ops.kv import entry_device as ed
from dsv4.ops.kv.rope_device import rope_tile

BT = 64  # entries per tile; changing it changes bits
LOG2E = tl.constexpr(1.4426950408889634)


class TilePlaces(NamedTuple):
    """Where the queries' entries are: `w_*` in the window, `c_*` compressed."""

    positions: torch.Tensor
    seq_idx: torch.Tensor
    chosen: torch.Tensor  # [tokens, k] selected entries
    w_pool: ed.EntryPool  # scale bytes of an entry as one integer
    w_table: torch.Tensor
    c_pool: ed.EntryPool
    c_table: torch.Tensor


class TileFormat(NamedTuple):
    """Constants of a kernel that reads tiles of entries."""

    kind: int
    nope: int
    dim: int
    rope: int
    selected: bool  # only the entries in `chosen`, not all visible ones
    bt: int  # entries per tile
    wt: int  # tiles of the window, before the others
    w_entries: int  # of a page
    c_entries: int
    mt: tl.dtype  # of products
    asm: bool


@triton.constexpr_function
def pieces(dim, rope_dim):
    """Widths of an entry's pieces: powers of two up to 64, the group of one scale; rotated
    channels are separate."""
    widths = []
    for left in (dim - rope_dim, rope_dim):
        while left:
            widths.append(min(64, 1 << (left.bit_length() - 1)))
            left -= widths[-1]
    return tuple(widths)


@triton.constexpr_function
def piece_first(dim, rope_dim, index):
    """First channel of piece `index` of an entry."""
    return sum(pieces(dim, rope_dim)[:index])


@triton.jit
def _times(k, factor, ASM: tl.constexpr):
    """`k * factor` in fp16. The opaque instruction hides the 8-bit type from the compiler, which
    then takes channels in 16-bit order, as it does for products of 64 heads."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [k, factor.broadcast_to(k.shape)],
            dtype=tl.float16, is_pure=False, pack=2,
        )  # fmt: skip
    return k * factor


@triton.jit
def to_half(x, MT: tl.constexpr, ASM: tl.constexpr):
    """`x` in MT; converted from bf16 to fp16 once before shared memory, not in every warp that
    reads it."""
    if ASM and x.dtype == tl.bfloat16 and tl.float16 == MT:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; shl.b32 a, $1, 16; and.b32 b, $1, 0xFFFF0000;"
            " cvt.rn.f16x2.f32 $0, b, a; }",
            "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2,
        )  # fmt: skip
    return x.to(MT)


@triton.jit
def _fetch_piece(pool, slot, FIRST: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr):
    """Channels FIRST to FIRST + WIDTH of the entries at `slot`, as stored."""
    channel = FIRST + tl.arange(0, WIDTH)[None, :]
    if T.kind != 2:
        x = tl.load(pool.data + slot[:, None] * T.dim + channel)
    elif T.nope <= FIRST:
        x = tl.load(pool.tail + slot[:, None] * (T.dim - T.nope) + (channel - T.nope))
    else:
        x = tl.load(pool.data + slot[:, None] * T.nope + channel)
    return x


@triton.jit
def widen_piece(x, scales, FIRST: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr):
    """The result of `_fetch_piece`, in T.mt.

    `scales` (int64): the scale bytes of each entry, the first group in the lowest byte.
    """
    if T.kind == 2 and T.nope > FIRST:
        return widen_codes(x, scales, FIRST // 64, T.mt, ASM)
    else:
        return to_half(x, T.mt, ASM)


@triton.jit
def widen_codes(x, scales, group, MT: tl.constexpr, ASM: tl.constexpr):
    """FP8 bytes of one group of channels, scaled, in MT."""
    factor = ed.power_of_two(((scales >> (8 * group)) & 255).to(tl.int32)).to(MT)[:, None]
    k = from_e4m3(x, MT)
    return _times(k, factor, ASM and tl.float16 == MT)


@triton.jit
def load_piece(pool, scales, slot, FIRST: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr):
    x = _fetch_piece(pool, slot, FIRST, WIDTH, T)
    return widen_piece(x, scales, FIRST, T, False)


@triton.jit
def load_queries(q, q_at, live, T: tl.constexpr):
    """Queries by piece, as stored."""
    found = ()
    for i in tl.static_range(len(pieces(T.dim, T.rope))):
        channel = piece_first(T.dim, T.rope, i) + tl.arange(0, pieces(T.dim, T.rope)[i])
        x = tl.load(q + q_at + channel[None, :], mask=live[:, None], other=0.0)
        found = append(found, x)
    return found


@triton.jit
def widen_queries(found, JOINED: tl.constexpr, MT: tl.constexpr):
    queries = ()
    for i in tl.static_range(len(found)):
        queries = append(queries, found[i].to(MT))
    return join_pieces(queries, JOINED)


@triton.jit
def pool_of(in_window, at):
    """The pool of a tile's entries."""
    data = tl.where(in_window, at.w_pool.data, at.c_pool.data)
    tail = tl.where(in_window, at.w_pool.tail, at.c_pool.tail)
    return ed.EntryPool(data, tail, tl.where(in_window, at.w_pool.scale, at.c_pool.scale))


@triton.jit
def fetch_tile(slot, in_window, at, T: tl.constexpr):
    """The entries at `slot` as stored, by piece, and their scale bytes."""
    pool = pool_of(in_window, at)
    scales = slot
    if T.kind == 2:
        scales = tl.load(pool.scale + slot)
    stored = ()
    for i in tl.static_range(len(pieces(T.dim, T.rope))):
        x = _fetch_piece(pool, slot, piece_first(T.dim, T.rope, i), pieces(T.dim, T.rope)[i], T)
        stored = append(stored, x)
    return stored, scales


@triton.jit
def widen_tile(stored, scales, JOINED: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr):
    """The result of `fetch_tile` in T.mt, with JOINED pieces per matrix."""
    keys = ()
    for i in tl.static_range(len(pieces(T.dim, T.rope))):
        k = widen_piece(stored[i], scales, piece_first(T.dim, T.rope, i), T, ASM)
        keys = append(keys, k)
    return join_pieces(keys, JOINED)


@triton.constexpr_function
def num_joined(dim, rope_dim, channels):
    """Pieces per matrix of `channels`; one if they do not fill such matrices."""
    widths = pieces(dim, rope_dim)
    count = channels // widths[0]
    fits = len(set(widths)) == 1 and count & (count - 1) == 0 and len(widths) % max(count, 1) == 0
    return count if fits and count > 0 else 1


@triton.constexpr_function
def chunk_width(dim, rope_dim, joined, index):
    """Width of `joined` concatenated pieces."""
    return joined * pieces(dim, rope_dim)[index * joined]


@triton.jit
def beside(a, b):
    """`[R, C]` and `[R, C]` -> `[R, 2 C]`, without moving data between threads."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@triton.jit
def join_pieces(found, JOINED: tl.constexpr):
    """Concatenate each run of JOINED matrices."""
    if JOINED > 1:
        halves = ()
        for i in tl.static_range(0, len(found), 2):
            halves = append(halves, beside(found[i], found[i + 1]))
        return join_pieces(halves, JOINED // 2)
    else:
        return found


@triton.jit
def dot(a, b, acc, MT: tl.constexpr):
    if tl.float32 == MT:
        return tl.dot(a, b, acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def tile_choice(tile, visible, row, at, num_selected, T: tl.constexpr):
    """The compressed entries of a tile, -1 for none."""
    j = (tile - T.wt) * T.bt + tl.arange(0, T.bt)
    if T.selected:
        live = (j >= 0) & (j < num_selected)
        older = tl.load(at.chosen + row * num_selected + j, mask=live, other=-1).to(tl.int32)
    else:
        older = tl.where(j < visible, j, -1)
    return older


@triton.jit
def tile_pages(tile, older, position, seq, window, at, w_width, c_width, T: tl.constexpr):
    """Pages of a tile's entries, their offsets inside, and a mask of those present.

    Masked slots read a valid dummy entry, so no NaN is loaded: the newest of the window, or the
    first compressed one.
    """
    in_window = tile < T.wt
    i = tile * T.bt + tl.arange(0, T.bt)
    recent = tl.where(i < window, position + 1 - window + i, -1)
    entry = tl.where(in_window, recent, older)
    present = entry >= 0
    entry = tl.where(present, entry, tl.where(in_window, tl.maximum(position, 0), 0))
    page = tl.where(in_window, entry // T.w_entries, entry // T.c_entries)
    inside = tl.where(in_window, entry % T.w_entries, entry % T.c_entries)
    width = tl.where(in_window, w_width, c_width)
    table = tl.where(in_window, at.w_table, at.c_table) + seq * width
    # the window's table is a ring; one division suffices, since entries span less than one turn
    oldest = tl.where(in_window, tl.maximum(position + 1 - window, 0) // T.w_entries, 0)
    place = page - oldest + oldest % width
    place = tl.where(place >= width, place - width, place)
    return tl.load(table + place), inside, present


@triton.jit
def slots_of(tile, page, inside, T: tl.constexpr):
    """Entry offsets (int64) from the pool's start, in entries."""
    return page.to(tl.int64) * tl.where(tile < T.wt, T.w_entries, T.c_entries) + inside


@triton.jit
def tile_slots(
    tile, position, visible, seq, row, window, at, num_selected, w_width, c_width, T: tl.constexpr
):
    """Offsets of a tile's entries, and a mask of those present."""
    older = tile_choice(tile, visible, row, at, num_selected, T)
    page, inside, present = tile_pages(tile, older, position, seq, window, at, w_width, c_width, T)
    return slots_of(tile, page, inside, T), present


@triton.jit
def softmax(scores, present, qk_scale, MT: tl.constexpr):
    """Weights of a tile's entries, and the maximum."""
    scores = tl.where(present[None, :], scores * qk_scale, float("-inf"))
    top = tl.maximum(tl.max(scores, axis=1), -1e30)
    return tl.exp2(scores - top[:, None]).to(MT), top


@triton.jit
def tile_weights(
    queries, keys, present, num_tokens, qk_scale, JOINED: tl.constexpr, BH: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Softmax of one tile: weights, their sum `[BH]`, maximum.

    With joined pieces, products are inside conditions that always hold: a compiler that sees a
    product's result multiplied again assigns rows to warpgroups, and 64 rows are one warpgroup's
    worth, so both would compute all scores.
    """
    ENTRIES: tl.constexpr = T.bt
    scores = tl.zeros((BH, ENTRIES), tl.float32)
    weights = tl.zeros((BH, ENTRIES), T.mt)
    top = tl.zeros((BH,), tl.float32)
    for i in tl.static_range(len(keys)):
        if JOINED == 1:
            scores = dot(queries[i], tl.trans(keys[i]), scores, T.mt)
        elif num_tokens > i - 64:
            scores = dot(queries[i], tl.trans(keys[i]), scores, T.mt)
            if i == len(keys) - 1:
                weights, top = softmax(scores, present, qk_scale, T.mt)
    if JOINED == 1:
        weights, top = softmax(scores, present, qk_scale, T.mt)
    return weights, weights_sum(weights, BH, T.bt, T.mt), top


@triton.jit
def weights_sum(weights, BH: tl.constexpr, BT: tl.constexpr, MT: tl.constexpr):
    """The sum of weights as a product, in the same order as the sum of values."""
    ones = tl.full((BT, 16), 1.0, MT)
    return tl.max(dot(weights, ones, tl.zeros((BH, 16), tl.float32), MT), axis=1)  # all equal


@triton.jit
def add_tile(best, total, top, part):
    """Maximum and sum of weights after one more tile, and the factors for the old sums and for the
    tile: every variant merges with this formula."""
    new_best = tl.maximum(best, top)
    old_share = tl.exp2(best - new_best)
    new_share = tl.exp2(top - new_best)
    return new_best, tl.fma(part, new_share, total * old_share), old_share, new_share


@triton.jit
def finish_piece(
    acc, scale, out, q_at, live, position, frequencies, FIRST: tl.constexpr, BH: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Divide by the sum of weights, rotate the rotary channels back, store."""
    WIDTH: tl.constexpr = acc.shape[1]
    x = (acc * scale[:, None]).to(out.dtype.element_ty)
    if T.dim - T.rope < FIRST + WIDTH:
        TURNED: tl.constexpr = max(T.dim - T.rope - FIRST, 0)
        table = frequencies + max(FIRST - (T.dim - T.rope), 0) // 2
        x = rope_tile(x.to(tl.float32), position, table, -1.0, BH, TURNED, WIDTH, WIDTH)
    channel = FIRST + tl.arange(0, WIDTH)
    tl.store(out + q_at + channel[None, :], x.to(out.dtype.element_ty), mask=live[:, None])


def is_narrow(q, pool) -> bool:
    return q.dtype == torch.bfloat16 and ed.pool_format(pool) != ed.FP32


def most_entries(compressed) -> int:
    """Most compressed entries that any query sees."""
    if compressed is None:
        return 0
    if compressed.selected is not None:
        return compressed.selected.shape[1]
    return compressed.table.shape[1] * compressed.pool.page_entries


def tile_pool(pool) -> ed.EntryPool:
    """data, tail and the scale bytes of an entry as one integer."""
    data, tail, scale = ed.entry_pool(pool)
    return ed.EntryPool(
        data, tail, scale.view(torch.int64) if ed.pool_format(pool) == ed.FP8 else data
    )


def tile_places(to) -> tuple[TilePlaces, tuple[int, int, int]]:
    """Entry locations as kernel arguments; the most entries of any query and the table widths."""
    older, positions = to.compressed or to, to.batch.positions
    selected = None if to.compressed is None else to.compressed.selected
    places = TilePlaces(
        positions, to.batch.seq_idx, positions if selected is None else selected,
        tile_pool(to.pool), to.table, tile_pool(older.pool), older.table,
    )  # fmt: skip
    return places, (most_entries(to.compressed), to.table.shape[1], older.table.shape[1])


def tile_format(q, to) -> TileFormat:
    pool, older = to.pool, to.compressed or to
    narrow = tl.float16 if ed.pool_format(pool) == ed.FP8 else tl.bfloat16
    return TileFormat(
        kind=ed.pool_format(pool),
        nope=ed.nope_dim(pool),
        dim=pool.dim,
        rope=2 * to.frequencies.shape[0],
        selected=to.compressed is not None and to.compressed.selected is not None,
        bt=BT,
        wt=triton.cdiv(to.window, BT),
        w_entries=pool.page_entries,
        c_entries=older.pool.page_entries,
        mt=narrow if is_narrow(q, pool) else tl.float32,
        asm=not interpreting(),
    )


def ratio_of(to) -> int:
    return 1 if to.compressed is None else to.compressed.ratio
